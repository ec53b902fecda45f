"""One training run in a fresh process, so that its memory and its threads are its own.

    caller                                  process
    starts it, waits            ------->    imports, trains, answers with how it ended
    Ctrl-C: passes it on        ------->    as in `recsys.trainer.train`: the first ends the run
                                            behind its step, the second at once
    dies                        ------->    ends at once, so that nothing goes on writing

The process leaves the caller's process group: a Ctrl-C typed at a terminal reaches it once, through
the caller, whether it is still importing or in the middle of a step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from recsys.errors import RecsysError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from recsys.config import TrainConfig

__all__ = ["train_in_own_process"]

_INTERRUPT = "interrupt"
# By the exit code of a process that gave no answer.
_HINTS: dict[int | None, str] = {
    -9: "; often this means that memory ran out",
    1: "; it imports the script that started it: put what that does under "
    'if __name__ == "__main__":',
}


def train_in_own_process(config: TrainConfig, run_dir: Path, *, show_progress: bool) -> None:
    """Call `train` in a fresh process and wait for it; the run's folder holds the result.

    The process imports the main script, as spawned processes do: what a script does belongs under
    `if __name__ == "__main__":`.

    Raises:
        KeyboardInterrupt: Ctrl-C; the process has ended, having written what it measured.
        ChildProcessError: the process was killed, or met an error that is none of ours.
        RecsysError, OSError: as `train` raises them.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, config, run_dir, show_progress))
    with _sigint_ignored():  # the process starts so and listens to `ours` instead
        process.start()
    theirs.close()
    is_interrupted = False
    answer = None
    try:
        while True:
            try:
                answer = ours.recv()
                process.join()
                break
            except KeyboardInterrupt:
                is_interrupted = True
                with suppress(OSError):  # it may just have ended
                    ours.send(_INTERRUPT)
            except (EOFError, ConnectionResetError):
                process.join()
                if is_interrupted:
                    break
                raise ChildProcessError(
                    f"the process that trained {run_dir} ended with exit code {process.exitcode} "
                    f"and no answer{_HINTS.get(process.exitcode, '')}"
                ) from None
    finally:
        if process.is_alive():
            process.kill()
        ours.close()
    if isinstance(answer, BaseException):
        raise answer
    if is_interrupted:
        raise KeyboardInterrupt


def _work(caller: Connection, config: TrainConfig, run_dir: Path, show_progress: bool) -> None:
    """What the process does."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answer: BaseException | None = None
    try:
        threading.Thread(target=_obey, args=(caller,), daemon=True).start()
        from recsys.trainer import train

        train(config, run_dir, show_progress=show_progress)
    except KeyboardInterrupt as error:
        answer = error
    except (RecsysError, OSError) as error:
        answer = error
    except Exception:  # told to the caller with all there is to know
        answer = ChildProcessError(f"training {run_dir} failed:\n{traceback.format_exc()}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    caller.send(answer)


def _obey(caller: Connection) -> None:
    """Interrupt the main thread when told to; end the process when the caller has gone."""
    while True:
        try:
            caller.recv()
        except (EOFError, OSError):
            os._exit(1)
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """While it lasts, SIGINT is ignored, here and in a process started meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
