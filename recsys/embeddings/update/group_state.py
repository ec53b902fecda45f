"""The optimizer's state of one table group, and each state array as a row space for the kernels.

The optimizer has the state by table, and `load_state_dict` may replace it. A kernel takes one array
of all tables at once. With files, the arrays lie in them, beside the tables.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.cuda.own_pages import empty_in_own_pages, in_own_pages
from recsys._support.memory import empty_rows
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.translation import Columns

__all__ = ["GroupState", "require_state"]

_NO_STATE: dict[str, Any] = {}  # state of a table that was never updated; do not write to it


class _StateArrays(NamedTuple):
    """One state array of every table, as a row space."""

    name: str
    found: list[Tensor | None]  # the optimizer's; None for a table that was never updated
    is_whole: bool  # whether every table has one
    arrays: list[Tensor]  # as `found`, with an empty tensor instead of None
    space: RowSpace

    def is_replaced(self, by_table: Sequence[dict[str, Any]]) -> bool:
        """Whether the optimizer has another array, or none any more, in place of one of these."""
        pairs = zip(self.found, by_table, strict=True)
        return any(old is not None and state.get(self.name) is not old for old, state in pairs)

    def is_of(self, by_table: Sequence[dict[str, Any]], updated: Sequence[int]) -> bool:
        """Whether the optimizer still has these arrays, and one for each updated table."""
        found = [state.get(self.name) for state in by_table]
        return (
            all(map(is_, found, self.found))
            and (self.is_whole or all(found[table] is not None for table in updated))
            and self.space.holds(self.arrays)
        )


class GroupState:
    """The optimizer's state of one table group.

    Args:
        group: Has the tables.
        optimizer: Has their state.
    """

    def __init__(self, group: TableGroup, optimizer: torch.optim.Optimizer) -> None:
        self._group, self._optimizer = group, optimizer
        self._arrays: list[_StateArrays] = []
        self._arrays_of: RowSpace | None = None
        # The tables and all of the optimizer's state when it was last read, and each table's state.
        self._last_objects: list[Any] = []
        self._last_by_table: list[dict[str, Any]] = []
        self.files: ColdFiles | None = None
        self._names: list[str] = []  # of the tables in `files`

    def by_table(self, updated: Sequence[int] = ()) -> tuple[list[dict[str, Any]], list[int]]:
        """The state of every table, and those of `updated` that have none yet.

        A table without state has an empty dictionary; that of an updated table may be written to.
        """
        known = self._optimizer.state
        # Parameters hash in Python, which is slow, so they are looked up only after a change.
        now = [self._group.tables, *known.keys(), *known.values()]
        if len(now) != len(self._last_objects) or not all(map(is_, now, self._last_objects)):
            self._last_objects = now
            self._last_by_table = [known.get(weight, _NO_STATE) for weight in self._group.tables]
        found = list(self._last_by_table)
        new = [table for table in updated if found[table] is _NO_STATE]
        for table in new:
            found[table] = {}
        return found, new

    def spaces(
        self,
        rows: RowSpace,
        columns: Columns,
        by_table: Sequence[dict[str, Any]],
        updated: Sequence[int] = (),
    ) -> list[RowSpace]:
        """Each state array of all tables as a row space; made again if the optimizer has others.

        Args:
            rows: The tables.
            columns: The state arrays.
            by_table: The state of every table.
            updated: Tables that get all arrays; others may have none yet.

        Raises:
            ValueError: an array belongs to another table or another formula.
        """
        known = self._arrays
        if not (known or columns):
            return []
        if (
            rows is self._arrays_of
            and [each.name for each in known] == list(columns)
            and all(each.is_of(by_table, updated) for each in known)
        ):
            return [each.space for each in known]
        return self._make_spaces(rows, columns, by_table, updated)

    def reload(self, rows: RowSpace, columns: Columns) -> None:
        """Use what `load_state_dict` put into the optimizer; arguments as for `spaces`."""
        by_table, _ = self.by_table()
        self._make_spaces(rows, columns, by_table, ())

    def _make_spaces(
        self,
        rows: RowSpace,
        columns: Columns,
        by_table: Sequence[dict[str, Any]],
        updated: Sequence[int],
    ) -> list[RowSpace]:
        tiers, before = self._group.tiers, self._arrays
        if tiers is not None:
            # Pending transfers must end before a state file is made again.
            tiers.flush()
            tiers.residency.settle()
        # Asked before and after, because files keep an array of the user in the array that it
        # replaced, and an array may be converted.
        are_others = any(each.is_replaced(by_table) for each in before)
        self._arrays = [self._collect(*each, by_table, updated) for each in columns.items()]
        self._arrays_of = rows
        spaces = [each.space for each in self._arrays]
        if tiers is not None:
            are_others = are_others or any(each.is_replaced(by_table) for each in before)
            tiers.keep_state_in(spaces, are_others=are_others)
        return spaces

    def use_files(self, files: ColdFiles, names: Mapping[nn.Parameter, str]) -> None:
        """Keep the state in files, beside the tables.

        Args:
            files: The files of the tables.
            names: Names of all tables in `files`.
        """
        self.files = files
        self._names = [names[weight] for weight in self._group.tables]

    def name_in_files(self, table: int) -> str:
        """A table's name in the files of `use_files`."""
        return self._names[table]

    def _collect(
        self,
        name: str,
        columns: tuple[int, ...],
        by_table: Sequence[dict[str, Any]],
        updated: Sequence[int],
    ) -> _StateArrays:
        tables = self._group.tables
        arrays = [
            self._array_of(table, state, name, columns, is_needed=table in updated)
            for table, state in enumerate(by_table)
        ]
        require_state(name, columns, tables, arrays)
        space = self._group.make_space(arrays)
        found = [state.get(name) for state in by_table]
        return _StateArrays(name, found, all(each is not None for each in found), arrays, space)

    def _array_of(
        self,
        table: int,
        state: dict[str, Any],
        name: str,
        columns: tuple[int, ...],
        *,
        is_needed: bool,
    ) -> Tensor:
        """A table's state array, (E, *columns); one number per row may also be stored as (E, 1).

        As in torch, the state is made at the first update of the table.
        """
        weight, tiers = self._group.tables[table], self._group.tiers
        is_reached = tiers is not None and tiers.are_reached
        dtype = compute_dtype(weight.dtype)
        known: Tensor | None = state.get(name)
        if known is None:
            if not is_needed:
                return weight.new_empty(0, *columns, dtype=dtype)
            if is_reached:
                known = empty_in_own_pages((len(weight), *columns), dtype)
            elif self.files is None:
                known = empty_rows(len(weight), *columns, dtype=dtype, device=weight.device).zero_()
            else:
                known = self.files.make(self._names[table], name, (len(weight), *columns), dtype)
            if self._group.changed_rows is not None:
                self._group.changed_rows.note_new_state(known)
        elif known.dtype != dtype or known.device != weight.device or not known.is_contiguous():
            known = known.to(weight.device, dtype).contiguous()
        if known.shape == weight.shape[:1] and columns == (1,):
            known = known.unsqueeze(1)  # as earlier checkpoints have it
        if self.files is not None and self.files.find(known) is None and len(known):
            known = self.files.keep(self._names[table], name, known)
        if is_reached:
            known = in_own_pages(known)
        state[name] = known
        return known


def require_state(
    name: str, columns: tuple[int, ...], weights: Sequence[Tensor], arrays: Sequence[Tensor]
) -> None:
    """Check the shapes of state arrays. Without this a kernel could write out of bounds.

    Args:
        name: The optimizer's name for the state.
        columns: Shape of one row's state, (D,) or ().
        weights: The tables.
        arrays: The array of each table; empty for one that was never updated.

    Raises:
        ValueError: an array belongs to another table or another formula.
    """
    for weight, state in zip(weights, arrays, strict=True):
        wanted = (len(weight), *columns)
        numel = len(weight) * (columns[0] if columns else 1)
        if state.numel() and (len(state), state.numel()) != (len(weight), numel):
            raise ValueError(
                f"optimizer state {name!r} of a table of shape {tuple(weight.shape)} must be "
                f"{wanted}, got {tuple(state.shape)}; load the state of the same table and "
                "optimizer, or delete it from the optimizer's state to start from zero"
            )
