"""What a transfer takes: a probe of the tier's own code, scaled to what the run has measured.

    seconds = scale * (seconds of a call + rows * seconds of a row)

One run tells the sum, but not both terms. The probe tells them apart: it fetches and writes back
random rows of the run's size, few and many at a time, in a second or two. Where the run moved rows
of the same tier, the scale makes the probe's times those of the run. Otherwise it is 1.

The probe's tables take at most 256 MiB. Files that were just written are in the system's page
cache, so the probe finds the speed of a file tier whose files fit in memory.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.embeddings.tiers.cold.file_store import FileStore
from recsys.embeddings.tiers.cold.host_store import HostStore
from recsys.embeddings.tiers.slots import Slots, row_bytes
from recsys.embeddings.tiers.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from recsys.embeddings.tiers.cold.host_store import ColdStore

__all__ = ["LineOfCosts", "TransferCosts", "probe", "sharing"]

_MOST_BYTES = 256 * 2**20
_MOST_SLOTS = 2**15
_SIZES = (64, 1024)  # rows of a transfer
_NUM_ROUNDS = 25


class LineOfCosts(NamedTuple):
    """Seconds of transfers in one direction.

    Attributes:
        of_call: Seconds of a transfer without rows.
        of_row: Seconds of each row.
    """

    of_call: float
    of_row: float

    @classmethod
    def through(cls, few: float, many: float) -> LineOfCosts:
        """The line through the seconds of transfers of the two sizes."""
        of_row = max(0.0, many - few) / (_SIZES[1] - _SIZES[0])
        return cls(max(0.0, few - of_row * _SIZES[0]), of_row)

    def seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of transfers of these numbers of rows; none without rows."""
        found: NDArray[np.float64] = (rows > 0) * (self.of_call + rows * self.of_row)
        return found

    def times(self, scale: float) -> LineOfCosts:
        """The same, each multiplied."""
        return LineOfCosts(self.of_call * scale, self.of_row * scale)


class TransferCosts(NamedTuple):
    """What transfers of one tier take while nothing else runs.

    Attributes:
        fetch: From the cold tier.
        write_back: To it.
        num_threads: Threads that a transfer keeps busy, on average: its processor time, of all
            threads, over its seconds. Reads that wait for a disk keep few busy.
    """

    fetch: LineOfCosts
    write_back: LineOfCosts
    num_threads: float

    def scaled(self, fetch: float, write_back: float) -> TransferCosts:
        """The same, with each direction multiplied."""
        return TransferCosts(
            self.fetch.times(fetch), self.write_back.times(write_back), self.num_threads
        )


def sharing(num_threads: int, transfer_threads: float, cores: int) -> tuple[float, float]:
    """What computing and transfers lose to each other while both run.

    Threads that outnumber the cores get equal shares of them.

    Args:
        num_threads: Threads that compute.
        transfer_threads: Threads that a transfer keeps busy.
        cores: Cores.

    Returns:
        The speed of computing beside a transfer, and that of a transfer beside computing, each
        relative to its speed alone.
    """
    share = min(1.0, cores / (num_threads + transfer_threads))
    of_computing, of_transfer = (min(1.0, cores / each) for each in (num_threads, transfer_threads))
    return share / of_computing, share / of_transfer


def probe(
    cold_tier: str,
    *,
    num_rows: int,
    dim: int,
    state_sizes: Mapping[str, int],
    folder: Path,
    in_background: bool,
) -> TransferCosts:
    """Time transfers of random rows.

    Args:
        cold_tier: "host" or "file".
        num_rows: Rows of all tables.
        dim: D.
        state_sizes: Numbers per row in each state array, by name.
        folder: An existing folder, for a file tier's files, which are deleted.
        in_background: Whether the transfers' own thread makes them, as with look-ahead.

    Raises:
        ColdTierError: the folder has no room for 256 MiB.
    """
    dtype = torch.float32
    num_rows = min(num_rows, _MOST_BYTES // row_bytes(dim, dtype, state_sizes))
    num_slots = min(num_rows, _MOST_SLOTS)
    hot = Slots([num_rows], dim, dtype, state_sizes, num_slots, torch.device("cpu"))
    sizes = {"weight": dim, **state_sizes}
    with _cold_store(cold_tier, sizes, num_rows, folder) as cold:
        queue, random = TransferQueue(), np.random.default_rng(0)
        found: dict[tuple[bool, int], list[float]] = {}
        busy: list[float] = []  # threads

        def move(is_fetch: bool, size: int) -> None:
            size = min(size, num_slots)
            rows = random.choice(num_rows, size, replace=False).astype(np.int32)
            slots = random.choice(num_slots, size, replace=False).astype(np.int32)

            def run() -> None:
                begin, before = perf_counter(), process_time()
                (hot.fetch if is_fetch else hot.write_back)(cold, rows, slots)
                spent, seconds = process_time() - before, perf_counter() - begin
                busy.append(spent / seconds)
                found.setdefault((is_fetch, size), []).append(seconds)

            queue.put(run, in_background=in_background)
            queue.settle()
            queue.require_intact()

        for _ in range(_NUM_ROUNDS):
            for is_fetch in (True, False):
                for size in _SIZES:
                    move(is_fetch, size)
    few, many = (min(size, num_slots) for size in _SIZES)

    def line(is_fetch: bool) -> LineOfCosts:
        return LineOfCosts.through(*(median(found[is_fetch, size]) for size in (few, many)))

    return TransferCosts(line(True), line(False), median(busy))


@contextmanager
def _cold_store(
    cold_tier: str, sizes: Mapping[str, int], num_rows: int, folder: Path
) -> Iterator[ColdStore]:
    """A cold store of one table and its state; its files are deleted afterwards.

    Args:
        cold_tier: "host" or "file".
        sizes: Numbers per row of the table and of each state array, by name.
        num_rows: Rows.
        folder: An existing folder.
    """
    if cold_tier == "host":
        arrays = [torch.ones(num_rows, size) for size in sizes.values()]
        yield HostStore(lambda: [RowSpace([each]) for each in arrays])
        return
    path = Path(tempfile.mkdtemp(prefix="what-if-", dir=folder))
    try:
        files = ColdFiles(path / "rows", {"t": ((num_rows, sizes["weight"]), torch.float32)})
        states = [
            files.make("t", name, (num_rows, size), torch.float32)
            for name, size in sizes.items()
            if name != "weight"
        ]
        weight = files.array("t")
        assert weight is not None
        for each in (weight, *states):
            each.fill_(1.0)  # so that the page cache has it
        spaces = [RowSpace([each]) for each in (weight, *states)]
        files.expect(lookups=True)
        yield FileStore(files, lambda: spaces)
        files.close()
    finally:
        shutil.rmtree(path, ignore_errors=True)
