"""Processes that begin in milliseconds: forks of one that has imported, and has done no more."""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

# All that any of them imports: a process that runs tests has one server, which the first test to
# need it starts. What torch and recsys import only when they need it takes as long as all the rest.
_IMPORTED = (
    *("recsys.cli", "recsys.train.trainer", "recsys.ablate", "torch._dynamo"),
    *("fbgemm_gpu", "torchrec", "torchrec.distributed.model_parallel"),
    "tests.forked",
)


def server_of_forks():
    """The context of multiprocessing whose processes are such forks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    with contextlib.chdir(Path(__file__).parents[1]):  # where it finds `tests`
        forkserver.ensure_running()
    return context


class Fork:
    """A call of a function in such a process, which leads a group; what it prints is kept.

    Attributes:
        process: A `multiprocessing.Process`.
    """

    def __init__(self, function, *arguments):
        context = server_of_forks()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ends = [end for _, end in pipes]
        self._printed = [
            os.fdopen(os.dup(begin.fileno()), encoding="utf-8", errors="replace")
            for begin, _ in pipes
        ]
        self.process = context.Process(target=_call, args=(Path.cwd(), ends, function, arguments))
        self.process.start()
        for connection in itertools.chain(*pipes):
            connection.close()

    def lines(self):
        """The lines that it prints, as they come."""
        return self._printed[0]

    def end(self):
        """Wait until it and its children are gone; returns the rest of stdout, and stderr."""
        hangs = threading.Timer(300, os.killpg, (self.process.pid, signal.SIGKILL))
        hangs.start()
        try:
            with ThreadPoolExecutor(2) as readers:  # one pipe may be full while the other is read
                printed = list(readers.map(lambda file: file.read(), self._printed))
        finally:
            hangs.cancel()
        for file in self._printed:
            file.close()
        self.process.join(60)
        assert self.process.exitcode is not None
        return printed


def command(*words):
    """`recsys WORDS`, as a shell starts it; the processes that train its cells are forks of it."""
    return Fork(_recsys, [*map(str, words)])


def _call(folder, ends, function, arguments):
    os.setsid()
    os.chdir(folder)
    for descriptor, end in enumerate(ends, 1):
        os.dup2(end.fileno(), descriptor)
        end.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with_exit_functions(function)(*arguments)


def with_exit_functions(function):
    """The function with `atexit`'s callbacks after it, which multiprocessing leaves out."""

    def called(*arguments):
        try:
            function(*arguments)
        finally:
            atexit._run_exitfuncs()

    return called


def _recsys(words):
    from recsys import ablate
    from recsys.cli import main

    ablate.multiprocessing = SimpleNamespace(
        get_context=lambda _: _Forks, parent_process=multiprocessing.parent_process
    )
    sys.exit(main(words))


class _Forks:
    """In place of the context `spawn`. A descriptor tells a fork when its caller has ended."""

    @staticmethod
    def Process(target, args):  # noqa: N802
        context = multiprocessing.get_context("fork")
        return context.Process(target=_close_all_but_one, args=(target, *args))


def _close_all_but_one(target, *arguments):
    caller = multiprocessing.parent_process().sentinel
    os.closerange(3, caller)
    os.closerange(caller + 1, os.sysconf("SC_OPEN_MAX"))
    target(*arguments)
