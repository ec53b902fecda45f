import os
import queue
import signal
import threading
import time
from collections import deque
from functools import partial

import pytest

from recsys.bench.parts import worker as worker_module
from recsys.bench.parts.worker import Worker, in_own_process, settle
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.errors import ConfigError

# What workers make here is the standard library's: they could not import it from a test.
CASE = "B=1,D=2"


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.outside_ci
@pytest.mark.usefixtures("quick_workers")
def test_a_worker_keeps_its_object_between_calls():
    with Worker("ours", CASE, deque, [1]) as worker:
        worker.call("append", 2)

        assert worker.call("count", 1) == worker.call("count", 2) == 1


def test_a_workers_object_is_in_another_process():
    with Worker("ours", CASE, partial(__import__, "os")) as worker:
        assert worker.call("getpid") != os.getpid()


@pytest.mark.usefixtures("quick_workers")
def test_an_error_in_a_worker_names_provider_and_case_and_carries_its_traceback():
    with Worker("ours", CASE, deque) as worker:
        worker.case = "B=3,D=4"

        with pytest.raises(ChildProcessError) as caught:
            worker.call("popleft")

        message = str(caught.value)
        assert message.startswith("provider 'ours', case B=3,D=4: the worker failed:\nTraceback")
        assert message.endswith("IndexError: pop from an empty deque\n")
        worker.call("append", 5)  # it goes on
        assert worker.call("popleft") == 5


@pytest.mark.usefixtures("quick_workers")
def test_an_error_of_ours_keeps_its_kind_and_says_where():
    with (
        Worker("ours", CASE, partial(SyntheticCriteo, num_samples=0)) as worker,
        pytest.raises(ConfigError, match=r"^provider 'ours', case B=1,D=2: .*num_samples"),
    ):
        worker.wait()


@pytest.mark.parametrize(
    ("end", "code", "hint"),
    [
        (partial(os._exit, 3), "3", "no traceback$"),
        (partial(signal.raise_signal, signal.SIGKILL), "-9", "no traceback; .* memory ran out$"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_exit_code(end, code, hint):
    with (
        Worker("ours", CASE, partial(threading.Thread, target=end)) as worker,
        pytest.raises(
            ChildProcessError, match=f"^provider 'ours', case {CASE}: .* {code} .*{hint}"
        ),
    ):
        worker.call("run")


@pytest.mark.usefixtures("quick_workers")
def test_a_call_in_a_process_of_its_own_returns_its_result_or_its_error(tmp_path):
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ConfigError, match=r"^synthetic\.num_samples"):
        in_own_process(partial(SyntheticCriteo, num_samples=0))
    with pytest.raises(FileNotFoundError) as caught:  # as it was raised: the command names the file
        in_own_process(os.listdir, str(tmp_path / "none"))
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(ChildProcessError, match=r"^the worker died with exit code -9 .*memory"):
        in_own_process(signal.raise_signal, signal.SIGKILL)


def test_ctrl_c_reaches_the_owner_of_a_worker_alone():
    with Worker("ours", CASE, partial(__import__, "signal")) as worker:
        os.kill(worker._process.pid, signal.SIGINT)  # while it imports

        assert worker.call("getsignal", signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def test_a_paused_worker_stands_still_until_its_next_call():
    with Worker("ours", CASE, partial(__import__, "os")) as worker:
        process_id = worker.call("getpid")

        worker.pause()

        os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOWAIT)
        assert worker.call("getpid") == process_id


@pytest.mark.usefixtures("quick_workers")
def test_a_worker_ends_with_its_block_in_the_middle_of_whatever_it_does():
    worker = Worker("ours", CASE, queue.Queue)
    with worker:
        worker.wait()
        worker._connection.send(("get", ()))  # waits for ever
        assert is_running(worker._process.pid)

    assert not is_running(worker._process.pid)


def test_settling_outlasts_threads_that_still_work():
    def spin(until):
        while time.monotonic() < until:
            pass

    until = time.monotonic() + 0.1
    spinning = threading.Thread(target=spin, args=(until,))
    spinning.start()

    settle()

    spinning.join()
    assert time.monotonic() >= until


def test_settling_gives_up_on_a_thread_that_never_rests(monkeypatch):
    clock = iter(range(1_000_000))
    monkeypatch.setattr(worker_module.time, "process_time", lambda: next(clock))
    looks = []
    monkeypatch.setattr(worker_module.time, "sleep", looks.append)

    settle()

    assert 10 < len(looks) < 1000
