"""Memory of this process, as the system counts it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["peak_of_anonymous_memory", "process_memory"]

_SECONDS_BETWEEN_SAMPLES = 0.02


def process_memory() -> dict[str, float]:
    """Memory of this process in bytes, by the system's names, such as "RssAnon" (Linux)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024.0 * int(value.split()[0])
    return found


@contextmanager
def peak_of_anonymous_memory() -> Iterator[list[float]]:
    """Sample the resident memory that is not mapped from files, 50 times a second.

    Pages of mapped files are left out, because the system takes them back when it needs memory.

    Yields:
        A list that holds the largest sample, in bytes, after the context has ended.
    """
    found: list[float] = []
    is_over = threading.Event()
    peak = 0.0

    def sample() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process_memory()["RssAnon"])
            if is_over.wait(_SECONDS_BETWEEN_SAMPLES):
                return

    thread = threading.Thread(target=sample, name="recsys-memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.append(peak)
