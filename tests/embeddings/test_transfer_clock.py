"""What is waited for: the part of it in which rows were written back, and the rest."""

import pytest

from recsys.embeddings import transfer_clock
from recsys.embeddings.transfer_clock import MoveSeconds, TransferClock


@pytest.fixture
def now(monkeypatch):
    """The time, which passes when told so."""
    found = [50.0]
    monkeypatch.setattr(transfer_clock, "perf_counter", lambda: found[0])
    return found


def test_of_a_wait_the_part_that_rows_were_written_back_in_is_booked_as_such(now):
    clock = TransferClock()
    clock.wrote_back(49.0, 53.0)  # begun a second before somebody waits

    with clock.waiting():
        clock.fetched(53.0, 58.0)
        clock.wrote_back(58.0, 59.0)
        now[0] = 60.0

    assert clock.exposed == MoveSeconds(fetch=6.0, write_back=4.0)
    assert clock.busy == MoveSeconds(fetch=5.0, write_back=5.0)


def test_what_was_written_back_while_nobody_waited_is_nobodys_wait(now):
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
