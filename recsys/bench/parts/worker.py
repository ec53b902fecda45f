"""A worker: an object in a separate process, whose methods its owner calls one at a time.

    owner                                worker
    Worker(...)              ------->    imports, makes the object
    call("turn", 4)          ------->    calls the method, returns the result or the error
    leaves the `with` block  ------->    ends; it also ends when its owner dies

For benchmarks whose providers take turns but must not share memory, allocator or threads. A worker
must be idle between calls, so every turn ends with `settle` or `end_turn`; or its owner calls
`pause`, for workers whose background threads have work left that belongs to their next turn.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from recsys.errors import RecsysError
from recsys.train.trainer_process import sigint_ignored

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Worker", "end_turn", "freeze_garbage", "in_own_process", "settle"]

_T = TypeVar("_T")

# OpenMP's threads spin for about 10 ms after a parallel region before they sleep. The kernel may
# update the CPU time of a running thread only every 4 ms, so shorter looks could miss it.
_LOOK_SECONDS = 0.012
_QUIET_SECONDS = 0.001
_MAX_LOOKS = 50


class Worker:
    """A process that makes an object and calls its methods; a context manager that ends it.

    Args:
        provider: Name of the provider that it measures, for errors; if empty, they have no place.
        case: The case that it measures, for errors; set the attribute when the case changes.
        make: A top-level function or class, called with `arguments` in the process.
        arguments: Arguments of `make`.
    """

    def __init__(
        self, provider: str, case: str, make: Callable[..., object], *arguments: Any
    ) -> None:
        self.provider, self.case = provider, case
        spawn = multiprocessing.get_context("spawn")
        self._connection, other_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other_end, make, arguments), daemon=True)
        # Ctrl-C reaches every process of a terminal. The owner alone handles it: a process that
        # starts meanwhile ignores it for good.
        with sigint_ignored():
            self._process.start()
        other_end.close()
        self._is_made = False
        self._is_paused = False

    def wait(self) -> None:
        """Wait until the object is made.

        Raises:
            ChildProcessError, RecsysError, OSError: As for `call`.
        """
        if not self._is_made:
            self._receive()
            self._is_made = True

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            ChildProcessError: the process died, or the method raised another error than those
                below; the message contains its traceback.
            RecsysError, OSError: the method raised it.
        """
        self.wait()
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._death() from error
        return self._receive()

    def pause(self) -> None:
        """Stop all threads of the process until the next call."""
        self._signal(signal.SIGSTOP)
        self._is_paused = True

    def end(self) -> None:
        """Let the idle process end by itself, which frees its semaphores; a killed one warns."""
        self._connection.close()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self) -> Any:
        try:
            answer, error = self._connection.recv()
        except (EOFError, OSError) as ended:
            raise self._death() from ended
        if isinstance(error, RecsysError):
            raise type(error)(f"{self._place}{error}")
        if isinstance(error, OSError):
            raise error
        if error is not None:
            raise ChildProcessError(f"{self._place}the worker failed:\n{error}")
        return answer

    @property
    def _place(self) -> str:
        return f"provider {self.provider!r}, case {self.case}: " if self.provider else ""

    def _death(self) -> ChildProcessError:
        self._process.join()
        code = self._process.exitcode
        hint = "; often this means that memory ran out" if code == -signal.SIGKILL else ""
        return ChildProcessError(
            f"{self._place}the worker died with exit code {code} and no traceback{hint}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Do not wait for a worker that is still busy.
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(owner: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """The main loop of the process."""
    made: object = None
    request: tuple[str, tuple[Any, ...]] | None = None
    while True:
        answer: object = None
        error: object = None
        try:
            if request is None:
                made = make(*arguments)
            else:
                method, method_arguments = request
                answer = getattr(made, method)(*method_arguments)
        except (RecsysError, OSError) as raised:  # such as a full disk, which the command explains
            error = raised
        except Exception:  # the owner gets the whole traceback
            error = traceback.format_exc()
        try:
            owner.send((answer, error))
            request = owner.recv()
        except (EOFError, OSError):
            return  # the owner has ended


def in_own_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a top-level function in a new process, so that its memory is measured separately.

    Raises:
        ChildProcessError, RecsysError, OSError: As for `Worker.call`, without a place.
    """
    with Worker("", "", partial, function, *arguments) as worker:
        result = worker.call("__call__")
        worker.end()
        return cast("_T", result)


def freeze_garbage() -> None:
    """Collect garbage only at the end of turns, and never scan the objects that exist now."""
    gc.disable()
    gc.collect()
    gc.freeze()


def end_turn() -> None:
    """Collect garbage and wait until the process is idle."""
    gc.collect()
    settle()


def settle() -> None:
    """Wait until no thread of this process works or spins, for 0.6 s at most."""
    for _ in range(_MAX_LOOKS):
        before = time.process_time()
        time.sleep(_LOOK_SECONDS)
        if time.process_time() - before < _QUIET_SECONDS:
            return
