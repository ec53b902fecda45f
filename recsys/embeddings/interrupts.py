"""Ctrl-C, which may come between any two lines, kept out of those that belong together.

Python runs a signal's handler in the main thread, so only what that does can be cut in two.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["interrupts_held_back"]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """While it lasts, Ctrl-C is only noted; at the end it does what it would have done."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # signals are the main thread's business, and a handler of C's asks nobody
        return
    noted: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: noted.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
