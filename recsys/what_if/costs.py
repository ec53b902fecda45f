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
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.embeddings.tiers.cold.file_store import FileStore
from recsys.embeddings.tiers.cold.host_store import HostStore
from recsys.embeddings.tiers.slot_costs import row_bytes
from recsys.embeddings.tiers.slots import Slots
from recsys.embeddings.tiers.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.tiers.cold.host_store import ColdStore

__all__ = ["LineOfCosts", "TransferCosts", "probe"]

_MOST_BYTES = 256 * 2**20
_MOST_SLOTS = 2**15
_SIZES = (64, 1024)  # rows of a transfer
_NUM_ROUNDS = 25
# Beside computing: seconds of transfers, their number; products that are timed alone, their width.
_BESIDE_SECONDS, _MOST_BESIDE, _NUM_PRODUCTS, _WIDTH = 0.01, 200, 100, 64
_LEAST_SPEED = 0.05  # where a transfer ended before the first product did
_NUM_ORDERS = 32  # of rows to move; the next transfer moves others


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
    """What transfers of one tier take.

    Attributes:
        fetch: Seconds from the cold tier, while nothing else runs.
        write_back: The same of writing back.
        compute_speed: Speed of computing beside a transfer, relative to its speed alone; 1 if
            training waits for transfers.
        transfer_speed: Speed of a transfer beside computing, relative to its speed alone.
    """

    fetch: LineOfCosts
    write_back: LineOfCosts
    compute_speed: float = 1.0
    transfer_speed: float = 1.0

    def scaled(self, fetch: float, write_back: float) -> TransferCosts:
        """The same, with the seconds of each direction multiplied."""
        return self._replace(
            fetch=self.fetch.times(fetch), write_back=self.write_back.times(write_back)
        )


def probe(
    cold_tier: str,
    *,
    num_rows: int,
    dim: int,
    state_sizes: Mapping[str, int],
    folder: Path,
    rows_ahead: int,
    batch_size: int,
) -> TransferCosts:
    """Time transfers of random rows, alone and beside computing.

    Args:
        cold_tier: "host" or "file".
        num_rows: Rows of all tables.
        dim: D.
        state_sizes: Numbers per row in each state array, by name.
        folder: An existing folder, for a file tier's files, which are deleted.
        rows_ahead: Rows of a transfer that runs beside computing; 0 if training waits for all.
        batch_size: B, for the size of the operations that compute.

    Raises:
        ColdTierError: the folder has no room for 256 MiB.
    """
    num_rows = min(num_rows, _MOST_BYTES // row_bytes(dim, torch.float32, state_sizes))
    sizes = {"weight": dim, **state_sizes}
    with _cold_store(cold_tier, sizes, num_rows, folder) as cold:
        mover = _Mover(cold, num_rows, dim, state_sizes, rows_ahead)
        fetch, write_back = _line(mover, is_fetch=True), _line(mover, is_fetch=False)
        speeds = _speeds_beside(mover, rows_ahead, batch_size) if rows_ahead else (1.0, 1.0)
    return TransferCosts(fetch, write_back, *speeds)


class _Mover:
    """Moves random rows between slots and a cold store; arguments as for `probe`."""

    def __init__(
        self,
        cold: ColdStore,
        num_rows: int,
        dim: int,
        state_sizes: Mapping[str, int],
        rows_ahead: int,
    ) -> None:
        num_slots = min(num_rows, _MOST_SLOTS)
        cpu = torch.device("cpu")
        self._hot = Slots([num_rows], dim, torch.float32, state_sizes, num_slots, cpu)
        self._cold, self._in_background = cold, rows_ahead > 0
        most, random = min(num_slots, max(*_SIZES, rows_ahead)), np.random.default_rng(0)
        self._rows, self._slots = (
            [random.choice(count, most, replace=False).astype(np.int32) for _ in range(_NUM_ORDERS)]
            for count in (num_rows, num_slots)
        )
        self._number, self._seconds = 0, 0.0
        self.queue = TransferQueue()

    def seconds(self, is_fetch: bool, size: int) -> float:
        """Seconds of one transfer."""
        self.put([is_fetch], size)
        return self.taken()

    def taken(self) -> float:
        """Seconds of what was queued last, after it has ended."""
        self.queue.settle()
        self.queue.require_intact()
        return self._seconds

    def put(self, are_fetches: Sequence[bool], size: int) -> None:
        """Queue transfers of other rows each, one after the other, or make them."""

        def run() -> None:
            begin = perf_counter()
            for is_fetch in are_fetches:
                self._number += 1
                rows, slots = (
                    orders[self._number % _NUM_ORDERS][:size]
                    for orders in (self._rows, self._slots)
                )
                (self._hot.fetch if is_fetch else self._hot.write_back)(self._cold, rows, slots)
            self._seconds = perf_counter() - begin

        self.queue.put(run, in_background=self._in_background)


def _line(mover: _Mover, *, is_fetch: bool) -> LineOfCosts:
    """The costs of one direction, from transfers of both sizes in turns."""
    rounds = [[mover.seconds(is_fetch, size) for size in _SIZES] for _ in range(_NUM_ROUNDS)]
    few, many = map(median, zip(*rounds, strict=True))
    return LineOfCosts.through(few, many)


def _speeds_beside(mover: _Mover, num_rows: int, batch_size: int) -> tuple[float, float]:
    """The speeds of computing and of transfers beside each other, relative to those alone.

    Computing is a chain of small matrix products, as in the dense part of a model. So the result
    holds what training threads and transfers take from each other: cores, memory and Python's lock,
    which short operations ask for more often.

    Args:
        mover: Makes the transfers.
        num_rows: Rows of a transfer.
        batch_size: B.
    """
    left, right = torch.ones(batch_size, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    result = torch.empty(batch_size, _WIDTH)
    count = 2 + int(_BESIDE_SECONDS / mover.seconds(True, num_rows))
    moves = [number % 2 == 0 for number in range(min(count, _MOST_BESIDE))]
    of_computing, of_transfers = [], []
    for _ in range(_NUM_ROUNDS):
        begin = perf_counter()
        for _ in range(_NUM_PRODUCTS):
            torch.mm(left, right, out=result)
        of_product = (perf_counter() - begin) / _NUM_PRODUCTS
        mover.put(moves, num_rows)
        alone = mover.taken()
        mover.put(moves, num_rows)
        begin, num_products = perf_counter(), 0
        while mover.queue.last:
            torch.mm(left, right, out=result)
            num_products += 1
        of_computing.append(num_products * of_product / (perf_counter() - begin))
        of_transfers.append(alone / mover.taken())
    compute_speed, transfer_speed = (
        min(1.0, max(_LEAST_SPEED, median(each))) for each in (of_computing, of_transfers)
    )
    return compute_speed, transfer_speed


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
