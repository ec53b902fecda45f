"""A copy of an updater whose tables were not all added yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from recsys.embeddings.lookup.device_tables import AbstractTables
    from recsys.embeddings.update.group_updater import GroupUpdater
    from recsys.embeddings.update.row_updater import Places

__all__ = ["WITHOUT_TABLES", "PendingCopy"]

WITHOUT_TABLES = (
    "this optimizer has no tables: its module was deleted, or it was copied without its module; "
    "keep the module, and copy both together "
    "(module, optimizer = copy.deepcopy((module, module.row_optimizer))), or take row_optimizer "
    "of a copy of the module"
)


class PendingCopy:
    """A copy of an updater until all of its tables were added.

    Args:
        groups: The updater's groups.
        num_tables: Number of tables of each group.
        params: For each param group of the optimizer, its tables: number of the table's group, and
            number of the table in the group.
    """

    def __init__(
        self,
        groups: list[GroupUpdater],
        num_tables: list[int],
        params: list[list[tuple[int, int]]],
    ) -> None:
        self.groups, self.num_tables, self.params = groups, num_tables, params
        # For group and number: the table and its state.
        self.tables: dict[tuple[int, int], tuple[nn.Parameter, dict[str, Any]]] = {}
        self.modules: list[tuple[AbstractTables, Places]] = []
