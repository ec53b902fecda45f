"""Time spent on moving rows between the tiers, and how much of it the training thread waits for.

The thread that moves rows reports when each transfer began and ended. The thread that waits splits
its waiting time: the part during write-backs, and the rest, which is waiting for fetches.
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
    """Seconds spent on moving rows, or on waiting for that. An immutable value by convention.

    Attributes:
        fetch: From the cold tier to the hot tier.
        write_back: From the hot tier to the cold tier.
    """

    fetch: float = 0.0
    write_back: float = 0.0

    def __add__(self, other: MoveSeconds) -> MoveSeconds:
        """The sum of both."""
        return MoveSeconds(self.fetch + other.fetch, self.write_back + other.write_back)

    def __sub__(self, other: MoveSeconds) -> MoveSeconds:
        """What was added since an earlier count."""
        return MoveSeconds(self.fetch - other.fetch, self.write_back - other.write_back)

    @property
    def total(self) -> float:
        """Fetches and write-backs together."""
        return self.fetch + self.write_back


class TransferClock:
    """Measures the transfers of one row space.

    Transfers run one after the other, so only one thread at a time calls `wrote_back` and
    `fetched`. Only the thread that owns the queue calls `waiting`.

    Attributes:
        busy: Seconds that all transfers took, in any thread.
        exposed: Seconds that the owner of the queue waited for them.
    """

    def __init__(self) -> None:
        self.busy = self.exposed = MoveSeconds()
        self._write_backs: deque[tuple[float, float]] = deque()  # since the last wait

    def wrote_back(self, begin: float, end: float) -> None:
        """Record a write-back from `begin` to `end`, both by `perf_counter`."""
        self.busy += MoveSeconds(write_back=end - begin)
        self._write_backs.append((begin, end))

    def fetched(self, begin: float, end: float) -> None:
        """Record a fetch from `begin` to `end`, both by `perf_counter`."""
        self.busy += MoveSeconds(fetch=end - begin)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent in this context as waiting for rows."""
        begin = perf_counter()
        try:
            yield
        finally:
            end, write_back = perf_counter(), 0.0
            while self._write_backs:  # all have ended, so no later wait overlaps them
                first, last = self._write_backs.popleft()
                write_back += max(0.0, min(last, end) - max(first, begin))
            self.exposed += MoveSeconds(end - begin - write_back, write_back)
