"""`HotColdEmbeddingBag`: an `nn.EmbeddingBag` whose rows recsys updates.

It is a subclass of `nn.EmbeddingBag`. Without an optimizer it computes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import not_compiled
from recsys.embeddings.lookup.inputs import read_bag_call, without_row
from recsys.embeddings.lookup.lookup import look_up
from recsys.embeddings.rows.grads import require_no_optimizer
from recsys.embeddings.tables_module import OneTable, TableSettings

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.rows.bags import Bags

__all__ = ["HotColdEmbeddingBag"]


class HotColdEmbeddingBag(OneTable, nn.EmbeddingBag):
    """A drop-in for `torch.nn.EmbeddingBag`.

    Args:
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        max_norm: As in torch; None with an optimizer.
        norm_type: As in torch.
        scale_grad_by_freq: As in torch; False with an optimizer.
        mode: "sum", "mean" or, without an optimizer, "max".
        sparse: Whether `weight.grad` is sparse. It does not change how `optimizer` updates rows.
        _weight: The rows, (E, D), used without a copy; None draws them from N(0, 1).
        include_last_offset: Whether the last number of `offsets` is the end of the last bag.
        padding_idx: A row that is left out of pooling and gets no gradient.
        device: Device of the rows; with an optimizer the CPU or CUDA.
        dtype: Type of the rows; with an optimizer float32, float64 or bfloat16. Rows of bfloat16
            are pooled and updated in float32.
        optimizer: The update rule of the rows; None leaves gradients to a torch optimizer.
        auto_apply: Whether `optimizer` updates rows at the end of each backward. If False,
            `row_optimizer.step()` updates them once for all backward passes since the last step.
            Accumulation, clipping and `GradScaler` need False: with True, each backward updates
            rows by its gradients as they are, which are those of the scaled loss.
            One thread trains; others may evaluate meanwhile, under `torch.no_grad()`.
        stochastic_rounding: For rows of bfloat16 with an optimizer: round up or down at
            random so that a row is right on average, as FBGEMM does. False rounds to nearest, which
            loses updates that are small compared with the row.
        rounding_seed: Seed of that rounding. The same seed gives the same bits, because the
            random numbers depend only on seed, step and position of the row.
        budget: Fast memory in bytes or as "256MiB", for rows, their state and row maps. Rows that
            do not fit stay in `weight`, the cold tier. Results are the same to the last bit. A
            budget needs an optimizer. Write to rows only through `weight`: a write through a tensor
            kept from before may raise `ConflictingWrite`, and a write through a kept numpy array is
            not seen. None takes the budget of `plan`, or keeps all rows in fast memory.
        plan: Rows that do not leave fast memory, as a plan of a single table of this size, by any
            name; see `plan_hot_rows`. Without a plan, rows in frequent use stay in fast memory.
        cold_tier: Cold store: "host" in memory, or "file" in a folder on disk, for tables that are
            larger than memory.
        cold_path: Folder of the cold tier "file", created if missing: it chooses the disk. The
            files are scratch space without names, and are freed with the module. To keep rows, save
            a checkpoint or `state_dict()`.

    Attributes:
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Raises:
        AssertionError: `padding_idx` is not a row, or `_weight` has another shape.
        BudgetTooSmall: the budget has no room for the row map and a row.
        ColdTierError: the folder cannot be used, or the disk is full.
        ConfigError: budget, cold_tier and cold_path contradict each other.
        ProfileError: the plan is for other tables.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: a recsys optimizer does not support the device or dtype of the rows, or a
            setting.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
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
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            rows,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        if rows is not None and _weight is None:
            self.reset_parameters()
        self._optimize(settings, files)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool.

        Args:
            input: Ids of rows, one bag a line, or with `offsets` one bag after the other.
            offsets: Where each bag begins in a one-dimensional input.
            per_sample_weights: A factor for each id, with mode "sum".

        Shape:
            input (B, L), or (N,) with offsets (B,) or (B + 1,); per_sample_weights as input;
            result (B, D).

        Raises:
            IdOutOfRange: an id is not a row; on CUDA this may be an id of an earlier input.
            MalformedBags: input, offsets and weights do not make bags; on CUDA, offsets of an
                earlier input may not.
            NotImplementedError: there are weights, and `mode` is not "sum".
            ValueError: a weight is nan; the module's settings exclude each other; or the input is
                on another device than the rows.
        """
        if self._nodes is None and not self._try_begin(is_needed=True):
            return super().forward(input, offsets, per_sample_weights)
        run = self._break_graph if torch.compiler.is_compiling() else self._look_up
        return run(input, offsets, per_sample_weights)

    def lookups(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> list[tuple[Part, Bags]]:
        """What `forward` looks up; arguments and errors are its."""
        return [(self._parts[0], self._read(input, offsets, per_sample_weights))]

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> HotColdEmbeddingBag:
        """Make a module from existing rows, which share their memory with it.

        It takes no budget: with one, give the rows to the class, as `_weight`.

        Args:
            embeddings: The rows.
            freeze: Whether rows are never updated; True by default, as in torch.
            max_norm: As for the class.
            norm_type: As for the class.
            scale_grad_by_freq: As for the class.
            mode: As for the class.
            sparse: As for the class.
            include_last_offset: As for the class.
            padding_idx: As for the class.
            optimizer: As for the class; it does nothing while rows are frozen.
            auto_apply: As for the class.
            stochastic_rounding: As for the class.
            rounding_seed: As for the class.

        Shape:
            embeddings (E, D).

        Raises:
            AssertionError: `embeddings` does not have two dimensions.
        """
        module = super().from_pretrained(
            embeddings,
            freeze,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            include_last_offset,
            padding_idx,
        )
        assert isinstance(module, HotColdEmbeddingBag)  # torch builds a cls
        module._optimize_pretrained(
            TableSettings(optimizer, auto_apply, stochastic_rounding, rounding_seed),
            freeze=freeze,
        )
        return module

    @classmethod
    def from_torch(
        cls, bag: nn.EmbeddingBag, *, optimizer: RowOptimizer | None = None, auto_apply: bool = True
    ) -> HotColdEmbeddingBag:
        """Make a module with the settings and the same Parameter as a torch module.

        If `apply_optimizer_in_backward` gave the table an optimizer, this module reads its settings
        and state once, and removes its hook. Gradients from other uses of the table, such as a
        lookup by `bag`, join the update after the next backward of this module.

        Args:
            bag: The torch module. It remains usable and shares its rows.
            optimizer: The update rule of the rows. None takes the optimizer that
                `apply_optimizer_in_backward` gave the table; without one, gradients are left to
                torch, sparse or dense as `bag.sparse` says.
            auto_apply: As for the class.

        Raises:
            ValueError: a recsys optimizer does not support the rows, or already updates them; or
                `apply_optimizer_in_backward` gave the table an optimizer that cannot be translated,
                or one in addition to `optimizer`.
        """
        return cls._on(bag)._take_over(bag, optimizer, auto_apply=auto_apply)

    @classmethod
    def _on(cls, bag: nn.EmbeddingBag) -> HotColdEmbeddingBag:
        """A module without an optimizer on the same Parameter."""
        require_no_optimizer("weight", bag.weight)
        module = cls(
            bag.num_embeddings,
            bag.embedding_dim,
            bag.max_norm,
            bag.norm_type,
            bag.scale_grad_by_freq,
            bag.mode,
            bag.sparse,
            bag.weight,
            bag.include_last_offset,
            bag.padding_idx,
        )
        module.weight = bag.weight  # torch has made another one of the same memory
        return module

    @not_compiled
    def _break_graph(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        return self._look_up(input, offsets, per_sample_weights)

    def _look_up(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        assert self._nodes is not None
        bags = self._read(input, offsets, per_sample_weights)
        pooled = look_up(self._nodes, self._parts, bags, self.embedding_dim)
        return pooled.bfloat16() if self._parts[0][0].dtype is torch.bfloat16 else pooled

    def _read(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Bags:
        bags = read_bag_call(
            input,
            offsets,
            per_sample_weights,
            include_last_offset=self.include_last_offset,
            mode=self.mode,
            dtype=self._dtype(),
            device=self._parts[0][0].device,
        )
        return bags if self.padding_idx is None else without_row(bags, self.padding_idx)
