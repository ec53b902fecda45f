"""A worker: an object in a process of its own, which its owner asks for one thing at a time.

    owner                                worker
    Worker(...)              ------->    imports, makes the object
    call("turn", 4)          ------->    calls its method, answers with the result or the error
    leaves the `with` block  ------->    ends; so it does when its owner dies

For benchmarks whose providers must not share memory, allocator or threads, and yet take turns.
While it waits to be asked a worker does nothing: `settle` is how a method ends its turn.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from recsys.errors import RecsysError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Worker", "settle"]

# OpenMP's threads spin for about 10 ms behind a parallel region before they sleep, and the kernel
# accounts for what a running thread has used every 4 ms at worst: shorter looks may see nothing.
_LOOK_SECONDS = 0.012
_QUIET_SECONDS = 0.001
_MAX_LOOKS = 50


class Worker:
    """A process that makes an object and calls its methods; a context manager that ends it.

    Args:
        provider: Whom it measures; part of its errors.
        case: What is measured; likewise. To be changed when that changes.
        make: A top-level function or class, called with `arguments` in the process.
        arguments: For it.
    """

    def __init__(
        self, provider: str, case: str, make: Callable[..., object], *arguments: Any
    ) -> None:
        self.provider, self.case = provider, case
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._is_made = False

    def wait(self) -> None:
        """Wait until the object is made.

        Raises:
            ChildProcessError, RecsysError: as `call`.
        """
        if not self._is_made:
            self._receive()
            self._is_made = True

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            ChildProcessError: the process has died, or met an error that is none of ours; its
                traceback is in the message.
            RecsysError: as the method raises it.
        """
        self.wait()
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._death() from error
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer, error = self._connection.recv()
        except (EOFError, OSError) as ended:
            raise self._death() from ended
        if isinstance(error, RecsysError):
            raise type(error)(f"{self._place}: {error}")
        if error is not None:
            raise ChildProcessError(f"{self._place}: the worker failed:\n{error}")
        return answer

    @property
    def _place(self) -> str:
        return f"provider {self.provider!r}, case {self.case}"

    def _death(self) -> ChildProcessError:
        self._process.join()
        code = self._process.exitcode
        hint = "; often this means that memory ran out" if code == -signal.SIGKILL else ""
        return ChildProcessError(
            f"{self._place}: the worker died with exit code {code} and no traceback{hint}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A worker in the middle of something is not waited for.
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(owner: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """What the process does."""
    # Ctrl-C reaches every process of a terminal; the owner is the one to hear it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        except RecsysError as met:
            error = met
        except Exception:  # told to the owner with all there is to know
            error = traceback.format_exc()
        try:
            owner.send((answer, error))
            request = owner.recv()
        except (EOFError, OSError):
            return  # the owner has gone


def settle() -> None:
    """Wait until no thread of this process works or spins any more, for 0.6 s at most."""
    for _ in range(_MAX_LOOKS):
        before = time.process_time()
        time.sleep(_LOOK_SECONDS)
        if time.process_time() - before < _QUIET_SECONDS:
            return
