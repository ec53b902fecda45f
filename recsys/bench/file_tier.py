"""`recsys bench tiers --cold-tier file`: training with tables that are larger than memory.

    recsys   rows used often in memory, the rest in files
    mmap     nn.EmbeddingBag over weights mapped from the same files, torch.optim.SGD; the system is
             told not to read ahead (madvise), without which it is many times slower
    disk     nothing but reads of 4 KiB from random places of the files, past the page cache

The whole training step of the default model. Files are wholly written, with random values, before
anything is measured, and the page cache is emptied of them then. Each provider has a process of its
own; they take turns on the same files, on mini-batches of their own: what one has brought into the
page cache is seldom what the next one needs. What `disk` reads directly is a limit for whoever
reads a page for every row that he lacks, unless the cache has it. Before anybody trains, the same
reads are made by way of the empty cache, too: what it costs that ours does so.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recsys.bench.harness import Row, in_own_process, ratio, rows_by_provider, summarize, take_turns
from recsys.bench.worker import Worker, settle
from recsys.build import table_configs
from recsys.config import ModelConfig, OptimizerConfig
from recsys.datasets.criteo_shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.file_store import NUM_THREADS
from recsys.embeddings.kernels.file_moves import move_share
from recsys.embeddings.memory import advise_random
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tier_report import describe_tiers
from recsys.errors import ConfigError
from recsys.machine import set_num_threads, tune_allocator
from recsys.models.dlrm import DLRM, DLRMTrain
from recsys.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.batch import Batch

__all__ = ["FileTierCase", "bench_file_tier", "default_table_bytes", "scaled_table_sizes"]

_PAGE = 4096
_LR = 0.01
_NUM_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class FileTierCase:
    """What is measured.

    Attributes:
        table_sizes: Rows per table.
        dim: D.
        batch_size: B.
        budget: Of fast memory, for ours.
        cold_path: Folder of the files; made, or found whole.
        num_rounds: Rounds that count.
        num_steps: Of a turn: the first half is not timed.
        num_fill_steps: Mini-batches that every provider trains on before.
        disk_seconds: How long a turn of nothing but reads takes.
    """

    table_sizes: tuple[int, ...]
    dim: int
    batch_size: int
    budget: str
    cold_path: Path
    num_rounds: int
    num_steps: int
    num_fill_steps: int
    disk_seconds: float = 1.0

    def __str__(self) -> str:
        return (
            f"B={self.batch_size},D={self.dim},budget={self.budget},cold_tier=file,optimizer=sgd,"
            f"tables={format_bytes(self.num_bytes).replace(' ', '')}"
        )

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        return sum(self.table_sizes) * self.dim * 4

    def source(self) -> SyntheticCriteo:
        """The stream, long enough for every provider's mini-batches."""
        per_provider = self.num_fill_steps + self.num_steps * (
            self.num_rounds + _NUM_WARM_UP_ROUNDS
        )
        return SyntheticCriteo(
            num_samples=2 * len(_OFFSETS) * per_provider * self.batch_size,
            table_sizes=self.table_sizes,
        )

    def embeddings(self) -> HotColdEmbeddingBagCollection:
        """Ours, on the files."""
        return HotColdEmbeddingBagCollection(
            table_configs(self.source().table_sizes, self.dim),
            optimizer=SGD(lr=_LR),
            auto_apply=False,
            budget=self.budget,
            cold_tier="file",
            cold_path=self.cold_path,
        )


def scaled_table_sizes(num_bytes: int, dim: int) -> tuple[int, ...]:
    """Kaggle's table sizes, made larger by one factor until they take so many bytes."""
    factor = num_bytes / (sum(KAGGLE_TABLE_SIZES) * dim * 4)
    return tuple(max(1, round(size * factor)) for size in KAGGLE_TABLE_SIZES)


def bench_file_tier(case: FileTierCase) -> list[Row]:
    """Measure all of them.

    Raises:
        ConfigError: the disk has not enough room.
    """
    if not case.cold_path.exists():
        folder = case.cold_path.absolute().parent
        free = shutil.disk_usage(folder).free
        if free < 1.02 * case.num_bytes:
            raise ConfigError(
                f"cold_path: tables take {format_bytes(case.num_bytes)}, and {folder} has "
                f"{format_bytes(free)} free; choose another folder, or fewer rows"
            )
    in_own_process(_write_files, case)
    _forget_pages(case.cold_path)
    name = str(case)
    ways = _direct_beside_ordinary(case)
    _forget_pages(case.cold_path)
    with ExitStack() as stack:
        workers = {
            provider: stack.enter_context(Worker(provider, name, make, case))
            for provider, make in (
                ("recsys", _Ours),
                ("mmap", _Mapped),
                ("disk", partial(_Disk, is_direct=True)),
            )
        }
        for worker in workers.values():
            worker.wait()
        found: dict[str, list[float]] = take_turns(
            {provider: partial(worker.call, "turn") for provider, worker in workers.items()},
            case.num_rounds,
            num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
        )
        told = {each: workers[each].call("tell") for each in ("recsys", "mmap")}
        workers["recsys"].call("sync")
    return [*ways, *_rows(case, found, told)]


