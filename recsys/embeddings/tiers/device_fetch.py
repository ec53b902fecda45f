"""`DeviceFetcher`: claims slots on a device, and moves rows into them on a side stream.

The host waits for nothing, and knows neither which rows move nor how many:

    main stream    lookup(n)        forward and backward(n)        update(n)    lookup(n+1)
    side stream              claim(n+1), write back, fetch

A claim begins when what was queued before it is done: the lookups of n have read the row map by
then. Lookups and updates wait on their stream for all claims before them, so that no row is on its
way when they run. A row without a slot is used in host memory. So a claim may be made at any time,
and results do not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.claim import FETCHED, NUM_COUNTS, PLANNED, POPULAR, WITHOUT_SLOT
from recsys.embeddings.kernels.cpu.row_map import EMPTY, NOWHERE
from recsys.embeddings.kernels.triton.claim import DeviceMarks, claim, most_rows
from recsys.embeddings.kernels.triton.lookup import DeviceInput, DeviceLookups
from recsys.embeddings.kernels.triton.memory import upload
from recsys.embeddings.kernels.triton.move import dirty_rows, move_rows
from recsys.embeddings.rows.device_tables import given_of
from recsys.embeddings.tiers.fetch import Claim, Counts, Fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.rows.bags import Bags, Lookups
    from recsys.embeddings.rows.ledger import Entry

__all__ = ["DeviceFetcher", "SideStream"]

_NO_COUNTS = np.zeros(NUM_COUNTS, np.int64)


class SideStream:
    """The order of moves on a device: one after the other, on a stream of their own.

    Args:
        device: The device; on the CPU, where kernels are interpreted, there is one stream.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None], given: DeviceInput) -> None:
        """Queue work, which begins when everything queued so far is done.

        Args:
            work: Launches kernels.
            given: What it reads, which may be freed at once.
        """
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        for tensor in (given.ids, given.offsets):
            if tensor is not None:
                tensor.record_stream(self._stream)

    def is_writing(self) -> bool:
        """Whether rows may be on their way to the cold tier."""
        return self._stream is not None and not self._stream.query()

    def finish(self) -> None:
        """Let the current stream wait for all work; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class DeviceFetcher(Fetcher):
    """Moves rows of a `DeviceGroup` into slots; arguments and methods are those of `Fetcher`."""

    def claim_ahead(self, wanted: Sequence[tuple[Lookups, Bags]]) -> Claim | None:
        """As there; the host never knows whether slots were too few."""
        self._last = max(self._last, self._needed) + 1
        with self.lock:
            found = [self._claim(lookups, bags, self._last) for lookups, bags in wanted]
        return found[-1]._replace(lookups={lookups for lookups, _ in wanted})

    def begin(self, claimed: Claim | None, *, is_waiting: bool = True) -> None:
        """As there; lookups wait for the rows."""
        self._covered = frozenset() if claimed is None else claimed.lookups
        if claimed is None and self._last <= self._needed:
            self._needed += 1  # the last one may have had no update
        if claimed is not None:
            self._needed = max(self._needed, claimed.generation)

    def before_lookup(self, lookups: Lookups, bags: Bags) -> None:
        """As there; the warning may come with a later lookup."""
        if lookups not in self._covered:
            with self.lock:
                self._claim(lookups, bags, self._needed)
        if not self._has_warned and int(self._seen[WITHOUT_SLOT]):
            self._warn_of_left()

    def begin_update(self, entries: Sequence[Entry]) -> None:
        """As there."""
        with self.lock:
            self._versions = None
            self.settle()

    def settle(self) -> None:
        """Let the current stream wait until no row is on its way; the host does not."""
        self.queue.finish()

    def write_dirty(self) -> None:
        """Write every changed row to its table; the host waits for it."""
        moves = dirty_rows(self.marks)
        move_rows(self._group.memories, moves)
        self.sums += moves.counts[:NUM_COUNTS]
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()

    def pin_popular(self, most: int) -> tuple[int, int]:
        """As there; the host waits."""
        self.settle()
        marks = self.marks
        row_of_slot, uses, pins = (
            mark.cpu().numpy() for mark in (marks.row_of_slot, marks.uses, marks.pins)
        )
        self.marks = marks._replace(row_of_slot=row_of_slot, uses=uses, pins=pins)
        found = super().pin_popular(most)
        self.marks = marks
        marks.uses.copy_(torch.from_numpy(uses))
        marks.pins.copy_(torch.from_numpy(pins))
        return found

    @property
    def counts(self) -> Counts:
        """As there; mini-batches that were dropped count, too. The host waits."""
        self.settle()
        return Counts(*self.sums[: len(Counts._fields)].tolist())

    def _make(self, num_rows: int, num_slots: int) -> tuple[Any, Any]:
        device = self._group.device
        self.sums = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)
        self._most: dict[int, int] = {}  # by generation that is not over: rows, at most
        # Counts of the last claim, which the host reads when they have come, to warn of them.
        self._seen = torch.zeros(NUM_COUNTS, dtype=torch.int32, pin_memory=device.type == "cuda")
        return DeviceMarks.empty(num_rows, num_slots, device), SideStream(device)

    def _drop_all(self) -> None:
        marks = self.marks
        marks.slot_of_row.fill_(int(NOWHERE))
        marks.row_of_slot.fill_(int(EMPTY))
        for mark in (marks.generations, marks.is_dirty, marks.pins):
            mark.zero_()

    def _claim(self, lookups: Lookups, bags: Bags, generation: int) -> Claim:
        self.notice_writes()
        if self._must_pin:
            self._pin()
        located = self._group.locate(lookups).lookups_5L
        self._claim_on_device(located, given_of(lookups, bags), generation)
        return Claim(generation, None, _NO_COUNTS)

    def _claim_on_device(
        self,
        located: DeviceLookups,
        given: DeviceInput,
        generation: int,
        *,
        is_counted: bool = True,
    ) -> None:
        needed, memories = self._needed, self._group.memories
        known = {number: most for number, most in self._most.items() if number >= needed}
        num_others = sum(known.values()) + len(self.planned) + len(self.popular)
        known[generation] = known.get(generation, 0) + most_rows(
            located, given, self._group.num_slots
        )
        self._most = known

        def work() -> None:
            moves = claim(self.marks, generation, needed, located, given, num_others)
            move_rows(memories, moves)
            counts, first = moves.counts[:NUM_COUNTS], 0 if is_counted else FETCHED
            self.sums[first:] += counts[first:]
            if is_counted:
                self._seen.copy_(counts, non_blocking=True)

        self.queue.run(work, given)

    def _pin(self) -> None:
        """Claim slots for planned and popular rows, and pin those that have one then."""
        self._must_pin = False
        device, marks = self._group.device, self.marks
        numbers = np.concatenate([self.planned, self.popular]).astype(np.int64)
        if not len(numbers):
            return
        rows = upload(numbers, device)
        whole = DeviceLookups([(0, 0, 0)], [len(marks.slot_of_row)], [0], device)
        size = len(rows)
        given = DeviceInput(rows, None, None, size, size, is_mean=False)
        self._claim_on_device(whole, given, self._needed, is_counted=False)
        self.settle()
        kinds = torch.full((size,), POPULAR, dtype=torch.uint8, device=device)
        kinds[: len(self.planned)] = PLANNED
        slots = marks.slot_of_row[rows].long()
        marks.pins[slots[slots >= 0]] = kinds[slots >= 0]
