"""Signals while a run trains."""

import signal

import pytest

from recsys.train.loop.interrupts import interrupts


@pytest.fixture(autouse=True)
def _handlers_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts(has_checkpoints=True) as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert not interrupted.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert interrupted.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_ctrl_c_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts(has_checkpoints=True) as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
