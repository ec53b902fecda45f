"""How fast a kernel copies rows between the device and the host's tables, by itself.

One large copy shows what PCIe gives. Rows may get less of it: because they lie at random places in
much memory, because few of the kernel's programs wait for them at once, or because of both.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys._support.page_locks import PageLocks
from recsys.bench.gpu.clock import Clock

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.choice import HostCopies

__all__ = ["HostRowCopies", "bytes_in_huge_pages", "measure_host_rows"]

_MEMORY = Path("/proc/self/smaps_rollup")
_NUM_ROWS = 1 << 16  # of a copy in one direction
_PART_BYTES = 2**30
_NUMS_OF_PROGRAMS = (16, 64, 256, 1024)


class HostRowCopies(NamedTuple):
    """Bandwidths of copies of distinct rows, in bytes per second.

    Attributes:
        rows: Where they are: "in order", "random in 1 GiB" or "random" over all tables.
        num_programs: The most programs that copy.
        to_device: Rows that are fetched.
        both_ways: Rows that are fetched while as many others are written back, counted together.
    """

    rows: str
    num_programs: int
    to_device: float
    both_ways: float


def measure_host_rows(
    rows_RD: Tensor, device: torch.device, kernels: HostCopies
) -> list[HostRowCopies]:
    """Measure copies from and to a table; the rows written back get other values.

    Args:
        rows_RD: The table on the host, (R, D) with at least two rows, in pages of its own.
        device: Where the kernels run.
        kernels: The kernels of that device.

    Raises:
        OSError: CUDA refuses to page-lock the table.
    """
    locks = PageLocks([rows_RD], device) if device.type == "cuda" else None
    try:
        clock, host = Clock(device), kernels.host_rows([rows_RD], device)
        num_rows = min(_NUM_ROWS, len(rows_RD) // 2)
        in_slots = torch.zeros(num_rows, rows_RD.shape[1], dtype=rows_RD.dtype, device=device)
        slots = torch.arange(num_rows, device=device)
        found = []
        for (name, rows), most in product(_rows_of(rows_RD, num_rows).items(), _NUMS_OF_PROGRAMS):
            fetched, written = (part.contiguous().to(device) for part in (rows[::2], rows[1::2]))

            def fetch(fetched: Tensor = fetched, most: int = most) -> None:
                kernels.fetch_rows(host, fetched, slots, in_slots, most_programs=most)

            def move(
                fetched: Tensor = fetched, written: Tensor = written, most: int = most
            ) -> None:
                kernels.move_rows(
                    host, written, slots, fetched, slots, in_slots, most_programs=most
                )

            to_device = in_slots.nbytes / clock.median(fetch)
            both_ways = 2 * in_slots.nbytes / clock.median(move)
            found.append(HostRowCopies(name, most, to_device, both_ways))
        return found
    finally:
        if locks is not None:
            locks.release()


def _rows_of(rows_RD: Tensor, num_rows: int) -> dict[str, Tensor]:
    """By name: twice `num_rows` distinct rows; every other one is fetched, the rest written."""
    num_in_part = max(2 * num_rows, _PART_BYTES // rows_RD[0].nbytes)
    generator = torch.Generator().manual_seed(0)

    def random(num: int) -> Tensor:
        """Distinct ones, one from each of so many stretches of equal length, in random order."""
        stretch = num // (2 * num_rows)
        offsets = torch.randint(stretch, (2 * num_rows,), generator=generator)
        drawn = torch.arange(2 * num_rows) * stretch + offsets
        return drawn[torch.randperm(2 * num_rows, generator=generator)]

    return {
        "in order": torch.arange(2 * num_rows),
        "random in 1 GiB": random(min(num_in_part, len(rows_RD))),
        "random": random(len(rows_RD)),
    }


def bytes_in_huge_pages() -> int | None:
    """How much of this process's memory is in huge pages; None if the system does not say."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")]
    return sum(sizes) * 1024
