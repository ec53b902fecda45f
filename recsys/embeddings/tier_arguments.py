"""Where the rows of a module are: `TierArguments`, and the memory of new tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys._support.cuda.own_pages import empty_in_own_pages
from recsys._support.memory import empty_rows
from recsys.embeddings.kernels.choice import kernels_on
from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.table import DATA_TYPES, TableConfig, data_type_of
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_tier import open_cold_files, require_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["TierArguments", "empty_table", "empty_tables"]


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
        plan = self.plan
        if plan is not None:  # a plan of one table, of any name
            name, (num_embeddings, embedding_dim) = next(iter(plan.tables)), shape
            table = TableConfig(
                name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim
            )
            plan = plan.of_tables([table], self.budget)
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

    def make_rows(self, tables: Sequence[TableConfig]) -> list[Tensor]:
        """The rows of each table of a collection, (E, D), not initialized."""
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
            device = _slot_device(self.device)
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


def empty_table(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    *,
    has_budget: bool,
) -> Tensor:
    """Allocate a table where it is to be: with a budget, in host memory, which a GPU reaches.

    Args:
        shape: (E, D).
        dtype: Of the rows.
        device: As for `torch.empty`.
        has_budget: Whether rows are in two tiers.
    """
    if has_budget and _slot_device(device) is not None:
        return empty_in_own_pages(shape, dtype)
    on_device = None if device is None else torch.device(device)
    return empty_rows(*shape, dtype=dtype, device=on_device)


def empty_tables(
    tables: Sequence[TableConfig], device: torch.device | str | None, *, has_budget: bool
) -> list[Tensor]:
    """Allocate tables; on a device, tables that are looked up together share one block of memory.

    Args:
        tables: The tables of a collection.
        device: As for `torch.empty`.
        has_budget: Whether rows are in two tiers.
    """
    found = torch.get_default_device() if device is None else torch.device(device)
    dtypes = [DATA_TYPES[data_type_of(table)] for table in tables]
    if has_budget or kernels_on(found).errors is None:
        return [
            empty_table(
                (table.num_embeddings, table.embedding_dim), dtype, device, has_budget=has_budget
            )
            for table, dtype in zip(tables, dtypes, strict=True)
        ]
    together: dict[tuple[int, str, torch.dtype], list[int]] = {}
    for number, (table, dtype) in enumerate(zip(tables, dtypes, strict=True)):
        kind = table.embedding_dim, pooling_of(table), dtype
        together.setdefault(kind, []).append(number)
    rows: dict[int, Tensor] = {}
    for (dim, _, dtype), numbers in together.items():
        sizes = [tables[number].num_embeddings for number in numbers]
        piece = torch.empty(sum(sizes), dim, dtype=dtype, device=found)
        rows.update(zip(numbers, torch.split(piece, sizes), strict=True))
    return [rows[number] for number in range(len(tables))]


def _slot_device(device: torch.device | str | None) -> torch.device | None:
    """The device of the slots; None for that of the tables."""
    found = torch.get_default_device() if device is None else torch.device(device)
    return found if found.type == "cuda" else None
