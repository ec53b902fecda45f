"""`recsys bench tiers --cold-tier file`: training with tables that are larger than memory.

    recsys   rows used often in memory, the rest in files; by `TrainPipeline`, under each schedule
    mmap     nn.EmbeddingBag over weights mapped from the same files, torch.optim.SGD; the system is
             told not to read ahead (madvise), without which it is many times slower
    disk     nothing but reads of 4 KiB from random places of the files, past the page cache

The whole training step of the default model. Files are wholly written, with random values, before
anything is measured, and the page cache is emptied of them then. Each provider has a process of its
own; they take turns on the same files, on mini-batches of their own: what one has brought into the
page cache is seldom what the next one needs. All schedules are turns of one process, on the same
slots, for no two may have the files at once.

Two floors stand beside ours. `compute_floor` is a step that fetches nothing: mini-batches are
trained on a second time, at once. `disk_floor` is what the disk takes for a page for every row that
a step fetches, with as many reads at once as it likes best, which is found before anybody trains.
No schedule can be faster than the slower of the two, but for rows that the page cache has: so there
is `disk_floor_of_reads`, too, for the pages that the system says were read from the disk.
"""

from __future__ import annotations

import gc
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

from recsys.bench.disk import Disk, best_num_threads, read_empty_cache, rows_of_empty_cache
from recsys.bench.file_tier_rows import Found, rows_of_file_tier
from recsys.bench.harness import Row, in_own_process, take_turns
from recsys.bench.scheduled import (
    ScheduledSteps,
    Turn,
    count_rows,
    less,
    num_ahead,
    steps_of_turn,
)
from recsys.bench.worker import Worker, settle
from recsys.build import table_configs
from recsys.config import ModelConfig, OptimizerConfig
from recsys.datasets.criteo_shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
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
    from recsys.bench.scheduled import TurnSteps