def _direct_beside_ordinary(case: FileTierCase) -> list[Row]:
    with ExitStack() as stack:
        workers = {
            how: stack.enter_context(
                Worker("disk", str(case), partial(_Disk, is_direct=how == "direct"), case)
            )
            for how in ("direct", "ordinary")
        }
        found: dict[str, list[float]] = take_turns(
            {how: partial(worker.call, "turn") for how, worker in workers.items()},
            case.num_rounds,
            num_warm_up_rounds=0,
        )
    return [
        summarize(
            bench="tiers",
            case=str(case),
            provider="disk",
            metric=f"{how}_reads_of_empty_cache",
            unit="reads/s",
            values=reads,
        )
        for how, reads in found.items()
    ]


def _rows(
    case: FileTierCase, found: dict[str, list[float]], told: dict[str, dict[str, Any]]
) -> list[Row]:
    name, reads = str(case), found.pop("disk")
    speeds = {
        provider: [case.batch_size / seconds for seconds in spent]
        for provider, spent in found.items()
    }
    row_of = partial(summarize, bench="tiers", case=name)
    ours = told["recsys"]
    fetched_per_sample = ours["num_fetched"] / ours["num_samples"]
    bound = float(np.median(reads)) / fetched_per_sample if fetched_per_sample else float("nan")
    once: dict[tuple[str, str, str], float] = {
        ("recsys", "fetched_rows_per_sample", "rows"): fetched_per_sample,
        ("recsys", "lookup_hit_rate", "ratio"): ours["lookup_hit_rate"],
        ("recsys", "hot_memory", "bytes"): ours["hot_bytes"],
        ("disk", "speed_if_every_fetched_row_were_a_read", "samples/s"): bound,
        ("disk", "num_bytes", "bytes"): case.num_bytes,
    }
    for provider, each in told.items():
        once[provider, "anonymous_memory_at_start", "bytes"] = each["anonymous_at_start"]
        once[provider, "peak_anonymous_memory", "bytes"] = each["peak_anonymous"]
    return [
        *rows_by_provider(
            bench="tiers", case=name, metric="speed", unit="samples/s", values=speeds
        ),
        row_of(provider="disk", metric="random_reads_of_4096", unit="reads/s", values=reads),
        ratio(
            bench="tiers",
            case=name,
            provider="recsys",
            metric="speed_over_mmap",
            values=found["recsys"],
            baseline=found["mmap"],
        ),
        *(
            row_of(provider=provider, metric=metric, unit=unit, values=[float(value)])
            for (provider, metric, unit), value in once.items()
        ),
    ]


def _write_files(case: FileTierCase) -> None:
    """Draw every row, unless an earlier run has."""
    set_num_threads(0)
    case.embeddings().sync()


def _forget_pages(folder: Path) -> None:
    """Have the system drop what it has cached of files; nobody may have them mapped."""
    for path in folder.glob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# Each provider has every so manieth mini-batch of the stream.
_OFFSETS = {"recsys": 0, "mmap": 1}


