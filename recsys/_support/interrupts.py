"""Delays Ctrl-C while several statements must run without interruption.

Python runs signal handlers in the main thread, between any two bytecode instructions. So Ctrl-C can
interrupt the main thread anywhere; it does not interrupt other threads.

A training step does this several times, so the handler is read and set by the functions behind
those of `signal`, which take a tenth of the time: they do not turn it into an enum and back. The
context is a class, because one made from a generator takes twice as long.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython
import threading
from typing import Any

__all__ = ["interrupts_held_back"]


def interrupts_held_back() -> _HeldBack:
    """A context that delays Ctrl-C: the handler runs at the end of the context."""
    return _HeldBack()


class _HeldBack:
    _handler: Any = None  # None: nothing is delayed

    def __enter__(self) -> None:
        handler = _signal.getsignal(_signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return  # only the main thread runs handlers; one written in C cannot be replaced here
        self._handler = handler
        self._noted: list[tuple[Any, ...]] = []
        _signal.signal(_signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        _signal.signal(_signal.SIGINT, self._handler)
        if self._noted:
            self._handler(*self._noted[0])

    def _note(self, *arguments: Any) -> None:
        self._noted.append(arguments)
