"""One training run in a new process, with memory and threads of its own.

    caller                                  process
    starts it and waits         ------->    imports, trains, sends how the run ended
    Ctrl-C: sends it on         ------->    as in `trainer.train`: the first ends the run
                                            after its step, the second at once
    SIGTERM: sends it on        ------->    ends the run after its step, as the first Ctrl-C
    dies                        ------->    ends at once and writes no more

The process leaves the process group of the caller. So a Ctrl-C at the terminal reaches it once,
through the caller, even while it imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from recsys._support.user_warnings import plain_warnings
from recsys.errors import RecsysError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from recsys.config import TrainConfig

__all__ = ["sigint_ignored", "train_in_own_process"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# By exit code of a process that sent no result.
_HINTS: dict[int | None, str] = {
    -9: "; often this means that memory ran out",
    1: "; it imports the script that started it: put the work of the script under "
    'if __name__ == "__main__":',
}


def train_in_own_process(
    config: TrainConfig, run_dir: Path, *, resume: bool = False, show_progress: bool
) -> None:
    """Call `train` in a new process and wait for it; the run folder holds the result.

    The process imports the main script, as every spawned process does. A script must do its work
    under `if __name__ == "__main__":`.

    Args:
        config: As for `train`, like the arguments after it.
        run_dir: The folder of the run.
        resume: Continue the run in `run_dir`.
        show_progress: Draw a progress bar.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the process has written its measurements and ended.
        ChildProcessError: the process was killed, or raised an error of another class.
        RecsysError, OSError: as `train` raises them.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, other_end = spawn.Pipe()
    arguments = (other_end, config, run_dir, resume, show_progress)
    process = spawn.Process(target=_work, args=arguments)
    with sigint_ignored():  # inherited: the process takes Ctrl-C from the pipe instead
        process.start()
    other_end.close()
    is_interrupted = False
    result = None
    try:
        with _sigterm_sent_on(connection) as terminated:
            while True:
                try:
                    result = connection.recv()
                    process.join()
                    is_interrupted = is_interrupted or terminated.is_set()
                    break
                except KeyboardInterrupt:
                    is_interrupted = True
                    with suppress(OSError):  # the process may just have ended
                        connection.send(signal.SIGINT)
                except (EOFError, ConnectionResetError):
                    process.join()
                    is_interrupted = is_interrupted or terminated.is_set()
                    if is_interrupted:
                        break
                    raise ChildProcessError(
                        f"the process that trained {run_dir} ended with exit code "
                        f"{process.exitcode} and no result{_HINTS.get(process.exitcode, '')}"
                    ) from None
    finally:
        if process.is_alive():
            process.kill()
        connection.close()
    if isinstance(result, BaseException):
        raise result
    if is_interrupted:
        raise KeyboardInterrupt


def _work(
    caller: Connection, config: TrainConfig, run_dir: Path, resume: bool, show_progress: bool
) -> None:
    """Body of the process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)
    result: BaseException | None = None
    try:
        threading.Thread(target=_listen, args=(caller,), daemon=True).start()
        from recsys.train.trainer import train

        with plain_warnings(str(run_dir)):
            train(config, run_dir, resume=resume, show_progress=show_progress)
    except KeyboardInterrupt as error:
        result = error
    except (RecsysError, OSError) as error:
        result = error
    except Exception:  # sent to the caller with its traceback
        result = ChildProcessError(f"training {run_dir} failed:\n{traceback.format_exc()}")
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    caller.send(result)


def _listen(caller: Connection) -> None:
    """Send signals on to the main thread; end the process when the caller has died."""
    while True:
        try:
            number = caller.recv()
        except (EOFError, OSError):
            os._exit(1)
        os.kill(os.getpid(), number)


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Ignore SIGINT within the `with` block, here and in processes started in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigterm_sent_on(connection: Connection) -> Iterator[threading.Event]:
    """Send SIGTERM on to the process within the `with` block, and set an event."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated  # only the main thread may handle signals
        return

    def on_signal(*_: object) -> None:
        terminated.set()
        with suppress(OSError):  # the process may just have ended
            connection.send(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)
