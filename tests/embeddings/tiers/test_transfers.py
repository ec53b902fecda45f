"""The queue of transfers, and how long transfers are waited for."""

import signal
import threading
from contextlib import suppress

import pytest

from recsys.embeddings.tiers import transfers
from recsys.embeddings.tiers.transfers import (
    MoveSeconds,
    Together,
    TransferClock,
    TransferQueue,
)
from recsys.errors import TiersFailed


@pytest.fixture
def now(monkeypatch):
    """The time, which passes when told so."""
    found = [50.0]
    monkeypatch.setattr(transfers, "perf_counter", lambda: found[0])
    return found


def test_of_a_wait_the_part_that_rows_were_written_back_in_is_booked_as_such(now):
    clock = TransferClock()
    clock.wrote_back(49.0, 53.0)  # begun a second before the wait

    with clock.waiting():
        clock.wrote_back(58.0, 59.0)
        now[0] = 60.0

    assert clock.exposed == MoveSeconds(fetch=6.0, write_back=4.0)


def test_what_was_written_back_before_a_wait_is_no_part_of_it(now):
    clock = TransferClock()
    clock.wrote_back(45.0, 49.0)

    with clock.waiting():
        now[0] = 52.0
    with clock.waiting():
        now[0] = 53.0

    assert clock.exposed == MoveSeconds(fetch=3.0)


def test_a_wait_that_ends_in_an_error_is_booked(now):
    clock = TransferClock()

    def fail():
        now[0] = 54.0
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        clock.waiting()(fail)()

    assert clock.exposed == MoveSeconds(fetch=4.0)


def test_transfers_run_in_the_order_in_which_they_were_put_in():
    queue, found, gate = TransferQueue(), [], threading.Event()
    queue.put(lambda: gate.wait() and found.append(0), in_background=True)
    for number in range(1, 20):
        queue.put(lambda number=number: found.append(number), in_background=number % 3 > 0)
    assert queue.last == 20
    assert not queue.is_done(1)

    gate.set()
    queue.wait(20)

    assert found == list(range(20))
    assert queue.last == 0


def test_transfers_put_in_together_begin_at_the_end_or_when_one_is_waited_for():
    queue, found = TransferQueue(), []

    with Together([queue]):
        for number in range(3):
            queue.put(lambda number=number: found.append(number), in_background=True)
        queue.wait(2)
        assert found[:2] == [0, 1]
        queue.settle()
        for number in range(3, 6):
            queue.put(lambda number=number: found.append(number), in_background=number < 5)
        assert found == [0, 1, 2]
        assert queue.last == 6
    queue.wait(6)

    assert found == list(range(6))


def test_transfers_put_in_together_begin_without_being_waited_for():
    queue, has_run = TransferQueue(), threading.Event()

    with Together([queue]):
        queue.put(has_run.set, in_background=True)
        assert not has_run.is_set()

    assert has_run.wait(60)


def test_a_signal_while_the_thread_is_told_loses_no_transfer(monkeypatch):
    class Executor(transfers.ThreadPoolExecutor):
        def submit(self, *arguments):
            signal.raise_signal(signal.SIGINT)
            return super().submit(*arguments)

    monkeypatch.setattr(transfers, "ThreadPoolExecutor", Executor)
    queue, has_run = TransferQueue(), threading.Event()

    with suppress(KeyboardInterrupt), Together([queue]):
        queue.put(has_run.set, in_background=True)

    assert has_run.wait(60)


def test_two_threads_that_wake_the_queue_make_one_thread_of_it(monkeypatch):
    made, is_making, goes_on = [], threading.Event(), threading.Event()

    class Executor(transfers.ThreadPoolExecutor):
        def __init__(self, *arguments, **options):
            made.append(self)
            is_making.set()
            goes_on.wait(0.2)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(transfers, "ThreadPoolExecutor", Executor)
    queue, found = TransferQueue(), []
    with Together([queue]):
        queue.put(lambda: found.append(0), in_background=True)
        other = threading.Thread(target=queue.settle)
        other.start()
        is_making.wait(60)
        queue.put(lambda: found.append(1), in_background=True)
    goes_on.set()
    other.join()
    queue.settle()

    assert len(made) == 1
    assert found == [0, 1]


def test_transfers_put_in_together_run_after_an_error_of_the_caller():
    queue, found = TransferQueue(), []

    with suppress(ValueError), Together([queue]):
        queue.put(lambda: found.append(0), in_background=True)
        raise ValueError
    queue.settle()

    assert found == [0]


def test_of_transfers_put_in_together_none_runs_after_one_that_fails():
    queue, found = TransferQueue(), []

    with Together([queue]):
        queue.put(lambda: found.append(0), in_background=True)
        queue.put(lambda: 1 / 0, in_background=True)
        queue.put(lambda: found.append(2), in_background=True)
    queue.settle()

    with pytest.raises(TiersFailed, match="ZeroDivisionError"):
        queue.require_intact()
    assert found == [0]


def test_after_a_failure_no_transfer_runs_and_every_use_names_the_first_one():
    queue, found, gate = TransferQueue(), [], threading.Event()

    def fail():
        gate.wait()
        raise OSError(28, "No space left on device")

    queue.put(lambda: found.append(0), in_background=False)
    queue.put(fail, in_background=True)
    queue.put(lambda: found.append(1), in_background=True)
    gate.set()
    queue.settle()

    with pytest.raises(TiersFailed, match=r"OSError: .*No space left.*load a checkpoint") as raised:
        queue.wait(1)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(TiersFailed, match="No space left") as raised:
        queue.put(lambda: found.append(2), in_background=True)
    assert raised.value.__cause__ is None
    assert found == [0]
