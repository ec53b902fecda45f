"""Detects writes to the memory of tables and their state by the versions of tensors.

Every in-place torch operation increments the version of its tensor. Views share the version
(`detach()`, slices, the tensors of `state_dict()`). `Tensor.data` does not, so all tensors that
`data` of one table returns here share a second version. Writes through numpy, DLPack or a pointer
are not detected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from recsys._support.torch_compat import version_of, versions_of
from recsys.errors import ConflictingWrite

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["TableVersions", "Written"]


class Written(NamedTuple):
    """Memory that was written to.

    Attributes:
        table: The number of its table.
        state: The name of the state array; None for the table's rows.
    """

    table: int
    state: str | None

    def error(self, name: str) -> ConflictingWrite:
        """The error if slots held newer values; `name` is that of the table."""
        if self.state is not None:
            return ConflictingWrite(
                f"table {name!r}: its optimizer state {self.state!r} was written to while "
                "newer state of some rows is in fast memory; one of the two would be lost. Before "
                "such a write, call the optimizer's state_dict(), which writes the newer state "
                "back; to continue now, build the model again and load a checkpoint"
            )
        return ConflictingWrite(
            f"table {name!r}: its rows were written to by a tensor kept from before (of detach(), "
            "data or state_dict()) while newer values of some rows are in fast memory; one of the "
            "two would be lost. Write through the module's weight, which writes the newer values "
            "back first (with torch.no_grad(): module.weight.clamp_(...)); to continue now, load "
            "a checkpoint by load_state_dict, first into the module, then into the optimizer"
        )


class TableVersions:
    """The known versions of tables and of their state."""

    def __init__(self) -> None:
        self._data: dict[int, Tensor] = {}
        self._places: list[Written] = []
        self._tensors: list[Tensor] = []
        self._known: list[int] = []
        self._of_table: dict[int, list[int]] = {}  # positions in these lists

    def watch(self, tables: RowSpace, states: Mapping[str, RowSpace]) -> None:
        """Watch tables and their state from now on; their present versions count as known.

        Args:
            tables: The tables.
            states: The state arrays of all tables, by name.
        """
        found = [(Written(number, None), table) for number, table in enumerate(tables.tables)]
        found += [
            (Written(number, name), array)
            for name, space in states.items()
            for number, array in enumerate(space.tables)
            if len(array)
        ]
        for number, data in list(self._data.items()):
            if data.data_ptr() == tables.tables[number].data_ptr():
                found.append((Written(number, None), data))
            else:  # the table has other memory now
                del self._data[number]
        self._places = [place for place, _ in found]
        self._tensors = [tensor for _, tensor in found]
        self._of_table = {number: [] for number in range(len(tables.tables))}
        for position, place in enumerate(self._places):
            self._of_table[place.table].append(position)
        self.accept()

    def have_changed(self, tables: Collection[int] | None = None) -> bool:
        """Whether a watched tensor was written to since its version was accepted.

        Args:
            tables: Numbers of the tables that count, with their states; None for all.
        """
        if tables is None or len(tables) == len(self._of_table):
            return self._now() != self._known
        return any(
            version_of(self._tensors[position]) != self._known[position]
            for table in tables
            for position in self._of_table[table]
        )

    def written(self) -> list[Written]:
        """The tables and states that were written to since their versions were accepted."""
        pairs = zip(self._places, self._known, self._now(), strict=True)
        return list(dict.fromkeys(place for place, before, now in pairs if before != now))

    def accept(self) -> None:
        """Take the present versions as known: later writes are compared with these."""
        self._known = self._now()

    def data_of(self, weight: Tensor, table: int) -> Tensor:
        """The tensor that `weight.data` returns; writes to it are detected.

        Args:
            weight: The table.
            table: Its number.
        """
        known = self._data.get(table)
        if known is None or known.data_ptr() != weight.data_ptr() or known.shape != weight.shape:
            known = self._data[table] = weight.data
            self._of_table.setdefault(table, []).append(len(self._places))
            self._places.append(Written(table, None))
            self._tensors.append(known)
            self._known.append(version_of(known))
        return known.detach()

    def _now(self) -> list[int]:
        return versions_of(self._tensors)
