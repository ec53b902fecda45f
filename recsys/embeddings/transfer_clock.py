"""What moving rows between the tiers takes, and how much of it somebody waits for.

Whoever moves rows, in whatever thread, says when; whoever waits books the part of the waiting in
which rows were being written back as such, and the rest as waiting for rows to come.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MoveSeconds", "TransferClock"]


@dataclass(slots=True)  # not frozen: every step makes some, and that would take three times as long
class MoveSeconds:
    """Seconds spent on moving rows, or on waiting for it; a value, which nobody changes.

    Attributes:
        fetch: For rows that come.
        write_back: For rows that go.
    """

    fetch: float = 0.0
    write_back: float = 0.0

    def __add__(self, other: MoveSeconds) -> MoveSeconds:
        """Both, one after the other."""
        return MoveSeconds(self.fetch + other.fetch, self.write_back + other.write_back)

    def __sub__(self, other: MoveSeconds) -> MoveSeconds:
        """What has come since another count."""
        return MoveSeconds(self.fetch - other.fetch, self.write_back - other.write_back)

    @property
    def total(self) -> float:
        """Of both."""
        return self.fetch + self.write_back


class TransferClock:
    """Counts of one row space's transfers.

    Transfers are made one after the other, so one thread at a time calls `wrote_back` and
    `fetched`; the owner of the queue alone waits.

    Attributes:
        busy: What all transfers took, in whatever thread.
        exposed: How long the owner has waited for them.
    """

    def __init__(self) -> None:
        self.busy = self.exposed = MoveSeconds()
        self._written: deque[tuple[float, float]] = deque()  # since somebody last waited

    def wrote_back(self, begin: float, end: float) -> None:
        """Rows were written back meanwhile, by `perf_counter`."""
        self.busy += MoveSeconds(write_back=end - begin)
        self._written.append((begin, end))

    def fetched(self, begin: float, end: float) -> None:
        """Rows were fetched meanwhile."""
        self.busy += MoveSeconds(fetch=end - begin)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as time spent in waiting for rows."""
        begin = perf_counter()
        try:
            yield
        finally:
            end, write_back = perf_counter(), 0.0
            while self._written:  # what was noted has ended, and concerns no later wait
                first, last = self._written.popleft()
                write_back += max(0.0, min(last, end) - max(first, begin))
            self.exposed += MoveSeconds(end - begin - write_back, write_back)
