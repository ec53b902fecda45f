"""How fast a kernel copies rows between the device and the host's tables, by itself.

One large copy shows what PCIe gives. Rows may get less of it: because they lie at random places in
much memory, because few of the kernel's programs wait for them at once, or because of both. Many
programs that wait take the device from what computes meanwhile.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys._support.cuda.page_locks import PageLocks
from recsys.bench.gpu.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from recsys.embeddings.kernels.choice import HostCopies

__all__ = ["HostRowCopies", "bytes_in_huge_pages", "measure_host_rows"]

_MEMORY = Path("/proc/self/smaps_rollup")
_NUM_ROWS = 1 << 16  # of a copy in one direction
_PART_BYTES = 2**30
_NUMS_OF_PROGRAMS = (2, 4, 16, 64)
_PRODUCT_SIZE, _NUM_PRODUCTS = 4096, 6
_NUM_COPIES = 3  # beside the products, which take less time


class HostRowCopies(NamedTuple):
    """Bandwidths of copies of distinct rows, in bytes per second.

    Attributes:
        rows: Where they are: "in order", "random in 1 GiB", "random" over all tables, or "random,
            sorted" over all tables, but copied in order.
        num_programs: The most programs that copy.
        to_device: Rows that are fetched.
        to_host: Rows that are written back.
        products_beside: Share of their speed that matrix products keep while rows are fetched; None
            on a CPU.
    """

    rows: str
    num_programs: int
    to_device: float
    to_host: float
    products_beside: float | None


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
        products = _Products(clock, device) if device.type == "cuda" else None
        found = []
        for (name, rows), most in product(_rows_of(rows_RD, num_rows).items(), _NUMS_OF_PROGRAMS):
            fetched, written = (part.contiguous().to(device) for part in (rows[::2], rows[1::2]))

            def fetch(fetched: Tensor = fetched, most: int = most) -> None:
                kernels.fetch_rows(host, fetched, slots, in_slots, most_programs=most)

            def write(written: Tensor = written, most: int = most) -> None:
                kernels.write_rows(host, written, slots, in_slots, most_programs=most)

            to_device = in_slots.nbytes / clock.median(fetch)
            to_host = in_slots.nbytes / clock.median(write)
            beside = None if products is None else products.share_of_speed(fetch)
            found.append(HostRowCopies(name, most, to_device, to_host, beside))
        return found
    finally:
        if locks is not None:
            locks.release()


class _Products:
    """Matrix products in bfloat16 on a CUDA device, timed alone and beside copies."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._side = clock, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._factor = torch.rand(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
        self._alone = clock.median(self._multiply)

    def share_of_speed(self, copy: Callable[[], None]) -> float:
        """The speed beside copies on another stream, as a share of that alone."""

        def multiply_beside() -> None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                for _ in range(_NUM_COPIES):
                    copy()
            self._multiply()

        return self._alone / self._clock.median(multiply_beside)

    def _multiply(self) -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.mm(self._factor, self._factor)


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

    anywhere = random(len(rows_RD))
    return {
        "in order": torch.arange(2 * num_rows),
        "random in 1 GiB": random(min(num_in_part, len(rows_RD))),
        "random": anywhere,
        "random, sorted": anywhere.sort().values,
    }


def bytes_in_huge_pages() -> int | None:
    """How much of this process's memory is in huge pages; None if the system does not say."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")]
    return sum(sizes) * 1024
