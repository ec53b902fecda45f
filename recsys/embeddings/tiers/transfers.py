"""The queue of transfers between the tiers, and how long training waits for them.

All transfers of a row space run one after the other, in the order in which they were queued. So a
row is never fetched before its own write-back. If the caller waits for a transfer and the queue is
empty, it runs in the caller's thread; all others run in the queue's thread.

A failed transfer ends the queue: no further transfer runs, and every later use raises
`TiersFailed`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from recsys._support.interrupts import interrupts_held_back
from recsys._support.jit import work_alone
from recsys.errors import TiersFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MoveSeconds", "Together", "TransferClock", "TransferQueue"]


class TransferQueue:
    """Runs transfers one after the other, in the order in which they were queued.

    One thread, the owner, calls all methods. Transfers run in this thread or in the queue's own. A
    forked process has the queue, but neither its thread nor the transfers that were pending.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: deque[Callable[[], None]] = deque()
        self._num_put = self._num_done = 0
        self._num_unannounced = 0  # of the queued ones: the thread is yet to be told of them
        self._is_together = False
        self._failure = ""  # why no transfer can run any more
        self._cause: BaseException | None = None  # the exception, until `require_intact` raises
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def has_failed(self) -> bool:
        """Whether a transfer failed, so that no later one runs."""
        return bool(self._failure)

    @property
    def last(self) -> int:
        """The number of the last queued transfer; 0 if all have run."""
        is_pending = self._num_done < self._num_put and not self._failure
        return self._num_put if is_pending else 0

    def is_done(self, number: int) -> bool:
        """Whether a transfer and all before it have run."""
        return self._num_done >= number

    def put(self, run: Callable[[], None], *, in_background: bool) -> None:
        """Queue a transfer, or run it.

        Args:
            run: Copies the rows. No signal interrupts it.
            in_background: Whether the queue's thread must run it. If False and the queue is empty,
                the caller runs it.

        Raises:
            TiersFailed: this transfer or an earlier one failed.
        """
        self.require_intact()
        if in_background or self._num_done < self._num_put:
            with self._changed:
                self._num_put += 1
                self._num_unannounced += 1
                self._queued.append(run)
            if not self._is_together:
                self._wake_thread()
            return
        with interrupts_held_back():
            self._num_put += 1
            self._run(run)
        self.require_intact()

    def wait(self, number: int) -> None:
        """Wait until a transfer and all before it have run.

        Raises:
            TiersFailed: a transfer has failed.
        """
        self._wake_thread()
        if self._num_done < number and not self._failure:
            with self._changed:
                while self._num_done < number and not self._failure:
                    self._changed.wait()
        self.require_intact()

    def settle(self) -> None:
        """Wait until all queued transfers have run, or one has failed."""
        self._wake_thread()
        with self._changed:
            while self._num_done < self._num_put and not self._failure:
                self._changed.wait()

    def require_intact(self) -> None:
        """Check that every transfer so far has succeeded.

        Raises:
            TiersFailed: a transfer failed; the first such error has its exception as the cause.
        """
        self._notice_fork()
        if self._failure:
            cause, self._cause = self._cause, None
            raise TiersFailed(self._failure) from cause

    def _notice_fork(self) -> None:
        """In a forked process, begin with a thread of its own, unless transfers were pending."""
        if os.getpid() == self._process:
            return
        self._process, self._thread, self._changed = os.getpid(), None, threading.Condition()
        self._num_unannounced, self._is_together = 0, False
        if self._num_done < self._num_put and not self._failure:
            self._failure = (
                "this process was forked while rows were moved; call settle() of the module, or "
                "detach() of the TrainPipeline, before the fork"
            )
            self._queued.clear()

    def _wake_thread(self) -> None:
        """Tell the queue's thread to run the transfers that it was not told of."""
        self._notice_fork()
        if not self._num_unannounced:
            return
        # No signal and no other thread may come between reading the count and submitting it.
        with interrupts_held_back(), self._changed:
            count, self._num_unannounced = self._num_unannounced, 0
            if self._thread is None:
                self._thread = ThreadPoolExecutor(
                    1, thread_name_prefix="recsys-transfers", initializer=work_alone
                )
            try:
                self._thread.submit(self._run_first, count)
            except RuntimeError:  # the process is ending and starts no more threads
                self._run_first(count)

    def _run_first(self, count: int) -> None:
        """In the queue's thread: run the first transfers, until one has failed."""
        for _ in range(count):
            if self._failure:
                return
            self._run(self._queued.popleft())

    def _run(self, run: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            run()
        except BaseException as error:  # the next use of the rows raises it
            failure = error
        del run  # refers to the slots, which must be freed before new ones are made
        if failure is not None:
            self.fail(failure)
        else:
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()
        failure = None  # its traceback would keep the frames of all callers, and their tickets

    def fail(self, failure: BaseException) -> None:
        """End the queue, as after a transfer that failed: every later use raises `TiersFailed`."""
        with self._changed:
            self._failure = (
                "rows could not be moved between fast memory and the cold tier "
                f"({type(failure).__name__}: {failure}), so the tables cannot be used any "
                "more; build the model again and load a checkpoint"
            )
            self._cause = failure
            self._queued.clear()
            self._changed.notify_all()


class Together(NamedTuple):
    """Several queues whose threads begin when this context ends, because waking one takes a while.

    A thread begins earlier if a transfer is waited for. Contexts do not nest.

    Attributes:
        queues: The queues.
    """

    queues: Sequence[TransferQueue]

    def __enter__(self) -> None:
        """Let no thread begin."""
        for each in self.queues:
            each._is_together = True

    def __exit__(self, *error: object) -> None:
        """Let all threads begin."""
        for each in self.queues:
            each._is_together = False
        for each in self.queues:  # if one raises, waiting for the others still wakes their threads
            each._wake_thread()


@dataclass(slots=True)  # not frozen: every step makes some, and frozen ones take 3 times as long
class MoveSeconds:
    """Seconds of waiting for rows to be moved. Do not assign to its attributes.

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
        """The seconds added since an earlier measurement."""
        return MoveSeconds(self.fetch - other.fetch, self.write_back - other.write_back)

    @property
    def total(self) -> float:
        """Fetches and write-backs together."""
        return self.fetch + self.write_back


class TransferClock:
    """Measures how long callers wait for the transfers of one row space.

    Waiting during a write-back counts as waiting for write-backs; all other waiting counts as
    waiting for fetches.

    Transfers run one after the other, so only one thread at a time calls `wrote_back`. Only the
    thread that owns the queue calls `waiting`.

    Attributes:
        exposed: Seconds that the owner of the queue waited for transfers.
    """

    def __init__(self) -> None:
        self.exposed = MoveSeconds()
        self._write_backs: deque[tuple[float, float]] = deque()  # since the last wait

    def wrote_back(self, begin: float, end: float) -> None:
        """Record a write-back from `begin` to `end`, both by `perf_counter`."""
        self._write_backs.append((begin, end))

    def waited_for_nothing(self) -> None:
        """Note that no transfer is waited for; no later wait overlaps those that have ended."""
        self._write_backs.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent in this context as waiting for rows."""
        begin = perf_counter()
        try:
            yield
        finally:
            end, write_back = perf_counter(), 0.0
            while self._write_backs:  # all have ended, so no later wait can overlap them
                first, last = self._write_backs.popleft()
                write_back += max(0.0, min(last, end) - max(first, begin))
            self.exposed += MoveSeconds(end - begin - write_back, write_back)
