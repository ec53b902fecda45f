"""`DeviceGroup`: a table group whose kernels run on a CUDA device.

Tables are in device memory or, with slots, in page-locked host memory. The host waits for nothing:
kernels record the first error, and the next lookup or update raises it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.cuda.own_pages import PageLocks, empty_in_own_pages, in_own_pages, pages_of
from recsys.embeddings.kernels.triton.lookup import (
    DeviceInput,
    DeviceLookups,
    pool,
    weight_gradients,
)
from recsys.embeddings.kernels.triton.memory import (
    BAD_GRADIENT,
    BAD_OFFSETS,
    NO_ROW,
    DeviceMemories,
    ErrorRecord,
    Rows,
    upload,
)
from recsys.embeddings.kernels.triton.row_sort import DeviceEntry
from recsys.embeddings.kernels.triton.update import update_rows
from recsys.embeddings.rows.tables import TableGroup
from recsys.errors import IdOutOfRange, MalformedBags, NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.bags import Bags, Lookups
    from recsys.embeddings.rows.ledger import Call, Entry

__all__ = ["DeviceGroup"]


class DeviceGroup(TableGroup):
    """Tables of one dim and dtype, looked up and updated on a device.

    Args:
        names: As for `TableGroup`.
        tables: As there, on the device, or on the CPU in pages of their own, which are locked.
        device: Where kernels run.

    Attributes:
        record: The first error that a kernel found.
    """

    is_on_device = True

    def __init__(
        self, names: Sequence[str], tables: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self.device, self.record = device, ErrorRecord(device)
        self._changed: Tensor | None = None
        super().__init__(names, tables)

    def notice_moved_tables(self) -> None:
        """As there; raises the error of an earlier lookup or update."""
        self._raise_error()
        super().notice_moved_tables()

    def pool(
        self, lookups: Lookups, located: DeviceLookups, bags: Bags, kept: Tensor, result: Tensor
    ) -> None:
        """Look up; see `kernels.triton.lookup.pool`. Raises the error of an earlier kernel."""
        self._raise_error()
        fetcher = self.fetcher
        with nullcontext() if fetcher is None else fetcher.lock:
            if fetcher is not None:
                fetcher.notice_writes()
                fetcher.settle()
            pool(self.memories, located, given_of(lookups, bags), kept, result)

    def weight_gradient(self, call: Call, gradient: Tensor, result: Tensor) -> None:
        """Add the gradient of the ids' weights, (N,); see `kernels.triton.lookup`."""
        with nullcontext() if self.fetcher is None else self.fetcher.lock:
            if self.fetcher is not None:
                self.fetcher.settle()
            of_bags = call.num_samples, call.num_bounds, call.lookups.is_mean
            given = DeviceInput(call.kept, None, None, *of_bags)
            located = self.locate(call.lookups).lookups_5L
            weight_gradients(self.memories, located, given, call.kept, gradient, result)

    def join(self, entries: Sequence[Entry]) -> list[DeviceEntry]:
        """As there."""
        return [
            DeviceEntry(
                self.locate(call.lookups).lookups_5L,
                call.kept,
                call.num_ids,
                call.num_samples,
                call.num_bounds,
                call.lookups.is_mean,
                call.weights,
                gradient,
            )
            for call, gradient, *_ in entries
        ]

    def update(
        self,
        joined: Sequence[DeviceEntry],
        formula: RowOptimizer,
        rates_T2: NDArray[np.float64],
        keys_T: NDArray[Any],
    ) -> None:
        """As there; a bad row is an error of the next lookup or update."""
        update_rows(self.memories, formula, rates_T2, keys_T, joined, self._changed)

    def track_rows(self) -> None:
        """Let updates mark the rows that they change from now on; takes a byte for each row."""
        num_rows = int(self.first_rows[-1])
        self._changed = torch.zeros(num_rows + 1, dtype=torch.uint8, device=self.device)

    def take_changed(self) -> NDArray[np.uint8]:
        """Whether each row was changed since the last call, (R,); the host waits."""
        assert self._changed is not None
        found: NDArray[np.uint8] = self._changed[:-1].cpu().numpy().copy()
        self._changed.zero_()
        return found

    def new_rows(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As there; in the memory where the tables are."""
        if self._kind_of_memory() == "cpu":
            return empty_in_own_pages(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def reachable(self, tensor: Tensor) -> Tensor:
        """As there; in pages that can be locked."""
        return in_own_pages(tensor) if tensor.is_cpu else tensor

    def give_slots(self, num_slots: int, fetcher: Any) -> None:
        """As there; tables on the device move to the host's memory."""
        for table in self.tables:
            table.data = in_own_pages(table.detach().cpu(), self.device)
        super().give_slots(num_slots, fetcher)

    def new_slots(self, num_slots: int, size: int, dtype: torch.dtype) -> Tensor:
        """As there; on the device."""
        return torch.empty(num_slots, size, dtype=dtype, device=self.device)

    def _kind_of_memory(self) -> str:
        return "cpu" if any(map(pages_of, self.tables)) else self.device.type

    def _numbers_of(self, lookups: Lookups) -> DeviceLookups:
        sizes, firsts = self.sizes.tolist(), self.first_rows.tolist()
        return DeviceLookups(lookups.locations, sizes, firsts, self.device)

    def _memory(self, tables: Sequence[Tensor], slots: Tensor) -> Rows:
        rows = Rows(tables, slots)
        if self.device.type == "cuda":
            on_host = [table for table in rows.tensors if table.is_cpu]
            rows.locks = PageLocks(on_host, self.device) if on_host else None
        return rows

    def _join(self) -> None:
        marks = None if self.fetcher is None else self.fetcher.marks
        states = [state for state, _ in self._states]
        self.memories = DeviceMemories(
            self._rows,
            states,
            upload(self.first_rows.astype(np.int64), self.device),
            int(self.first_rows[-1]),
            None if marks is None else marks.slot_of_row,
            None if marks is None else marks.is_dirty,
            self.record,
        )
        self.tensors = [tensor for rows in (self._rows, *states) for tensor in rows.tensors]

    def _raise_error(self) -> None:
        """Raise what kernels have found, once.

        Raises:
            IdOutOfRange: an id is not a row of its table.
            MalformedBags: offsets do not ascend from 0 to N, or a weight is nan.
            NonFiniteGradient: a row's gradient has nan or inf; nothing was updated.
        """
        found = self.record.take()
        if found is None:
            return
        kind, table, number, position = found
        if kind == NO_ROW:
            raise IdOutOfRange(
                f"table {self.names[table]!r}: id {number}, number {position} of an earlier "
                f"lookup, is not in [0, {self.sizes[table]}); raise num_embeddings or hash the ids"
            )
        if kind == BAD_GRADIENT:
            table = int(np.searchsorted(self.first_rows, number, side="right")) - 1
            raise NonFiniteGradient(
                f"table {self.names[table]!r}: the gradient of row "
                f"{number - int(self.first_rows[table])} has nan or inf in it. No rows were "
                "updated; find what computes it (a learning rate too high, log(0))"
            )
        raise MalformedBags(
            f"offsets must ascend from 0 to the number of ids, got offsets[{position}] = {number} "
            "in an earlier lookup"
            if kind == BAD_OFFSETS
            else f"weight {position} of an earlier lookup is nan; check the code that computes it"
        )


def given_of(lookups: Lookups, bags: Bags) -> DeviceInput:
    """The input of a lookup, as kernels take it."""
    ids, offsets, weights, num_samples, num_bags, _ = bags
    return DeviceInput(ids.view(-1), offsets, weights, num_samples, num_bags, lookups.is_mean)
