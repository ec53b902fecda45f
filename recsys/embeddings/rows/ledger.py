"""The ledger of a table group: the lookups and gradients that wait for the update.

Backward of the lookup's node adds entries; `TableUpdate` takes them, once a step. Invariant: an
entry is in the ledger until its rows were updated or it was dropped, and never after.

It keeps ids, not locations: rows may move until the update, which finds them by the row map.
Gradients stay where backward left them. The kernel sees all of them as one array from the lowest
address.

Letters: T tables, S segments (a lookup of an entry), E entries.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.torch_compat import version_of
from recsys.embeddings.kernels.cpu.row_sort import Segments
from recsys.embeddings.kernels.cpu.update import Joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.bags import Lookups

__all__ = ["Call", "Entry", "Ledger", "join"]


class Call(NamedTuple):
    """One lookup, until its backward.

    Attributes:
        number: Its number in the order of lookups.
        lookups: Which features were looked up in which tables.
        kept: The ids, and after them where bags begin, as the lookup kernel copied them.
        num_ids: N.
        num_samples: B.
        num_bounds: Bags of all features; 0 if bag i is id i.
        weights: A copy of the ids' factors; None for 1.
        num_started: Transfers started in the background before it; see `Fetcher.begin_update`.
    """

    number: int
    lookups: Lookups
    kept: Tensor
    num_ids: int
    num_samples: int
    num_bounds: int
    weights: Tensor | None
    num_started: int


class Entry(NamedTuple):
    """A lookup and the gradient of its result, (B, W); each sample's numbers are contiguous.

    Attributes:
        call: The lookup.
        gradient: Its gradient, by reference.
        version: Of the gradient, when backward passed it on.
        serial: The number of the entry, in the order of backward.
    """

    call: Call
    gradient: Tensor
    version: int
    serial: int

    def to(self, dtype: torch.dtype) -> Entry:
        """The entry after the module was converted, as by `module.double()`."""
        weights = self.call.weights
        call = self.call._replace(weights=None if weights is None else weights.to(dtype))
        return self._replace(call=call, gradient=self.gradient.to(dtype))


class Ledger:
    """Pending gradients of one table group.

    Attributes:
        entries: A lookup and its gradient each.
        last: The serial number of the last entry.
        grads: What callers have read as `weight.grad`, by table; see `grads`.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last = 0
        self.grads: dict[int, Any] = {}

    def add(self, call: Call, gradient: Tensor) -> None:
        """Keep the gradient of a lookup's result, by reference."""
        self.last += 1
        self.entries.append(Entry(call, gradient, version_of(gradient), self.last))

    def clear(self) -> None:
        """Drop everything."""
        self.entries, self.grads = [], {}

    def in_order(self) -> list[Entry]:
        """All entries in the order of lookups, which is that of sums.

        Raises:
            RuntimeError: a gradient was overwritten after its backward; the ledger is emptied.
        """
        if any(version_of(entry.gradient) != entry.version for entry in self.entries):
            self.clear()
            raise RuntimeError(
                "the gradient of a lookup's result was changed in place after its backward and "
                "before its update; give what changes it a clone"
            )
        return sorted(self.entries, key=_number_of) if len(self.entries) > 1 else self.entries


_number_of = attrgetter("call.number")


def join(entries: Sequence[Entry], num_tables: int) -> Joined:
    """The entries as arrays for the kernel."""
    parts_3S, of_table = _parts(tuple([entry.call.lookups for entry in entries]), num_tables)
    addresses = [entry.gradient.data_ptr() for entry in entries]
    low, end, num_all_ids, is_scaled = min(addresses), 0, 0, False
    numbers = []
    for (call, gradient, *_), address in zip(entries, addresses, strict=True):
        _, lookups, kept, num_ids, num_samples, num_bounds, weights, _ = call
        begin, stride = (address - low) // gradient.itemsize, gradient.stride()[0]
        is_mean = lookups.is_mean and num_bounds > 0
        is_scaled |= is_mean or weights is not None
        num_all_ids += num_ids
        end = max(end, begin + (num_samples - 1) * stride + gradient.shape[1])
        of_gradient = begin, stride, is_mean, 0 if weights is None else weights.data_ptr()
        numbers.append((kept.data_ptr(), num_ids, num_samples, num_bounds, *of_gradient))
    entries_8E = np.array(numbers, np.uint64).T.copy()
    return Joined(Segments(entries_8E, parts_3S, of_table), num_all_ids, low, end, is_scaled)


@lru_cache(maxsize=64)
def _parts(
    lookups: tuple[Lookups, ...], num_tables: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The parts and tables of `Segments`; within a table, entries are in order."""
    parts = [
        (table, entry, position, column)
        for entry, of_entry in enumerate(lookups)
        for table, position, column in of_entry.locations
    ]
    tables_4S = np.array(sorted(parts, key=itemgetter(0)), np.uint64).reshape(-1, 4).T.copy()
    of_table = np.searchsorted(tables_4S[0].astype(np.int64), np.arange(num_tables + 1))
    return tables_4S[1:].copy(), of_table.astype(np.uint64)
