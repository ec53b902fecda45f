"""One ordered queue of transfers between the tiers.

A row is never fetched before its own write-back, because nothing overtakes anything. What is asked
for in the foreground with nothing under way is done at once, by the caller; the rest by one thread.

A transfer that fails takes along all that are queued behind it: they may rest on what it should
have brought. The first to wait for one of them gets the error, after everything has been undone,
last first; then the queue works on. Whoever waits for another of them later gets it, too.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.embeddings.interrupts import interrupts_held_back
from recsys.jit import work_alone

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TransferQueue"]


class _Transfer(NamedTuple):
    number: int
    run: Callable[[], None]
    undo: Callable[[], None]


class TransferQueue:
    """Runs transfers one after the other, in the order in which they were put in.

    All methods are for one thread, the owner's; transfers run in it or in the queue's own.

    Attributes:
        on_span: Called with "wait" or "move", and when that began and ended, by `perf_counter`; for
            timelines.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: deque[_Transfer] = deque()
        self._num_put = 0
        self._num_done = 0
        self._error: BaseException | None = None
        self._failed: list[tuple[int, int, BaseException]] = []  # first, last, why
        self._thread: ThreadPoolExecutor | None = None
        self.on_span: Callable[[str, float, float], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have an empty queue: nothing may be under way when one is made."""
        self.settle(is_all=True)
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def last(self) -> int:
        """The number of the transfer last put in; 0 where none is under way."""
        return self._num_put if self._num_done < self._num_put else 0

    def is_done(self, number: int) -> bool:
        """Whether a transfer and all before it are made."""
        return self._error is None and self._num_done >= number

    def put(
        self, run: Callable[[], None], undo: Callable[[], None], *, in_background: bool
    ) -> None:
        """Put in a transfer.

        Args:
            run: Makes it. Where it raises, `undo` must leave things as if it had not run.
            undo: Called in the owner's thread if the transfer, or one before it, has failed.
            in_background: Whether to return before it is made.

        Raises:
            BaseException: what `run` raised, or an earlier transfer; this one is undone.
        """
        with self._changed:
            is_idle = self._num_done == self._num_put and self._error is None
            self._num_put += 1
            if not is_idle or in_background:
                self._queued.append(_Transfer(self._num_put, run, undo))
        if not is_idle or in_background:
            self._start()
        if is_idle and not in_background:
            begin = perf_counter()
            try:
                run()
            except BaseException:
                undo()
                raise
            finally:
                self._num_done = self._num_put
            self._tell("wait", begin)  # for whoever asks, that is what it is
        elif not in_background:
            self.wait(self._num_put)

    def _start(self) -> None:
        """Have the queue's thread make one more transfer."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="recsys-transfers", initializer=work_alone
            )
        try:
            self._thread.submit(self._make_next)
        except RuntimeError:  # the process is ending, and has waited for all threads
            self._make_next()

    def wait(self, number: int) -> None:
        """Wait until a transfer and all before it are made.

        Raises:
            BaseException: what one of them raised; that one and all behind it are undone.
        """
        if self._error is not None or self._num_done < number:
            begin = perf_counter()
            with self._changed:
                while self._num_done < number and self._error is None:
                    self._changed.wait()
            self._tell("wait", begin)
            self.settle()
        for first, last, error in self._failed:
            if first <= number <= last:
                # A copy, for an exception keeps whatever the frames have that it went through:
                # this one is kept, and would keep the tickets that it was raised for.
                raise copy(error) from error

    def settle(self, *, is_all: bool = False) -> None:
        """Undo what has failed, so that what slots hold may be relied on.

        Args:
            is_all: Whether to wait first until nothing is under way.
        """
        with self._changed:
            while is_all and self._num_done < self._num_put and self._error is None:
                self._changed.wait()
            if self._error is None:
                return
        with interrupts_held_back():  # what is undone by half is undone by nobody
            with self._changed:
                undone = list(self._queued)
                self._failed.append((undone[0].number, undone[-1].number, self._error))
                self._error = None
                self._queued.clear()
                self._num_done = self._num_put
            for transfer in reversed(undone):
                transfer.undo()

    def _tell(self, what: str, begin: float) -> None:
        if self.on_span is not None:
            self.on_span(what, begin, perf_counter())

    def _make_next(self) -> None:
        """In the queue's thread: make the first transfer, unless it rests on one that failed."""
        with self._changed:
            if not self._queued or self._error is not None:
                return
            transfer = self._queued[0]
        error: BaseException | None = None
        begin = perf_counter()
        try:
            transfer.run()
        except BaseException as raised:  # given to whoever waits
            error = raised
        self._tell("move", begin)
        with self._changed:
            if error is None:
                self._queued.popleft()
                self._num_done = transfer.number
            else:
                self._error = error
            self._changed.notify_all()
