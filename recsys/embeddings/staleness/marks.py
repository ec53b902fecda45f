"""A mark for every row of several table groups: whether it is stale, and how often it was updated.

A mark has 16 bits: the highest one says that the row is stale, the others count updates. Rows are
numbered over all tables of all groups. Every line of 64 rows has a byte that says whether one of
them was counted, so that a window's end reads the counts of these lines alone.

`UpdateWatch` counts the rows of updates, and leaves out the lookups of stale ones. An entry of a
ledger that loses lookups gets bags of its own, one after another for each lookup. With mean
pooling, these have weights, because the rest of a bag is still divided by the whole bag's length.

Letters: B samples, L lookups, V ids of a lookup, M rows, R rows of all tables.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.embeddings.kernels.cpu.row_map import LEFT_OUT
from recsys.embeddings.rows.bags import Lookups
from recsys.errors import MalformedBags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.rows.ledger import Call, Entry
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["LookedUp", "RowMarks", "UpdateWatch", "host_input", "marks_bytes"]

_STALE, _MOST_COUNTED = np.uint16(2**15), np.uint16(2**15 - 1)
_LINE = 64  # rows
_NO_OFFSETS = np.empty(0, np.int32)  # bag i is id i


class LookedUp(NamedTuple):
    """The ids of a lookup, table by table and then sample by sample.

    Attributes:
        rows: Their rows, (V,) int64; -1 for an id that is no row.
        bags: Their bags, counted over the lookups: l * B + b, (V,) int64.
        positions: Where each stands in the input, (V,) int64.
    """

    rows: NDArray[np.int64]
    bags: NDArray[np.int64]
    positions: NDArray[np.int64]


def marks_bytes(num_rows: int) -> int:
    """Bytes of the marks of so many rows."""
    return (num_rows // _LINE + 1) * (2 * _LINE + 1)


class RowMarks:
    """The marks of all rows of some table groups.

    Args:
        groups: The groups.

    Attributes:
        groups: As given.
        sizes: E of each table.
        first_rows: Where each table's rows begin, (T + 1,) int64.
        first_tables: The number of each group's first table.
        names: Names of the tables. If two have the same, the number of the group comes before it.
        stale: The stale rows, (M,) ascending.
    """

    def __init__(self, groups: Sequence[TableGroup]) -> None:
        self.groups = list(groups)
        self.sizes = [len(table) for group in groups for table in group.tables]
        self.first_rows = np.cumsum([0, *self.sizes])
        ends = np.cumsum([len(group.tables) for group in groups]).tolist()
        self.first_tables = dict(zip(self.groups, [0, *ends[:-1]], strict=True))
        self.names = [name for group in groups for name in group.names]
        if len(set(self.names)) < len(self.names):
            self.names = [f"{at}.{name}" for at, group in enumerate(groups) for name in group.names]
        self.stale: NDArray[np.int64] = np.empty(0, np.int64)
        num_lines = sum(self.sizes) // _LINE + 1
        self._marks = np.zeros((num_lines, _LINE), np.uint16)
        self._is_counted = np.zeros(num_lines, np.bool_)
        self._of_row = self._marks.reshape(-1)

    def set_stale(self, rows: NDArray[np.int64]) -> None:
        """Mark these rows, (M,) ascending, as stale, and all others as not stale."""
        self._of_row[self.stale] &= _MOST_COUNTED
        self._of_row[rows] |= _STALE
        self.stale = rows

    def are_stale(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are stale, (M,); -1 is not."""
        return np.logical_and(rows >= 0, self._of_row[rows] >= _STALE)

    def by_table(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """The rows of each table, counted within it, by its name; `rows` ascend."""
        parts = np.split(rows, np.searchsorted(rows, self.first_rows[1:-1]))
        named = zip(self.names, parts, self.first_rows[:-1], strict=True)
        return {name: part - first for name, part, first in named}

    def count(self, rows: NDArray[np.int64]) -> None:
        """Add one to the count of each distinct row, up to 32,767; -1 is no row."""
        _count_kernel(rows, self._of_row, self._is_counted)

    def counts_of(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """The counts of rows, (M,)."""
        return np.bitwise_and(self._of_row[rows], _MOST_COUNTED)

    def counted(self, least: int = 1) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """The rows with at least this count, (M,) ascending, and their counts, (M,)."""
        lines = np.flatnonzero(self._is_counted)
        counts = (self._marks[lines] & _MOST_COUNTED).reshape(-1)
        at = np.flatnonzero(counts >= least)
        return lines[at // _LINE] * _LINE + at % _LINE, counts[at]

    def set_counts(self, rows: NDArray[np.int64], counts: NDArray[np.uint16]) -> None:
        """Set the counts of rows, (M,), and all others to 0."""
        self._marks[np.flatnonzero(self._is_counted)] &= _STALE
        self._is_counted.fill(False)
        self._of_row[rows] |= counts
        self._is_counted[rows // _LINE] = True

    def rows_of_call(self, group: TableGroup, call: Call) -> LookedUp:
        """What a lookup that waits for its update has looked up.

        Raises:
            MalformedBags: its offsets do not ascend; only on a device, which has not raised it yet.
        """
        kept = call.kept.cpu().numpy()
        ids, offsets = kept[: call.num_ids], _NO_OFFSETS
        if call.num_bounds:
            offsets = kept[call.num_ids : call.num_ids + call.num_bounds + 1]
            _require_ascending(offsets, call.num_ids)
        return self._looked_up(group, call.lookups, ids, offsets, call.num_samples)

    def all_stale(self, parts: Sequence[tuple[Part, Bags]], batch_size: int) -> NDArray[np.bool_]:
        """Which samples look up rows, and stale ones only, (B,).

        Args:
            parts: All lookups, with B bags for each feature. Rows of other groups are not stale.
            batch_size: B.

        Raises:
            ValueError: a lookup has another number of bags.
            MalformedBags: offsets do not ascend.
        """
        samples, rows = self._pairs(parts, batch_size)
        found = np.zeros(batch_size, np.bool_)
        found[samples] = True
        found[samples[~self.are_stale(rows)]] = False
        return found

    def rows_of_samples(
        self, parts: Sequence[tuple[Part, Bags]], batch_size: int, chosen: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """The rows that each of some samples, (S,) ascending, looks up; see `all_stale`."""
        samples, rows = self._pairs(parts, batch_size)
        kept = np.flatnonzero(np.isin(samples, chosen))
        kept = kept[np.argsort(samples[kept], kind="stable")]
        return np.split(rows[kept], np.searchsorted(samples[kept], chosen[1:]))

    def _pairs(
        self, parts: Sequence[tuple[Part, Bags]], batch_size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sample and the row of each id of all lookups, (V,)."""
        samples, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for (group, lookups), bags in parts:
            if bags.num_samples != batch_size:
                raise ValueError(
                    f"a lookup of {bags.num_samples} bags is not of {batch_size} samples: each "
                    "feature must have one bag for each sample"
                )
            found = self._looked_up(group, lookups, *host_input(bags), batch_size)
            samples.append(found.bags % max(1, batch_size))
            rows.append(found.rows)
        return np.concatenate(samples), np.concatenate(rows)

    def _looked_up(
        self,
        group: TableGroup,
        lookups: Lookups,
        ids: NDArray[np.integer],
        offsets: NDArray[np.integer],
        batch_size: int,
    ) -> LookedUp:
        first_table = self.first_tables.get(group, -1)
        return LookedUp(
            *_look_up_kernel(ids, offsets, lookups.arrays, self.first_rows, first_table, batch_size)
        )


@kernel
def _count_kernel(
    rows: NDArray[np.int64], marks: NDArray[np.uint16], is_counted: NDArray[np.bool_]
) -> None:
    """See `RowMarks.count`."""
    before = marks[rows]  # so that a row that is there several times gets the same number each time
    for index, row in enumerate(rows):
        if row >= 0:
            marks[row] = before[index] + (before[index] & _MOST_COUNTED < _MOST_COUNTED)
            is_counted[row // _LINE] = True


@kernel
def _look_up_kernel(
    ids: NDArray[np.integer],
    offsets: NDArray[np.integer],
    lookups_3L: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    first_table: int,
    batch_size: int,
) -> NDArray[np.int64]:
    """The fields of `LookedUp`, (3, V).

    Args:
        ids: The ids of the input.
        offsets: Where bags begin and end; empty if bag i is id i.
        lookups_3L: The tables of the lookups, and their positions in the input.
        first_rows: Where the rows of each table begin.
        first_table: The number of the first table; negative if none of the ids is a row.
        batch_size: B.
    """
    num = 0
    for position in lookups_3L[1]:
        num += (
            offsets[(position + 1) * batch_size] - offsets[position * batch_size]
            if len(offsets)
            else batch_size
        )
    found, num = np.empty((3, num), np.int64), 0
    for lookup in range(lookups_3L.shape[1]):
        table = lookups_3L[0, lookup] + first_table
        for sample in range(batch_size):
            bag = lookups_3L[1, lookup] * batch_size + sample
            begin, stop = (offsets[bag], offsets[bag + 1]) if len(offsets) else (bag, bag + 1)
            for index in range(begin, stop):
                if ids[index] != LEFT_OUT:
                    row = ids[index] + first_rows[table]
                    is_row = min(first_table, ids[index]) >= 0 and row < first_rows[table + 1]
                    found[:, num] = row if is_row else -1, lookup * batch_size + sample, index
                    num += 1
    return found[:, :num]


def host_input(bags: Bags) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The ids of an input on the host, and where bags begin; empty if bag i is id i.

    Raises:
        MalformedBags: offsets do not ascend from 0 to the number of ids.
    """
    ids = bags.ids.reshape(-1).cpu().numpy()
    if bags.offsets is not None:
        offsets = bags.offsets.cpu().numpy()
        if len(offsets) == bags.num_bags:
            offsets = np.append(offsets, offsets.dtype.type(len(ids)))
        _require_ascending(offsets, len(ids))
        return ids, offsets
    if len(ids) == bags.num_bags:
        return ids, _NO_OFFSETS
    return ids, np.arange(bags.num_bags + 1) * (len(ids) // bags.num_bags)


def _require_ascending(offsets: NDArray[np.integer], num_ids: int) -> None:
    if offsets[0] != 0 or offsets[-1] > num_ids or (np.diff(offsets) < 0).any():
        raise MalformedBags(f"offsets must ascend from 0 to the number of ids, which is {num_ids}")


class UpdateWatch:
    """Sees the ledgers of all groups of some marks before each update.

    Args:
        marks: The marks of the rows.

    Attributes:
        is_counting: Whether the next updates are counted.
        freezes: Whether updates leave out stale rows; None if they never do.
        num_lookups: Lookups in the updates so far, unless they never leave any out.
        num_left_out: How many of them were left out.

    Raises:
        ValueError: something else sees the ledger of a group.
    """

    def __init__(self, marks: RowMarks) -> None:
        self._marks, self.is_counting = marks, False
        self.freezes: bool | None = None
        self.num_lookups = self.num_left_out = 0
        for group in marks.groups:
            if group.before_update is not None:
                raise ValueError(
                    f"tables {group.names} already have a StalenessTracker; close it first: "
                    "call its close(), or pipeline.skipping.close() if it is a TrainPipeline's"
                )
        self._hooks = {group: partial(self._before_update, group) for group in marks.groups}
        for group, hook in self._hooks.items():
            group.before_update = hook

    def close(self) -> None:
        """See no ledger any more."""
        for group, hook in self._hooks.items():
            if group.before_update is hook:
                group.before_update = None

    def _before_update(self, group: TableGroup, entries: Sequence[Entry]) -> Sequence[Entry]:
        """See `TableGroup.before_update`. Rows that are left out are not counted."""
        if self.freezes is None and not self.is_counting:
            return entries
        found = [self._marks.rows_of_call(group, entry.call) for entry in entries]
        rows = np.concatenate([np.empty(0, np.int64), *(looked_up.rows for looked_up in found)])
        if self.freezes is not None:
            self.num_lookups += len(rows)
        if self.freezes and len(self._marks.stale):
            are_kept = [~self._marks.are_stale(looked_up.rows) for looked_up in found]
            cut = map(_keep_lookups, entries, found, are_kept)
            entries = [entry for entry in cut if entry is not None]
            num_before, rows = len(rows), rows[np.concatenate([np.empty(0, np.bool_), *are_kept])]
            self.num_left_out += num_before - len(rows)
        if self.is_counting:
            self._marks.count(rows)
        return entries


def _keep_lookups(entry: Entry, found: LookedUp, is_kept: NDArray[np.bool_]) -> Entry | None:
    """The entry with some of its lookups; None if there are none.

    The gradients of their rows stay as they are.

    Args:
        entry: The entry of a ledger.
        found: What it has looked up.
        is_kept: Which of these stay, (V,).
    """
    if is_kept.all():
        return entry
    if not is_kept.any():
        return None
    call, device, bags = entry.call, entry.call.kept.device, found.bags[is_kept]
    num_bags = len(call.lookups.locations) * call.num_samples
    lengths = np.bincount(bags, minlength=num_bags)
    weights = call.weights
    if weights is not None:
        weights = weights[torch.from_numpy(found.positions[is_kept]).to(device)]
    if call.lookups.is_mean and call.num_bounds:
        divisors = torch.from_numpy(np.bincount(found.bags)[bags])
        divisors = divisors.to(device, entry.gradient.dtype)
        weights = (torch.ones_like(divisors) if weights is None else weights) / divisors
    # Kernels of a device read how long bags are, too.
    ids = call.kept.cpu().numpy()[found.positions[is_kept]]
    parts = [ids, np.zeros(1, np.int64), lengths.cumsum(), lengths]
    changed = call._replace(
        lookups=_in_order(call.lookups),
        kept=torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device),
        num_ids=len(bags),
        num_bounds=num_bags,
        weights=weights,
    )
    return entry._replace(call=changed)


@lru_cache(maxsize=64)
def _in_order(lookups: Lookups) -> Lookups:
    """The same lookups of an input that has the bags of one lookup after another."""
    locations = [
        (table, number, column) for number, (table, _, column) in enumerate(lookups.locations)
    ]
    return Lookups(locations, is_mean=False)
