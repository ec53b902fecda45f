"""`HotColdEmbedding`: `nn.Embedding` whose rows are updated by an optimizer of their own.

    input -> bags of one id -> one kernel -> rows
    gradient -> ledger -> update

It is an `nn.Embedding`, so code that expects one takes it. Without an optimizer it computes as one;
what it adds is errors that name the place of an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys._support.tracing import leaf_call
from recsys.embeddings.lookup.bag_lookup import look_up_ids, prefetch_bags
from recsys.embeddings.rows.bag_input import read_ids
from recsys.embeddings.table_module import TableModule, find_rows, is_left_to_torch, require_plain
from recsys.embeddings.tiers.ahead import Prefetched

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["HotColdEmbedding"]


class HotColdEmbedding(TableModule, nn.Embedding):
    """A drop-in for `torch.nn.Embedding`.

    Args:
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        padding_idx: A row that is never updated; drawn as zeros.
        max_norm: Rows looked up whose norm is larger are scaled down to it, in place.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often the mini-batch has it.
        sparse: Whether `weight.grad` is sparse; `optimizer` updates rows alike in either case.
        _weight: The rows, (E, D), which are shared; drawn from N(0, 1) where None.
        _freeze: Whether rows stay as they are.
        device: As for `HotColdEmbeddingBag`.
        dtype: As for `HotColdEmbeddingBag`.
        optimizer: As for `HotColdEmbeddingBag`.
        auto_apply: As for `HotColdEmbeddingBag`.
        stochastic_rounding: As for `HotColdEmbeddingBag`.
        rounding_seed: As for `HotColdEmbeddingBag`.
        budget: As for `HotColdEmbeddingBag`.
        plan: As for `HotColdEmbeddingBag`.
        cold_tier: As for `HotColdEmbeddingBag`.
        cold_path: As for `HotColdEmbeddingBag`.

    Attributes:
        row_optimizer: `optimizer` as an optimizer of torch's, for its `param_groups`; None without.

    Raises:
        AssertionError: `padding_idx` is no row, or `_weight` has another shape.
        ProfileError: the plan is of other tables.
        ColdTierError: the folder cannot be used, has another table, or there is no room.
        ValueError: rows are such as a recsys optimizer cannot update.
    """

    mode = "sum"  # of bags of one id

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
    ) -> None:
        rows = find_rows(
            (num_embeddings, embedding_dim),
            _weight,
            device,
            dtype,
            optimizer=optimizer,
            budget=budget,
            plan=plan,
            cold_tier=cold_tier,
            cold_path=cold_path,
        )
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            rows.weight,
            _freeze,
            device,
            dtype,
        )
        if rows.are_to_draw:
            self.reset_parameters()
        self.row_optimizer = None
        if optimizer is not None:
            self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
                budget=budget,
                plan=rows.plan,
                files=rows.files,
                device=device,
            )

    def forward(self, input: Tensor) -> Tensor:
        """Look up.

        Shape:
            input any; result (*input, D).

        Raises:
            IdOutOfRange: a value is no row; on CUDA, of an input before.
            MalformedBags: the input is nested, or of another dtype than int64 and int32.
            ValueError: the input is not where the rows are.
        """
        if type(input) is not Tensor:
            traced = leaf_call(self, input)
            if traced is not None:
                return cast("Tensor", traced)
        if self._updater is not None:
            if torch.compiler.is_compiling():
                return cast("Tensor", self._break_graph(input))
            return self._look_up(input)
        if self._is_part:
            self._warn_of_part()
        if torch.compiler.is_compiling() or not input.is_cpu:
            return super().forward(input)
        try:
            return super().forward(input)
        except (IndexError, RuntimeError) as error:
            ids = read_ids(input)
            bad = ids.first_bad(len(self.weight))
            if bad is None:
                raise
            raise ids.id_error(bad, len(self.weight)) from error

    def prefetch(self, input: Tensor) -> Prefetched:
        """Have the rows of a lookup to come fetched in the background; see `HotColdEmbeddingBag`.

        Shape:
            As for `forward`.

        Raises:
            IdOutOfRange: as for `forward`.
            MalformedBags: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        claimed = prefetch_bags(self, self._place(), read_ids(input))
        if input.dim() > 1 and input.numel():
            claimed.make_samples_of(input.numel() // len(input))
        return claimed

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> HotColdEmbedding:
        """A module on rows that are there already; it shares their memory.

        Args:
            embeddings: The rows.
            freeze: Whether they stay as they are; as in torch they do, unless told otherwise.
            padding_idx: As for the class.
            max_norm: As for the class.
            norm_type: As for the class.
            scale_grad_by_freq: As for the class.
            sparse: As for the class.
            optimizer: As for the class; it has nothing to do while rows are frozen.
            auto_apply: As for the class.
            stochastic_rounding: As for the class.
            rounding_seed: As for the class.

        Shape:
            embeddings (E, D).

        Raises:
            AssertionError: `embeddings` has not two dimensions.
        """
        module = super().from_pretrained(  # type: ignore[no-untyped-call]
            embeddings, freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
        assert isinstance(module, HotColdEmbedding)  # torch builds a cls
        module._optimize_pretrained(
            optimizer,
            freeze=freeze,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )
        return module

    @classmethod
    def from_torch(
        cls, module: nn.Embedding, *, optimizer: RowOptimizer | None = None, auto_apply: bool = True
    ) -> HotColdEmbedding:
        """Take over a module of torch's; see `HotColdEmbeddingBag.from_torch`.

        Args:
            module: It may be used on, on the same rows.
            optimizer: As there.
            auto_apply: As there.

        Raises:
            ValueError: as there.
        """
        require_plain(module)
        ours = cls._on_weight_of(module)
        ours._take_over(module, optimizer, auto_apply=auto_apply)
        return ours

    @classmethod
    def _on_weight_of(cls, module: nn.Embedding) -> HotColdEmbedding:
        ours = cls(
            module.num_embeddings,
            module.embedding_dim,
            module.padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
            module.weight,
        )
        ours.weight = module.weight
        return ours

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _break_graph(self, input: Tensor) -> Tensor:
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> Tensor:
        is_simple = self.max_norm is None and not self.scale_grad_by_freq
        if is_simple and type(input) is Tensor and not input.is_nested:
            rows = self._call(input, None, input.shape, is_mean=False, padding_idx=self.padding_idx)
            if rows is not None:
                return rows
        if is_left_to_torch(input, self.weight):
            return super().forward(input)
        rows = look_up_ids(self, self._place(), read_ids(input)).to(self.weight.dtype)
        return rows.view(*input.shape, self.embedding_dim)
