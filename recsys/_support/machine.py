"""The machine of a run: threads, memory, and the versions that are recorded with its results.

PyTorch is imported by the functions that need it: others run before the commands import it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import threading
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from recsys._version import __version__

__all__ = [
    "Threads",
    "cpu_info",
    "describe_environment",
    "limits_of_groups",
    "lower_thread_priority",
    "memory_bytes",
    "num_cores",
    "peak_memory_bytes",
    "return_freed_memory",
    "set_num_threads",
    "tune_allocator",
]

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Threads(NamedTuple):
    """How many threads compute, and why.

    Attributes:
        num_threads: Their number.
        num_cores: Cores that this process may use.
        num_busy: Cores that other processes kept busy when the number was chosen; 0 if it was not
            chosen by them.
        chosen_by: "num_threads", "OMP_NUM_THREADS", "free cores" or, of a resumed run, "the run so
            far".
    """

    num_threads: int
    num_cores: int
    num_busy: int
    chosen_by: str

    def describe(self) -> str:
        """A line for users."""
        reason = f"by {self.chosen_by}"
        if self.chosen_by == "free cores":
            reason = f"{self.num_busy} busy with other processes; num_threads sets another number"
        return f"computing with num_threads={self.num_threads} on {self.num_cores} cores ({reason})"


def set_num_threads(num_threads: int) -> Threads:
    """Set the number of threads of this process.

    0 takes what OMP_NUM_THREADS says, at most one per core, and without it one for each core that
    no other process keeps busy, at least one: threads that share a core spin while they wait for
    each other. Idle cores of the whole machine count, so under a quota busy processes of the same
    container are not seen. Every kernel reads this number from torch (`recsys._support.jit`).
    """
    import torch

    cores = num_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list: by nesting
    if num_threads:
        chosen = Threads(num_threads, cores, 0, "num_threads")
    elif wanted.isdecimal() and int(wanted):
        chosen = Threads(min(int(wanted), cores), cores, 0, "OMP_NUM_THREADS")
    else:
        allowed, busy = len(os.sched_getaffinity(0)), round(_busy_cores())
        chosen = Threads(max(1, min(cores, allowed - busy)), cores, busy, "free cores")
    torch.set_num_threads(chosen.num_threads)
    return chosen


def _busy_cores() -> float:
    """Cores among those of this process that other processes keep busy."""
    before, own_before = _busy_ticks(), time.process_time()
    begin = time.perf_counter()
    time.sleep(0.25)
    after, own = _busy_ticks(), time.process_time() - own_before
    busy = (after - before) / os.sysconf("SC_CLK_TCK")
    return max(0.0, busy - own) / (time.perf_counter() - begin)


def _busy_ticks() -> int:
    """Ticks that the cores of this process have been busy for; 0 if it is not known."""
    names, ticks = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    with suppress(OSError):  # it may not be read
        for name, *columns in map(str.split, Path("/proc/stat").read_text().splitlines()):
            if name in names:  # user, nice, system, idle, waiting for disks, ...
                ticks += sum(map(int, columns[:8])) - int(columns[3]) - int(columns[4])
    return ticks


def tune_allocator() -> bool:
    """Make glibc keep freed memory for the next step; False if the C library is not glibc.

    By default glibc returns large blocks to the system as soon as they are freed. Every step then
    faults in its activations again, page by page. The settings hold for the whole process, so
    programs call this function and libraries must not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # From malloc.h: M_MMAP_THRESHOLD, at its maximum, and M_TRIM_THRESHOLD.
    return mallopt is not None and bool(mallopt(-3, 32 * 2**20) and mallopt(-1, 2**31 - 1))


def return_freed_memory() -> None:
    """Return memory that `tune_allocator` let glibc keep to the system.

    What threads have freed is returned in part alone: glibc keeps the ends of their heaps.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def lower_thread_priority() -> None:
    """Let all other threads run before the calling thread, where the system can."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def peak_memory_bytes() -> int | None:
    """Peak of this process's resident memory in bytes; None if the system does not report it."""
    # Not getrusage: its maximum includes the parent process before exec.
    kibibytes = _entry(Path("/proc/self/status"), "VmHWM")
    return None if kibibytes is None else int(kibibytes.split()[0]) * 1024


def describe_environment() -> dict[str, Any]:
    """Machine, versions and commit, in JSON types.

    `commit` is the commit of the checkout that this package is imported from; null for an installed
    package. `dirty` says whether the package differs from that commit. Both are those of this
    process's first call, since the code that it runs does not change afterwards.
    """
    import torch

    commit, is_dirty = _checkout()
    return {
        "recsys": __version__,
        "commit": commit,
        "dirty": is_dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "num_cores": num_cores(),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
    }


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """The commit and whether the package differs from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    git = partial(
        subprocess.run, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        commit = git(["git", "rev-parse", "HEAD"], check=True).stdout.strip()
        changes = git(["git", "status", "--porcelain", "--", "recsys"], check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(changes)


def num_cores() -> int:
    """Number of cores that this process may use.

    They are those of the machine, or of the process's affinity or the container's quota if they are
    fewer.
    """
    quotas = [int(quota) / int(period) for quota, period in limits_of_groups("cpu.max")]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def memory_bytes() -> int:
    """Bytes of memory that this process may use.

    They are those of the machine, or of the container if it has a lower limit.
    """
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([of_machine, *(int(words[0]) for words in limits_of_groups("memory.max"))])


def limits_of_groups(file: str, groups: Path = _GROUPS, root: Path = _ROOT) -> list[list[str]]:
    """The limits of the control groups (Linux, version 2) of a process, and of those above them.

    Args:
        file: The limit, such as `memory.max`.
        groups: Lists the groups, by lines such as `0::/a/b`.
        root: Where the groups are mounted. Those of a container may begin at its own group.

    Returns:
        The words of each limit; a group without one, whose first word is "max", is left out.
    """
    found = []
    lines = groups.read_text().splitlines() if groups.is_file() else []
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for folder in (root / path, *(root / path).parents):
            with suppress(OSError):  # no such group here
                found.append((folder / file).read_text().split())
            if folder == root:
                break
    return [words for words in found if words[0] != "max"]


def cpu_info(key: str) -> str | None:
    """What the system reports of the processor, such as "GenuineIntel" for "vendor_id"."""
    return _entry(Path("/proc/cpuinfo"), key)


def _entry(file: Path, key: str) -> str | None:
    """The first value of a key in lines of keys and values; None if there is none."""
    if file.is_file():
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