__all__ = ["FileTierCase", "bench_file_tier", "default_table_bytes", "scaled_table_sizes"]

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
        schedules: Of ours: names, as in `SCHEDULES`.
        num_rounds: Rounds that count.
        num_fill_steps: Mini-batches that every provider trains on before.
        fill_batch_size: Samples of those, so that a small B is measured with slots as full.
        disk_seconds: How long a turn of nothing but reads takes.
        is_quick: Whether a turn may be as short as schedules allow.
    """

    table_sizes: tuple[int, ...]
    dim: int
    batch_size: int
    budget: str
    cold_path: Path
    schedules: tuple[str, ...]
    num_rounds: int
    num_fill_steps: int
    fill_batch_size: int
    disk_seconds: float = 1.0
    is_quick: bool = False

    def __str__(self) -> str:
        return (
            f"B={self.batch_size},D={self.dim},budget={self.budget},cold_tier=file,optimizer=sgd,"
            f"tables={format_bytes(self.num_bytes).replace(' ', '')}"
        )

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        return sum(self.table_sizes) * self.dim * 4

    @property
    def steps(self) -> TurnSteps:
        """Of a turn."""
        return steps_of_turn(self.batch_size, self.schedules, is_quick=self.is_quick)

    @property
    def num_samples(self) -> int:
        """That a provider takes."""
        of_round = len(self.schedules) * self.steps.num_all + self.steps.num_timed
        num_steps = of_round * (self.num_rounds + _NUM_WARM_UP_ROUNDS)
        num_steps += sum(map(num_ahead, self.schedules))
        return self.num_fill_steps * self.fill_batch_size + num_steps * self.batch_size

    def source(self) -> SyntheticCriteo:
        """The stream, long enough for every provider's mini-batches."""
        return SyntheticCriteo(
            num_samples=len(_PROVIDERS) * self.num_samples,
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
    of_empty_cache = read_empty_cache(name, case.cold_path, case.disk_seconds)
    num_threads = best_num_threads(of_empty_cache)
    _forget_pages(case.cold_path)
    with ExitStack() as stack:
        workers = {
            provider: stack.enter_context(Worker(provider, name, make, *arguments))
            for provider, make, *arguments in (
                ("recsys", _Ours, case),
                ("mmap", _Mapped, case),
                ("disk", partial(Disk, is_direct=True), case.cold_path, case.disk_seconds),
            )
        }
        for worker in workers.values():
            worker.wait()
        found: dict[str, list[Any]] = take_turns(
            {
                **{each: partial(workers["recsys"].call, "turn", each) for each in case.schedules},
                "hits": partial(workers["recsys"].call, "turn_of_hits"),
                "mmap": partial(workers["mmap"].call, "turn"),
                "disk": partial(workers["disk"].call, "turn", num_threads),
            },
            case.num_rounds,
            num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
        )
        told = {each: workers[each].call("tell") for each in ("recsys", "mmap")}
        workers["recsys"].call("sync")
    rows = rows_of_file_tier(
        name,
        batch_size=case.batch_size,
        row_bytes=case.dim * 4,
        num_bytes=case.num_bytes,
        num_timed_steps=case.steps.num_timed,
        found=Found(
            {each: found[each] for each in case.schedules},
            found["hits"],
            found["mmap"],
            found["disk"],
        ),
        told=told,
    )
    return [*rows_of_empty_cache(name, of_empty_cache), *rows]


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


# Each has a part of the stream, one behind the other.
_PROVIDERS = ("recsys", "mmap")


class _Trainer:
    """Lives in a worker: a model on the files, and the steps of its turns."""

    def __init__(self, case: FileTierCase, provider: str, embeddings: Any, optimizer: Any) -> None:
        self._case, self._source = case, case.source()
        self._next = _PROVIDERS.index(provider) * case.num_samples
        self._embeddings = embeddings
        hidden = tuple(width for width in ModelConfig().dense_arch[:-1] if width > case.dim)
        dlrm = DLRM(
            embeddings,
            self._source.num_dense,
            (*hidden, case.dim),
            ModelConfig().over_arch,
        )
        self._model = DLRMTrain(dlrm)
        dense = [*dlrm.dense_arch.parameters(), *dlrm.over_arch.parameters()]
        self._optimizers = [torch.optim.SGD(dense, lr=_LR), optimizer]
        for _ in range(case.num_fill_steps):
            self._train([self._samples(case.fill_batch_size)])
        gc.disable()  # a turn ends with a collection; what is here now is here to stay
        gc.collect()
        gc.freeze()

    def tell(self) -> dict[str, float]:
        """Memory."""
        return {"anonymous_at_start": self.watch.at_start, "peak_anonymous": self.watch.peak}

    def _batch(self) -> Batch:
        return self._samples(self._case.batch_size)

    def _samples(self, number: int) -> Batch:
        begin = self._next
        self._next += number
        return self._source.read(np.arange(begin, self._next))

    def _train(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, _ = self._model(batch)
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()

    def _timed(self, batches: Sequence[Batch]) -> float:
        """Train on them; the seconds of a step, the mean."""
        begin = time.perf_counter()
        self._train(batches)
        return (time.perf_counter() - begin) / len(batches)

    def _end_turn(self) -> None:
        gc.collect()
        settle()

    watch: _AnonymousMemory


class _Ours(_Trainer):
    def __init__(self, case: FileTierCase) -> None:
        set_num_threads(0)
        tune_allocator()
        self.watch = _AnonymousMemory()
        embeddings = case.embeddings()
        super().__init__(case, "recsys", embeddings, embeddings.row_optimizer)
        self._scheduled = {
            name: ScheduledSteps(self._model, self._optimizers, name, self._batch, case.steps)
            for name in case.schedules
        }

    def turn(self, schedule: str) -> Turn:
        """Make the next turn's steps under a schedule, and leave the slots to the next one."""
        made = self._scheduled[schedule].turn()
        self._scheduled[schedule].leave()
        self._end_turn()
        return made

    def turn_of_hits(self) -> Turn:
        """Train on mini-batches a second time; as many as find all of their rows in slots then."""
        batches = [self._batch() for _ in range(self._case.steps.num_timed)]
        while True:
            self._train(batches)
            before = count_rows(self._model)
            seconds = self._timed(batches)
            counts = less(count_rows(self._model), before)
            if not counts.num_fetched:
                break
            assert len(batches) > 1, "the rows of one mini-batch have slots"
            batches = batches[: len(batches) // 2]
        self._end_turn()
        return Turn(seconds, counts=counts)

    def tell(self) -> dict[str, float]:
        told = describe_tiers(self._model)
        assert told is not None
        return {**super().tell(), "hot_bytes": told["hot_bytes"]}

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

    def turn(self) -> Turn:
        """Make the next turn's steps in a plain loop."""
        num_warm, num_timed = self._case.steps
        batches = [self._batch() for _ in range(num_warm + num_timed)]
        self._train(batches[:num_warm])
        seconds = self._timed(batches[num_warm:])
        self._end_turn()
        return Turn(seconds)


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
