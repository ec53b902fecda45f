"""`TransferQueue`: the order of moves between slots and the cold tier.

A `Fetcher` adds the transfers of its claims, and waits for them before lookups and updates that
need it.

Transfers run one after the other, in the order in which they were added. So no row is fetched
before its own write-back. Those that were started run in the queue's thread, others in the caller's
thread when it waits for them. A failed transfer ends the queue.

A signal may come between any two statements. So a transfer is added before a claim fills it, in one
call; a transfer that was given to the thread twice does nothing the second time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from recsys._support.jit import work_alone
from recsys.embeddings.kernels.cpu.claim import WRITTEN, note_arrivals
from recsys.errors import TiersFailed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recsys.embeddings.tiers.transfer import Transfer

__all__ = ["TransferQueue"]


class TransferQueue:
    """Runs transfers in order. Callers hold the lock of the group's `Fetcher`.

    Args:
        slot_of_row: The row map, which learns what has arrived when the caller waits for it.
    """

    def __init__(self, slot_of_row: NDArray[np.int32]) -> None:
        self._slot_of_row = slot_of_row
        self._transfers: deque[Transfer] = deque()  # until the row map knows that they are done
        self._given: SimpleQueue[Transfer | None] = SimpleQueue()
        self._failures: list[BaseException] = []
        self._process = 0
        self._thread: int | None = None

    def __bool__(self) -> bool:
        """Whether rows may be on their way."""
        return bool(self._transfers)

    def is_writing(self) -> bool:
        """Whether rows may be on their way to the cold tier."""
        return any(transfer.counts[WRITTEN] for transfer in self._transfers)

    def oldest_generation(self, default: int) -> int:
        """The generation of the first transfer whose rows may not have arrived."""
        return self._transfers[0].generation if self._transfers else default

    def add(self, transfer: Transfer) -> None:
        """Add a transfer, which may still be empty."""
        self._transfers.append(transfer)

    def drop_last(self) -> None:
        """Drop the transfer that was added last, which moves nothing."""
        self._transfers.pop()

    def note_arrivals(self) -> None:
        """Note the rows of transfers that are done in the row map; wait for none."""
        while self._transfers and self._transfers[0].is_done:
            self._note_first()

    def start(self) -> None:
        """Let the thread run all transfers so far.

        Raises:
            RuntimeError: as for `finish`.
        """
        if self._process != os.getpid():
            if any(transfer.is_started for transfer in self._transfers):
                raise _forked()
            self._process = os.getpid()
            arguments = self._given, self._failures
            thread = threading.Thread(target=_run, args=arguments, daemon=True, name="transfers")
            thread.start()
            self._thread = thread.ident
            weakref.finalize(self, _stop, self._given, thread)
        for transfer in self._transfers:
            if not transfer.is_started:
                transfer.is_started = True
                self._given.put(transfer)

    def finish(self, last: Transfer | None = None) -> None:
        """Wait for transfers, and note in the row map that their rows have arrived.

        Args:
            last: The last one to wait for; None for all.

        Raises:
            TiersFailed: a transfer failed.
            RuntimeError: the process was forked while transfers were pending.
        """
        while self._transfers and (last is None or last in self._transfers):
            first = self._transfers[0]
            if first.is_done or self._failures:
                pass
            elif not first.is_started:
                try:
                    first.run(is_alone=False)
                except Exception as error:
                    self._failures.append(error)
            else:
                if os.getpid() != self._process:
                    raise _forked()
                if threading.get_ident() == self._thread:  # it collects garbage, a fetcher
                    first.run(is_alone=True)
                else:
                    self._given.put(first)  # a signal may have come before `start` did
                    first.lock.acquire()
            if not first.is_done:
                raise TiersFailed(
                    "rows could not be moved, so the tables are no longer whole; build the model "
                    "again and load a checkpoint"
                ) from self._failures[0]
            self._note_first()

    def _note_first(self) -> None:
        note_arrivals(self._slot_of_row, self._transfers[0].moves_4M, self._transfers[0].counts)
        self._transfers.popleft()


def _forked() -> RuntimeError:
    return RuntimeError(
        "the process was forked while rows were on their way; fork before training or after a "
        "checkpoint"
    )


def _run(given: SimpleQueue[Any], failures: list[BaseException]) -> None:
    """The thread; it refers to no queue, so that a queue can be freed."""
    work_alone()
    while (transfer := given.get()) is not None:
        try:
            if not failures and not transfer.is_done:
                transfer.run(is_alone=True)
        except BaseException as error:  # raised where a caller waits
            failures.append(error)
        if transfer.lock.locked():
            transfer.lock.release()


def _stop(given: SimpleQueue[Any], thread: threading.Thread) -> None:
    given.put(None)
    if thread is not threading.current_thread():
        thread.join()
