"""A copy of an updater whose tables were not all added yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from recsys.embeddings.lookup.abstract_tables import AbstractTables
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

    In a copy of a part of a model some tables are never added, so its modules have no updater.

    Args:
        groups: The groups of the updater that is copied.
        optimizer: Its optimizer.

    Attributes:
        groups: The groups of the copy; they get their tables by `bind`.
        modules: The copied modules so far, each with the group and number of its tables.
    """

    def __init__(self, groups: list[GroupUpdater], optimizer: torch.optim.Optimizer) -> None:
        self.groups = groups
        self.modules: list[tuple[AbstractTables, Places]] = []
        self._num_tables = [len(each.group.tables) for each in groups]
        places = {
            id(table): (group, number)
            for group, each in enumerate(groups)
            for number, table in enumerate(each.group.tables)
        }
        # For each param group its tables: number of the group, and number of the table in it.
        self._params = [
            [places[id(table)] for table in group["params"]] for group in optimizer.param_groups
        ]
        # For group and number: the table and its state.
        self._tables: dict[tuple[int, int], tuple[nn.Parameter, dict[str, Any]]] = {}

    def add(self, module: AbstractTables, places: Places, states: Sequence[dict[str, Any]]) -> bool:
        """Add a module; arguments as for `RowUpdater.add_copied_module`.

        Returns:
            Whether all tables were added.
        """
        self.modules.append((module, places))
        for holder, (group, number), state in zip(module.holders(), places, states, strict=True):
            self._tables[id(group), number] = cast("nn.Parameter", holder.weight), state
        return len(self._tables) == sum(self._num_tables)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the groups and the optimizer of the copy their tables, and store their state."""
        for group, num_tables in zip(self.groups, self._num_tables, strict=True):
            members = [self._tables[id(group.group), number] for number in range(num_tables)]
            group.group.tables = [table for table, _ in members]
            optimizer.state.update({table: state for table, state in members if state})
            if group.group.tiers is not None:
                group.group.tiers.make_empty_slots()
            group.group.forget_space()
            group.group.bind()
        for settings, params in zip(optimizer.param_groups, self._params, strict=True):
            settings["params"] = [
                self.groups[group].group.tables[number] for group, number in params
            ]
