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
import os
import signal
import threading
from typing import Any, ClassVar

__all__ = ["interrupts_held_back"]

# Those that end a program, that a DataLoader's handler turns into an error, or that are free for a
# program's own use. Handlers of others, such as profilers', are taken not to raise.
_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "CHLD", "USR1", "USR2", "XCPU", "CONT", "BREAK")
_NUMBERS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")
)


class _HeldBack:
    """A context that delays signals: their handlers run at the end of the context, once each."""

    outer: ClassVar[_HeldBack | None] = None  # the context that delays signals now
    _handlers: dict[int, Any] | None = None  # of signals; None: this context delays nothing

    def __enter__(self) -> None:
        # Only the main thread runs handlers, and only those of Python can be replaced here.
        if _HeldBack.outer is not None or threading.current_thread() is not threading.main_thread():
            return
        self._handlers = handlers = {}
        self._replaced: list[int] = []
        self.noted: dict[int, Any] = {}  # signals that came, with their frames
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    self._replaced.append(number)
                    _signal.signal(number, self._note)
            _HeldBack.outer = self
        except BaseException:  # raised by the handler of a signal that is not replaced yet
            self.end()
            raise

    def __exit__(self, *error: object) -> None:
        if self._handlers is not None:
            self.end()

    def _note(self, number: int, frame: Any) -> None:
        self.noted.setdefault(number, frame)

    def end(self) -> None:
        """Put the handlers back, then run those whose signals came; all of them, if one raises."""
        _HeldBack.outer = None
        assert self._handlers is not None
        try:
            while self._replaced:
                _signal.signal(self._replaced[-1], self._handlers[self._replaced[-1]])
                self._replaced.pop()
            while self.noted:
                number = next(iter(self.noted))
                self._handlers[number](number, self.noted.pop(number))
        finally:
            # No exception is kept: its frames would keep what they refer to.
            if self._replaced or self.noted:
                self.end()


interrupts_held_back = _HeldBack


def _end_in_fork() -> None:
    """In a process that another thread forked: its main thread is in no context."""
    outer = _HeldBack.outer
    if outer is not None:
        outer.noted.clear()  # these signals came to the other process
        outer.end()


os.register_at_fork(after_in_child=_end_in_fork)
