"""Delays signals, such as Ctrl-C, while several statements must run without interruption.

Python runs signal handlers in the main thread, between any two bytecode instructions. A handler may
raise, as that of Ctrl-C does, and as others do where a scheduler of jobs announces the end by
SIGTERM or SIGUSR1. So it can interrupt the main thread anywhere, but no other thread.

A training step does this several times, so handlers are read and set by the functions behind those
of `signal`, which take a tenth of the time: they do not turn them into enums and back. The context
is a class, because one made from a generator takes twice as long.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython
import signal
import threading
from typing import Any

__all__ = ["interrupts_held_back"]

# Those that end a program, or are free for its own use.
_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "XCPU", "CONT", "BREAK")
_NUMBERS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")
)


def interrupts_held_back() -> _HeldBack:
    """A context that delays signals: their handlers run at the end of the context, once each."""
    return _HeldBack()


class _HeldBack:
    _is_held = False  # of the class: whether a context of the main thread delays signals
    # Signals and their handlers; None: another context delays them, or this is another thread.
    _replaced: list[tuple[int, Any]] | None = None

    def __enter__(self) -> None:
        # Only the main thread runs handlers, and only those of Python can be replaced here.
        if _HeldBack._is_held or threading.current_thread() is not threading.main_thread():
            return
        self._noted: dict[int, Any] = {}  # signals that came, with their frames
        self._replaced = replaced = []
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    replaced.append((number, handler))
                    _signal.signal(number, self._note)
            _HeldBack._is_held = True
        except BaseException:  # raised by the handler of a signal that is not replaced yet
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        if self._replaced is None:
            return
        handlers = dict(self._replaced)
        try:
            self._put_back()
        finally:
            self._put_back()  # the rest, if a handler that is back already has raised
            if self._noted:
                self._run(handlers)

    def _put_back(self) -> None:
        _HeldBack._is_held = False
        assert self._replaced is not None
        while self._replaced:
            _signal.signal(*self._replaced[-1])
            self._replaced.pop()

    def _note(self, number: int, frame: Any) -> None:
        self._noted.setdefault(number, frame)

    def _run(self, handlers: dict[int, Any]) -> None:
        # Not by an ExitStack: it leaves a reference cycle, which keeps what the frames refer to.
        number = next(iter(self._noted))
        frame = self._noted.pop(number)
        try:
            handlers[number](number, frame)
        finally:
            if self._noted:
                self._run(handlers)
