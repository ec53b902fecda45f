import _signal
import os
import signal
import threading

import pytest

from recsys._support.interrupts import interrupts_held_back

USR1 = getattr(signal, "SIGUSR1", None)  # Windows lacks both, and sends no signals by `os.kill`
CHLD = getattr(signal, "SIGCHLD", None)
of_posix = pytest.mark.skipif(USR1 is None, reason="needs signals of POSIX")


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


class Preempted(Exception):
    pass


@pytest.fixture
def handled():
    """Which of two signals were handled; each handler raises."""
    found, before = [], {}

    def handle(number, _):
        found.append(number)
        raise Preempted(number)

    for number in (signal.SIGTERM, USR1, CHLD):
        before[number] = signal.signal(number, handle)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@of_posix
@pytest.mark.parametrize("number", [signal.SIGTERM, USR1, CHLD])
def test_signals_with_a_handler_of_python_are_held_back(handled, number):
    done = []

    def send():
        with interrupts_held_back():
            os.kill(os.getpid(), number)
            done.append(list(handled))

    with pytest.raises(Preempted):
        send()
    assert done == [[]]
    assert handled == [number]


@of_posix
def test_each_handler_runs_once_even_if_one_raises(handled):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def send():
        with interrupts_held_back():
            for number in (signal.SIGTERM, USR1, signal.SIGTERM):
                os.kill(os.getpid(), number)

    with pytest.raises(Preempted):
        send()

    assert handled == [signal.SIGTERM, USR1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@of_posix
@pytest.mark.parametrize("place", ["enter", "exit"])
def test_a_signal_while_handlers_are_replaced_leaves_them_all_in_place(handled, place, monkeypatch):
    numbers = (signal.SIGINT, signal.SIGTERM, USR1)
    before = [signal.getsignal(number) for number in numbers]
    replace, context = _signal.signal, interrupts_held_back()
    is_in_place = []
    if place == "exit":
        context.__enter__()

    def interrupted(number, handler):
        replace(number, handler)
        if not is_in_place:  # others are not replaced yet, or not again
            is_in_place.append(True)
            raise Preempted(number)

    monkeypatch.setattr("_signal.signal", interrupted)
    change = context.__enter__ if place == "enter" else context.__exit__
    with pytest.raises(Preempted):
        change()

    assert [signal.getsignal(number) for number in numbers] == before
    done = []
    with pytest.raises(KeyboardInterrupt):  # and the next context holds back
        press_ctrl_c_inside(done)
    assert done == [True]


@of_posix
def test_a_process_that_another_thread_forks_holds_nothing_back(handled):
    signal.signal(CHLD, signal.SIG_DFL)  # which comes when the process ends
    statuses = []

    def fork():
        if not os.fork():
            try:
                press_ctrl_c()
            except KeyboardInterrupt:
                is_interrupted = True
            else:
                is_interrupted = False
            os._exit(0 if is_interrupted and signal.getsignal(USR1).__name__ == "handle" else 1)
        statuses.append(os.wait()[1])

    thread = threading.Thread(target=fork)
    with interrupts_held_back():
        thread.start()
        thread.join()

    assert statuses == [0]
