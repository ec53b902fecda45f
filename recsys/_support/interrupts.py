"""Delays Ctrl-C while several statements must run without interruption.

Python runs signal handlers in the main thread, between any two bytecode instructions. So Ctrl-C can
interrupt the main thread anywhere; it does not interrupt other threads.

A training step does this several times, so the handler is read and set by the functions behind
those of `signal`, which take a tenth of the time: they do not turn it into an enum and back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["interrupts_held_back"]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A context that delays Ctrl-C: the handler runs at the end of the context."""
    handler = _signal.getsignal(_signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # only the main thread runs handlers; one written in C cannot be replaced here
        return
    noted: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *arguments: noted.append(arguments))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
