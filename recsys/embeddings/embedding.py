"""`HotColdEmbedding`: an `nn.Embedding` whose rows recsys updates.

It is a subclass of `nn.Embedding`. Without an optimizer it computes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import not_compiled
from recsys.embeddings.lookup.inputs import read_ids
from recsys.embeddings.lookup.lookup import look_up
from recsys.embeddings.rows.grads import require_no_optimizer
from recsys.embeddings.tables_module import OneTable, TableSettings

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.rows.bags import Bags

__all__ = ["HotColdEmbedding"]


class HotColdEmbedding(OneTable, nn.Embedding):
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
        RecsysError, AssertionError, TypeError or ValueError: As for `HotColdEmbeddingBag`.
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
        settings = TableSettings(
            optimizer,
            auto_apply,
            stochastic_rounding,
            rounding_seed,
            budget,
            cold_tier,
            cold_path,
            plan,
        )
        shape = num_embeddings, embedding_dim
        rows, files = settings.allocate_one(shape, _weight, dtype, device)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            rows,
            _freeze,
            device,
            dtype,
        )
        if rows is not None and _weight is None:
            self.reset_parameters()
        self._optimize(settings, files)

    def forward(self, input: Tensor) -> Tensor:
        """Look up.

        Shape:
            input any; result (*input, D).

        Raises:
            IdOutOfRange: an id is not a row.
            MalformedBags: the input is nested, or is not int64 or int32.
        """
        if self._nodes is None and not self._try_begin(is_needed=True):
            return super().forward(input)
        return (self._break_graph if torch.compiler.is_compiling() else self._look_up)(input)

    def lookups(self, input: Tensor) -> list[tuple[Part, Bags]]:
        """What `forward` looks up, as one bag a sample; the argument and errors are its."""
        bags = read_ids(input, self._dtype(), self._parts[0][0].device)
        if input.dim() > 1:
            bags = bags._replace(num_samples=len(input), num_bags=len(input))
        return [(self._parts[0], bags)]

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
            TableSettings(optimizer, auto_apply, stochastic_rounding, rounding_seed),
            freeze=freeze,
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
        return cls._on(module)._take_over(module, optimizer, auto_apply=auto_apply)

    @classmethod
    def _on(cls, module: nn.Embedding) -> HotColdEmbedding:
        """A module without an optimizer on the same Parameter."""
        require_no_optimizer("weight", module.weight)
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
        ours.weight = module.weight  # torch has made another one of the same memory
        return ours

    @not_compiled
    def _break_graph(self, input: Tensor) -> Tensor:
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> Tensor:
        assert self._nodes is not None
        dtype = self._dtype()
        rows = look_up(
            self._nodes,
            self._parts,
            read_ids(input, dtype, self._parts[0][0].device),
            self.embedding_dim,
            untrained_row=self.padding_idx,
        )
        rows = rows if input.dim() == 1 else rows.view(*input.shape, self.embedding_dim)
        if 1 in input.shape[:-1]:
            # Otherwise torch may build the `grad` of a parameter on the memory of the gradient.
            rows = rows * 1
        return rows.bfloat16() if dtype is torch.bfloat16 else rows
