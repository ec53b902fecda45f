"""Memory of this process, as the system counts it."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from weakref import ref

__all__ = ["AnonymousMemory", "process_memory"]

_SECONDS_BETWEEN_SAMPLES = 0.01


def process_memory() -> dict[str, float]:
    """Memory of this process in bytes, by the system's names, such as "RssAnon" (Linux)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024.0 * int(value.split()[0])
    return found


class AnonymousMemory:
    """Resident memory of this process that is not mapped from files.

    A thread samples it as long as this object lives.

    Pages of mapped files are left out, because the system takes them back when it needs memory.

    Attributes:
        at_start: Bytes at the start; NaN if the system does not say.
        peak: The largest sample until now.
    """

    def __init__(self) -> None:
        self.at_start = self.peak = process_memory().get("RssAnon", math.nan)
        arguments = (ref(self),)
        threading.Thread(target=_look, args=arguments, name="recsys-memory", daemon=True).start()


def _look(memory: ref[AnonymousMemory]) -> None:
    while (found := memory()) is not None:
        found.peak = max(found.peak, process_memory().get("RssAnon", math.nan))
        del found
        time.sleep(_SECONDS_BETWEEN_SAMPLES)
