"""Staging: host memory that rows pass through between a cold store and slots on a device.

A cold store reads and writes rows that are scattered in host memory. A device copies fastest from
one large piece of pinned memory. So rows are gathered here, piece by piece.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.rows.row_space import RowSpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.tiers.cold.host_store import ColdStore

__all__ = ["RowsAlone", "Staging", "TransferStream", "num_staged"]

STAGED_BYTES = 16 * 2**20


def num_staged(num_slots: int, row_bytes: int) -> int:
    """The number of rows that fit in the staging of some slots.

    Args:
        num_slots: S.
        row_bytes: Bytes of a row and its state.
    """
    return min(num_slots, max(1, STAGED_BYTES // row_bytes))


class Staging:
    """Places for some rows and their state in host memory.

    Args:
        memories: The slots on the device: rows, (S, D), then each state array, (S, size).
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).

    Attributes:
        arrays: The places as numpy arrays: of the rows, then of each state array.
        first_rows: As given.
        num_places: Number of rows that fit.
    """

    def __init__(self, memories: Sequence[Tensor], first_rows: NDArray[np.uint64]) -> None:
        self._memories = list(memories)
        row_bytes = sum(memory[:1].nbytes for memory in memories)
        is_pinned = memories[0].is_cuda
        self.first_rows = first_rows
        self.num_places = num_staged(len(memories[0]), row_bytes)
        self._buffers = [
            torch.empty(self.num_places, memory.shape[1], dtype=memory.dtype, pin_memory=is_pinned)
            for memory in memories
        ]
        self.arrays: list[NDArray[Any]] = [
            RowSpace([buffer]).flat.reshape(buffer.shape) for buffer in self._buffers
        ]
        self._places = np.arange(self.num_places, dtype=np.int32)

    def fetch(self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state into slots; see `ColdStore.fetch`."""
        for rows_P, places_P, slots_P in self._pieces(rows, slots):
            cold.fetch(self, rows_P, places_P)
            for buffer, memory in zip(self._buffers, self._memories, strict=True):
                # This copy blocks, because the next piece uses the same places.
                memory.index_copy_(0, slots_P, buffer[: len(rows_P)].to(memory.device))

    def write_back(
        self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        """Copy rows and their state from slots to the cold store; see `ColdStore.write_back`."""
        for rows_P, places_P, slots_P in self._pieces(rows, slots):
            for buffer, memory in zip(self._buffers, self._memories, strict=True):
                buffer[: len(rows_P)].copy_(memory.index_select(0, slots_P))
            cold.write_back(self, rows_P, places_P)

    def read(self, cold: ColdStore, rows: NDArray[np.int32]) -> Tensor:
        """Copy rows, without their state, to the device, (M, D); no slot changes."""
        buffer, device = self._buffers[0], self._memories[0].device
        copies = torch.empty(len(rows), buffer.shape[1], dtype=buffer.dtype, device=device)
        memory = RowsAlone(self.arrays[:1], self.first_rows)
        for begin in range(0, len(rows), self.num_places):
            rows_P = rows[begin : begin + self.num_places]
            cold.fetch(memory, rows_P, self._places[: len(rows_P)])
            copies[begin : begin + len(rows_P)].copy_(buffer[: len(rows_P)])
        return copies

    def _pieces(
        self, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], Tensor]]:
        """Divide rows into pieces that fit; yields the rows, their places and their slots."""
        device = self._memories[0].device
        for begin in range(0, len(rows), self.num_places):
            rows_P, slots_P = (each[begin : begin + self.num_places] for each in (rows, slots))
            on_device = torch.from_numpy(slots_P.astype(np.int64)).to(device)
            yield rows_P, self._places[: len(rows_P)], on_device


class RowsAlone(NamedTuple):
    """Memory for rows without their state."""

    arrays: Sequence[NDArray[Any]]
    first_rows: NDArray[np.uint64]


