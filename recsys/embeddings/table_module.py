"""What `HotColdEmbeddingBag` and `HotColdEmbedding` share: one table, and what updates its rows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from recsys._support.memory import empty_rows
from recsys._support.torch_compat import are_functorch_transforms_active, is_batched, tracing_state
from recsys.embeddings.lookup.bag_lookup import BagPlace
from recsys.embeddings.lookup.device_tables import AbstractTables, slot_device, table_device
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import require_device
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_files import open_cold_files, require_memory
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import read_marks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = ["Rows", "TableModule", "find_rows", "is_left_to_torch", "require_plain"]


class Rows(NamedTuple):
    """Where a module's table gets its rows.

    Attributes:
        weight: They, (E, D); None where torch makes and draws them.
        are_to_draw: Whether nothing is in them yet.
        plan: Which of them are never to leave fast memory, of this table.
        files: Where they wait, if on disk.
    """

    weight: Tensor | None
    are_to_draw: bool
    plan: HotPlan | None
    files: ColdFiles | None


def find_rows(
    shape: tuple[int, int],
    weight: Tensor | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    optimizer: RowOptimizer | None,
    budget: int | str | None,
    plan: HotPlan | None,
    cold_tier: str,
    cold_path: Path | str | None,
) -> Rows:
    """Find memory for a table; arguments as for `HotColdEmbeddingBag`.

    Raises:
        ProfileError: the plan is of other tables.
        ColdTierError: the folder cannot be used, has another table, or there is no room.
        ValueError: rows are such as a recsys optimizer cannot update.
    """
    if optimizer is None and (budget is not None or plan is not None):
        raise ValueError(NEEDS_OPTIMIZER)
    if plan is not None:
        plan = plan.of_bag(*shape, budget)
    dtype = dtype or torch.get_default_dtype()
    has_budget = budget is not None or plan is not None
    if cold_tier == "file":
        require_memory(device)
    files = open_cold_files(cold_tier, cold_path, {"weight": (shape, dtype)}, has_budget=has_budget)
    if files is not None:
        rows = files.begin_with("weight", weight)
        return Rows(rows, files.is_new and weight is None, plan, files)
    if weight is not None or optimizer is None:
        return Rows(weight, False, plan, None)
    require_device(
        device, "leave out optimizer=, and an optimizer of torch's updates rows on any device"
    )
    rows = empty_rows(*shape, dtype=dtype, device=table_device(device, has_budget=has_budget))
    return Rows(rows, True, plan, None)


class TableModule(AbstractTables):
    """A module of torch's with one table, `weight`, whose rows a recsys optimizer may update.

    Attributes:
        row_optimizer: `optimizer` as an optimizer of torch's, for its `param_groups`; None without.
    """

    # torch's names of them
    weight: Tensor
    mode: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    row_optimizer: FusedOptimizer | None
    _group: TableGroup | None = None
    _lookups: Lookups | None = None

    def holders(self) -> list[nn.Module]:
        """The module itself."""
        return [self]

    def attach(self, updater: RowUpdater, places: Places) -> None:
        """Hand gradients over from now on; see `AbstractTables`."""
        super().attach(updater, places)
        [(self._group, number)] = places
        self._lookups = Lookups.one(number, self.weight.shape[1])

    def detach(self) -> None:
        """Leave gradients at `weight` again, as torch's module does."""
        super().detach()
        self._group = self._lookups = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; see `AbstractTables`."""
        return super().__getstate__() | {"_group": None, "_lookups": None}

    def _place(self) -> BagPlace:
        if self._parameters.get("weight") is not self._tables_then[0]:
            self._require_tables()
        assert self._group is not None
        assert self._lookups is not None
        return BagPlace(self._group, self._lookups, self._updater)

    def _call(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        bags: tuple[int, ...],
        *,
        is_mean: bool,
        padding_idx: int | None,
    ) -> Tensor | None:
        """Look up together with other calls of a step; see `BagCalls.look_up`."""
        if self._parameters.get("weight") is not self._tables_then[0]:
            self._require_tables()
        group, updater, lookups = self._group, self._updater, self._lookups
        assert group is not None
        assert updater is not None
        assert lookups is not None
        return group.calls(updater).look_up(
            lookups.distinct_tables[0],
            self._tables_then[0],
            lookups,
            ids,
            offsets,
            bags,
            is_mean=is_mean,
            padding_idx=padding_idx,
        )

    def _optimize(
        self,
        optimizer: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        files: ColdFiles | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Update the rows by a formula from now on."""
        table = cast("nn.Parameter", self.weight)
        group = TableGroup([table], [self.sparse])
        if not table.is_meta:
            group.space()  # refuses rows that kernels cannot work on
        self.row_optimizer = FusedOptimizer(
            {"weight": (table, "")},
            [group],
            optimizer,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )
        self.attach(self.row_optimizer.updater, [(group, 0)])
        pinned = None
        if plan is not None:
            [pinned_rows] = plan.pinned_by_table()
            pinned = {table: pinned_rows}
            budget = plan.budget_bytes
        if budget is not None:
            self.row_optimizer.updater.tier(
                budget,
                pinned,
                files=files,
                names={table: "weight"},
                device=slot_device(device),
            )

    def _optimize_pretrained(
        self,
        optimizer: RowOptimizer | None,
        *,
        freeze: bool,
        auto_apply: bool,
        stochastic_rounding: bool,
        rounding_seed: int,
    ) -> None:
        """The rest of `from_pretrained`."""
        if optimizer is None:
            return
        if freeze:
            warnings.warn(
                "from_pretrained freezes rows unless freeze=False is given: the optimizer updates "
                "none until weight.requires_grad is set",
                stacklevel=3,
            )
        self._optimize(
            optimizer,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )

    def _take_over(
        self, module: nn.Module, optimizer: RowOptimizer | None, *, auto_apply: bool
    ) -> None:
        """The rest of `from_torch`: update the rows by a formula, or by that of marks."""
        weight = cast("nn.Parameter", self.weight)
        marks = read_marks([("weight", weight)], optimizer)
        formula = optimizer if marks is None else marks.formula
        if formula is not None:
            self._optimize(formula, auto_apply=auto_apply)
        if marks is not None:
            assert self.row_optimizer is not None
            marks.hand_over(self.row_optimizer)
        self.train(module.training)


def is_left_to_torch(input: Tensor, weight: Tensor) -> bool:
    """Whether there is nothing for a kernel to read: on meta, under `torch.jit.trace` and vmap."""
    return (
        (input.is_meta and weight.is_meta)
        or tracing_state() is not None
        or (are_functorch_transforms_active() and is_batched(input))
    )


def require_plain(module: nn.Module) -> None:
    """Refuse a module whose rows a recsys optimizer updates already.

    Raises:
        ValueError: one does.
    """
    require_no_updater("weight", cast("nn.Parameter", module.weight))