class _Trainer:
    """Lives in a worker: a model on the files, and the steps of its turns."""

    def __init__(self, case: FileTierCase, provider: str, embeddings: Any, optimizer: Any) -> None:
        self._case, self._source = case, case.source()
        self._next, self._num_trained = _OFFSETS[provider], 0
        self._embeddings, self._row_optimizer = embeddings, optimizer
        hidden = tuple(width for width in ModelConfig().dense_arch[:-1] if width > case.dim)
        dlrm = DLRM(
            embeddings,
            self._source.num_dense,
            (*hidden, case.dim),
            ModelConfig().over_arch,
        )
        self._model = DLRMTrain(dlrm)
        dense = [*dlrm.dense_arch.parameters(), *dlrm.over_arch.parameters()]
        self._dense_optimizer = torch.optim.SGD(dense, lr=_LR)
        for _ in range(case.num_fill_steps):
            self._train([self._batch()])
        self._num_trained = 0
        gc.disable()  # a turn ends with a collection; what is here now is here to stay
        gc.collect()
        gc.freeze()

    def turn(self) -> float:
        """Make the next turn's steps; the seconds of a timed one, the mean."""
        batches = [self._batch() for _ in range(self._case.num_steps)]
        half = len(batches) // 2
        self._train(batches[:half])
        begin = time.perf_counter()
        self._train(batches[half:])
        seconds = (time.perf_counter() - begin) / (len(batches) - half)
        gc.collect()
        settle()
        return seconds

    def tell(self) -> dict[str, Any]:
        """Memory."""
        return {
            "num_samples": self._num_trained * self._case.batch_size,
            "anonymous_at_start": self.watch.at_start,
            "peak_anonymous": self.watch.peak,
        }

    def _batch(self) -> Batch:
        size, number = self._case.batch_size, self._next
        self._next += len(_OFFSETS)
        return self._source.read(np.arange(number * size, (number + 1) * size))

    def _train(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, _ = self._model(batch)
            for optimizer in (self._dense_optimizer, self._row_optimizer):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (self._dense_optimizer, self._row_optimizer):
                optimizer.step()
        self._num_trained += len(batches)

    watch: _AnonymousMemory


class _Ours(_Trainer):
    def __init__(self, case: FileTierCase) -> None:
        set_num_threads(0)
        tune_allocator()
        self.watch = _AnonymousMemory()
        embeddings = case.embeddings()
        super().__init__(case, "recsys", embeddings, embeddings.row_optimizer)
        counts = [tiers.residency.counts.num_fetched for tiers in embeddings.tiers()]
        self._num_fetched_before = sum(counts)

    def tell(self) -> dict[str, Any]:
        told = describe_tiers(self._model)
        assert told is not None
        counts = [tiers.residency.counts.num_fetched for tiers in self._embeddings.tiers()]
        return {**super().tell(), **told, "num_fetched": sum(counts) - self._num_fetched_before}

    def sync(self) -> None:
        """Leave the files whole, for the next run."""
        self._embeddings.sync()


class _Mapped(_Trainer):
    def __init__(self, case: FileTierCase) -> None:
        set_num_threads(0)
        tune_allocator()
        self.watch = _AnonymousMemory()
        tables = table_configs(case.source().table_sizes, case.dim)
        embeddings = TorchEmbeddingBags(tables, torch.device("meta"))
        for table, bag in zip(tables, embeddings.embedding_bags.values(), strict=True):
            rows = torch.from_file(
                str(case.cold_path / f"{table.name}.weight.bin"),
                shared=True,
                size=table.num_embeddings * case.dim,
            )
            advise_random(rows)
            bag.weight = nn.Parameter(rows.view(table.num_embeddings, case.dim))
        optimizer = embeddings.make_optimizer(OptimizerConfig(name="sgd", lr=_LR))
        super().__init__(case, "mmap", embeddings, optimizer)


class _Disk:
    """Lives in a worker: random reads, by as many threads as ours has."""

    def __init__(self, case: FileTierCase, *, is_direct: bool) -> None:
        path = max(case.cold_path.glob("*.bin"), key=lambda each: each.stat().st_size)
        self._num_pages, self._seconds = path.stat().st_size // _PAGE, case.disk_seconds
        how = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
        self._descriptor = np.array([os.open(path, how)], np.int32)
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_RANDOM)
        self._first = np.array([0, self._num_pages], np.uint64)
        self._memory = [np.frombuffer(mmap.mmap(-1, _PAGE), np.uint8) for _ in range(NUM_THREADS)]
        self._random = np.random.default_rng(0)
        self.turn()  # compiles

    def turn(self) -> float:
        """Reads per second."""
        counts = [0] * NUM_THREADS
        pages = self._random.integers(0, self._num_pages, (NUM_THREADS, 1 << 14), np.int32)
        # No page may be cached by an earlier turn.
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_DONTNEED)
        slots = np.zeros(pages.shape[1], np.int32)
        end = time.perf_counter() + self._seconds

        def read(thread: int) -> None:
            hot, mine = self._memory[thread].reshape(1, _PAGE), pages[thread]
            while time.perf_counter() < end and counts[thread] + 64 <= len(mine):
                begin = counts[thread]
                move_share(self._descriptor, self._first, mine, slots, hot, begin, begin + 64, True)
                counts[thread] += 64

        begin = time.perf_counter()
        threads = [threading.Thread(target=read, args=(each,)) for each in range(NUM_THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return sum(counts) / (time.perf_counter() - begin)


class _AnonymousMemory:
    """The most memory of its own that this process has, looked at every few milliseconds.

    Pages of files that are mapped or cached are not its own: the system takes them back at will.
    """

    def __init__(self) -> None:
        self.at_start = self.peak = _anonymous_bytes()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, _anonymous_bytes())
            time.sleep(0.01)


def _anonymous_bytes() -> float:
    """NaN where the system does not say."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return float("nan")


def default_table_bytes(times_memory: float) -> int:
    """So many times what the machine has."""
    return int(times_memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
