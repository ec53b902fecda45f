"""Ctrl-C and SIGTERM while a run trains: it ends after its step."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interrupted", "interrupts"]


class Interrupted(threading.Event):
    """Set by the first Ctrl-C, or SIGTERM.

    Args:
        ends_after: As below.

    Attributes:
        ends_after: What the run completes before it ends, for the notice; may be changed.
    """

    def __init__(self, ends_after: str) -> None:
        super().__init__()
        self.ends_after = ends_after


@contextmanager
def interrupts(*, has_checkpoints: bool) -> Iterator[Interrupted]:
    """A context in which the first Ctrl-C, or SIGTERM, sets an event; a notice tells the user.

    A second Ctrl-C interrupts as usual. Further SIGTERMs change nothing: a supervisor that sends
    several must not end the process before its checkpoint is written. A signal that the process
    ignores, such as Ctrl-C in a job that a script runs in the background, stays ignored.

    Args:
        has_checkpoints: Whether the run then writes a checkpoint, for the notice.

    Yields:
        The event. In a thread other than the main one it is never set.
    """
    interrupted = Interrupted("this step and a checkpoint" if has_checkpoints else "this step")
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # only the main thread may handle signals
        return

    def on_signal(number: int, _: object) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
        if not interrupted.is_set():
            interrupted.set()
            notice = f"ending after {interrupted.ends_after}; press Ctrl-C again to stop at once"
            # Not print: the signal may have interrupted one.
            os.write(2, f"\n{notice}\n".encode())

    found = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {
        number: handler or signal.SIG_DFL  # None: not set from Python
        for number, handler in found.items()
        if handler != signal.SIG_IGN
    }
    try:
        for number in before:
            signal.signal(number, on_signal)
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