class TransferStream:
    """The CUDA stream on which one hot tier runs its transfers, while others compute.

    The hot tier owns it. Transfers run one at a time, in the order in which they were put in. A
    claim that is only queued is a part of its transfer.

    put in     `transfer` records an event on the caller's stream, and on each that uses slots
    transfer   this stream waits for these events, copies rows, and records an event of its own
    use        `wait` has the caller's stream wait for the event of a transfer
    read       `read` has the host wait for an event, and copies numbers on a stream without work

    So a transfer runs after everything that was queued when it was put in: the last use of the
    slots that it evicts. Usually one stream uses slots. An evaluation may have another, and so may
    a program that prefetches rows where it copies mini-batches. Computing on rows runs after their
    transfer. Memory that a transfer allocates belongs to this stream. The slots and their records
    are recorded as used by it, so their memory is not reused before the transfers are done.

    Args:
        memories: What belongs to the slots, on one CUDA device: rows, state arrays, records.
    """

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self._device = memories[0].device
        # Its few, small programs run before those that wait for a place on the GPU.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        for memory in memories:
            memory.record_stream(self._stream)
        self._done: torch.cuda.Event | None = None
        # Streams that use slots or their records; the first one, which is current, makes them.
        self._users: list[torch.cuda.Stream] = [torch.cuda.current_stream(self._device)]
        self._reading: torch.cuda.Stream | None = None  # of `read`

    def transfer(self) -> AbstractContextManager[None]:
        """A context for one transfer that is put in now; any thread may enter it."""
        current = torch.cuda.current_stream(self._device)
        queued = [each.record_event() for each in self._users if each != current]
        return self._made_after([*queued, current.record_event()])

    @contextmanager
    def _made_after(self, queued: Sequence[torch.cuda.Event]) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            for event in queued:
                self._stream.wait_event(event)
            try:
                yield
            finally:  # a transfer that failed may have copied some rows
                self._done = self._stream.record_event()

    def keep_for_transfer(self, tensors: Sequence[Tensor | None]) -> None:
        """Keep memory that the caller may free until the transfer put in next is done."""
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)

    def record(self) -> torch.cuda.Event:
        """In a transfer: the event after what it has queued so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    @property
    def last(self) -> torch.cuda.Event | None:
        """The event after the transfers so far; None before the first one."""
        return self._done

    def wait(self, done: torch.cuda.Event | None = None) -> None:
        """Have the caller's stream wait for transfers; the host does not wait.

        From then on transfers wait for what the caller's stream queues, too.

        Args:
            done: The event to wait for; None for all transfers so far, and for what other streams
                have queued that use slots: they may have changed rows or records.
        """
        current = torch.cuda.current_stream(self._device)
        if done is None:
            self.use()
            done = self._done  # the queue's thread may replace it meanwhile
        elif current not in self._users:
            self._users.append(current)
        if done is not None:
            current.wait_event(done)

    def use(self) -> None:
        """Have the caller's stream wait for what other streams have queued that use slots.

        It waits for no transfer. From then on transfers wait for what it queues, too.
        """
        current = torch.cuda.current_stream(self._device)
        for each in self._users:
            if each != current:
                current.wait_event(each.record_event())
        if current not in self._users:
            self._users.append(current)

    def read(self, numbers: Tensor, made: torch.cuda.Event) -> list[int]:
        """Copy numbers to the host, which waits for the event after which they are known.

        This stream and the caller's have later work queued. So the copy runs on a third one, which
        has none: the host does not wait for that work.

        Args:
            numbers: Made by a transfer.
            made: The event.
        """
        made.synchronize()
        if self._reading is None:
            self._reading = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._reading):
            found: list[int] = numbers.tolist()  # done on return, so the memory may be freed then
        return found

    def keep(self, tensor: Tensor) -> None:
        """Keep memory, of whichever stream, until the caller's stream is done with it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))
