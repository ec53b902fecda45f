"""`HotColdEmbedding`: an `nn.Embedding` whose rows recsys updates.

    input -> BagCalls, DeviceCalls -> rows    of most inputs; calls share a node
          -> BagLookup -> rows                all others; names an invalid id
    gradient -> ledger -> update

It is a subclass of `nn.Embedding`. Without an optimizer it computes the same, and its errors name
the position of an invalid id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import not_compiled
from recsys.embeddings.rows.bag_input import read_ids
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.table_module import TableModule, allocate_rows
from recsys.embeddings.tier_arguments import TierArguments
from recsys.embeddings.tiers.ahead import Prefetched

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["HotColdEmbedding"]


class HotColdEmbedding(TableModule, nn.Embedding):
    """A drop-in for `torch.nn.Embedding`.

    Args:
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        padding_idx: A row that is never updated; initialized with zeros. With a budget it is looked
            up, counted and given a slot like any other.
        max_norm: As in torch; None with an optimizer.
        norm_type: As in torch.
        scale_grad_by_freq: As in torch; False with an optimizer.
        sparse: Whether `weight.grad` is sparse. It does not change how `optimizer` updates rows.
        _weight: The rows, (E, D), used without a copy; None draws them from N(0, 1).
        _freeze: Whether rows are never updated.
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
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Raises:
        AssertionError: `padding_idx` is not a row, or `_weight` has another shape.
        ProfileError: the plan is for other tables.
        ColdTierError: the folder cannot be used, or the disk is full.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: a recsys optimizer does not support the device or dtype of the rows, or a
            setting.
    """

    mode = "sum"  # the pooling of bags of one id

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
        rows = allocate_rows(
            (num_embeddings, embedding_dim),
            _weight,
            dtype,
            optimizer,
            TierArguments(budget, plan, cold_tier, cold_path, device),
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
            updater = self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
            )
            rows.tiers.begin(updater, [("weight", cast("nn.Parameter", self.weight))])

    def forward(self, input: Tensor) -> Tensor:
        """Look up.

        Shape:
            input any; result (*input, D).

        Raises:
            IdOutOfRange: an id is not a row; on CUDA this may be an id of an earlier input.
            MalformedBags: the input is nested, or is not int64 or int32.
            TypeError: the input is not a tensor.
            ValueError: the input is on another device than the rows.
        """
        if type(input) is not Tensor:
            traced = self._leaf_call(input)
            if traced is not None:
                return cast("Tensor", traced)
            if not isinstance(input, Tensor):
                raise TypeError(
                    f"ids must be a tensor, got {type(input).__name__}; convert them by "
                    "torch.tensor(ids)"
                )
        if self._updater is not None:
            if torch.compiler.is_compiling():
                return self._break_graph(input)
            return self._look_up(input)
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
        """Start to fetch the rows of a later lookup; see `HotColdEmbeddingBag.prefetch`.

        Shape:
            As for `forward`.

        Raises:
            IdOutOfRange: as for `forward`.
            MalformedBags: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        return self._request(input).claim()

    def parts(self, input: Tensor) -> list[Part]:
        """The rows that `forward` looks up; see `AbstractTables.parts`."""
        ids = read_ids(input)
        if input.dim() > 1 and input.numel():  # one bag of several ids for each sample
            step = input.numel() // len(input)
            ids = ids._replace(offsets=ids.offsets[::step].contiguous(), is_one_hot=step == 1)
        return self._bag_lookup().parts(ids)

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
        """Make a module from existing rows, which share their memory with it.

        It takes no budget: with one, give the rows to the class, as `_weight`.

        Args:
            embeddings: The rows.
            freeze: Whether rows are never updated; True by default, as in torch.
            padding_idx: As for the class.
            max_norm: As for the class.
            norm_type: As for the class.
            scale_grad_by_freq: As for the class.
            sparse: As for the class.
            optimizer: As for the class; it does nothing while rows are frozen.
            auto_apply: As for the class.
            stochastic_rounding: As for the class.
            rounding_seed: As for the class.

        Shape:
            embeddings (E, D).

        Raises:
            AssertionError: `embeddings` does not have two dimensions.
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
        """Make a module on the same Parameter; see `HotColdEmbeddingBag.from_torch`.

        Args:
            module: The torch module. It remains usable and shares its rows.
            optimizer: As for `HotColdEmbeddingBag.from_torch`.
            auto_apply: As for the class.

        Raises:
            ValueError: as for `HotColdEmbeddingBag.from_torch`.
        """
        require_no_updater("weight", cast("nn.Parameter", module.weight))
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

    def _request(self, input: Tensor) -> PrefetchRequest:
        request = None
        if self._is_plain(input):
            calls, lookups = self._calls_and_lookups()
            request = calls.request(lookups, input, input.shape)
        if request is None:
            request = self._bag_lookup().request(read_ids(input))
        if input.dim() < 2 or not input.numel():
            return request
        step = input.numel() // len(input)
        return request._replace(first_bags=torch.arange(0, input.numel() + 1, step, device="cpu"))

    @not_compiled
    def _break_graph(self, input: Tensor) -> Tensor:
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> Tensor:
        if self._is_plain(input):
            calls, lookups = self._calls_and_lookups()
            rows = calls.look_up(
                lookups,
                input,
                None,
                None,
                input.shape,
                is_mean=False,
                padding_idx=self.padding_idx,
                left_out=None,
            )
            if rows is not None:
                return rows
        rows = self._bag_lookup().pool(read_ids(input)).to(self.weight.dtype)
        return rows.view(*input.shape, self.embedding_dim)

    def _is_plain(self, input: Tensor) -> bool:
        """Whether ids and settings need no more than rows."""
        is_simple = self.max_norm is None and not self.scale_grad_by_freq
        return is_simple and type(input) is Tensor and not input.is_nested
