import os
import signal
import threading

import pytest

from recsys._support.interrupts import interrupts_held_back


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_inside(done, *, nested=False):
    with interrupts_held_back():
        if nested:
            with interrupts_held_back():
                press_ctrl_c()
        else:
            press_ctrl_c()
        done.append(True)


def test_the_handler_runs_at_the_end():
    done = []
    for _ in range(2):  # and is there again
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c_inside(done)
    assert done == [True, True]


def test_nested_contexts_hold_back_to_the_outer_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c_inside(done, nested=True)
    assert done == [True]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held_back():
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_no_handler():
    before, inside = signal.getsignal(signal.SIGINT), []

    def look():
        with interrupts_held_back():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert inside == [before]
