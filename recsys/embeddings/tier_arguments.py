"""`TierArguments`: the arguments of a module that decide where its rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.embeddings.lookup.device_tables import empty_tables, slot_device
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.table import DATA_TYPES, data_type_of
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_tier import open_cold_files, require_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["TierArguments"]


class TierArguments(NamedTuple):
    """Arguments of a module; `of_table` or `of_collection` checks them and opens the files.

    Attributes:
        budget, plan, cold_tier, cold_path, device: As for the module.
        files: After the check, the open files of the tables, if the cold store is on disk.
    """

    budget: int | str | None
    plan: HotPlan | None
    cold_tier: str
    cold_path: Path | str | None
    device: torch.device | str | None
    files: ColdFiles | None = None

    def of_table(
        self, shape: tuple[int, int], dtype: torch.dtype, optimizer: RowOptimizer | None
    ) -> TierArguments:
        """Check the arguments of a module with one table, "weight"; errors as for the module."""
        self._require_optimizer(optimizer)
        plan = None if self.plan is None else self.plan.of_bag(*shape, self.budget)
        return self._replace(plan=plan)._open_files({"weight": (shape, dtype)}, optimizer)

    def of_collection(
        self, tables: Sequence[TableConfig], optimizer: RowOptimizer | None
    ) -> TierArguments:
        """Check the arguments of a collection; errors as for the collection."""
        self._require_optimizer(optimizer)
        plan = None if self.plan is None else self.plan.of_tables(tables, self.budget)
        kinds = {
            each.name: (
                (each.num_embeddings, each.embedding_dim),
                DATA_TYPES[data_type_of(each)],
            )
            for each in tables
        }
        return self._replace(plan=plan)._open_files(kinds, optimizer)

    @property
    def has_budget(self) -> bool:
        """Whether rows are in two tiers, if not all of them fit."""
        return self.budget is not None or self.plan is not None

    @property
    def has_trained_rows(self) -> bool:
        """Whether the folder has the rows of an earlier module."""
        return self.files is not None and not self.files.is_new

    def make_rows(self, tables: Sequence[TableConfig]) -> list[Tensor]:
        """The rows of each table of a collection, (E, D), not initialized unless trained."""
        if self.files is None:
            return empty_tables(tables, self.device, has_budget=self.has_budget)
        return [self.files.begin_with(table.name, None) for table in tables]

    def begin(self, updater: RowUpdater, tables: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Give an updater's tables tiers, if there is a budget; errors as for `RowUpdater.tier`.

        Args:
            updater: Updates the rows.
            tables: The tables by name, in the order of the plan.
        """
        budget = self.budget
        pinned: dict[nn.Parameter, Any] = {}
        if self.plan is not None:
            weights, rows = (table for _, table in tables), self.plan.pinned_by_table()
            budget, pinned = self.plan.budget_bytes, dict(zip(weights, rows, strict=True))
        if budget is not None:
            names = {table: name for name, table in reversed(tables)}  # the first name of each
            device = slot_device(self.device)
            updater.tier(budget, pinned, files=self.files, names=names, device=device)

    def _require_optimizer(self, optimizer: object) -> None:
        require_formula(optimizer)
        require_plan(self.plan)
        if optimizer is None and self.has_budget:
            raise ValueError(NEEDS_OPTIMIZER)

    def _open_files(
        self,
        tables: Mapping[str, tuple[tuple[int, int], torch.dtype]],
        optimizer: RowOptimizer | None,
    ) -> TierArguments:
        if self.cold_tier == "file":
            require_memory(self.device)
        files = open_cold_files(
            self.cold_tier, self.cold_path, tables, has_budget=self.has_budget, formula=optimizer
        )
        return self._replace(files=files)
