"""`recsys bench tiers --cold-tier file`: training with tables that are larger than memory.

    recsys   frequent rows in memory, all rows in files; `TrainPipeline` under each schedule
    mmap     nn.EmbeddingBag over weights mapped from the same files, torch.optim.SGD; madvise turns
             read-ahead off, without which it is many times slower
    disk     only reads of 4 KiB at random places of the files, bypassing the page cache

This measures the whole training step of the default model. All files are written with random
values first, and then dropped from the page cache. Each provider has its own process. They take
turns on the same files but on different mini-batches, so a provider seldom finds in the page cache
what another one has read. All schedules take turns in one process on the same slots, because only
one process may open the files for tiers.

Two floors are measured as well. `compute_floor` is a step that fetches nothing: it trains on
mini-batches a second time, immediately. `disk_floor` is the time to read one page for every row
that a step fetches, with the best number of concurrent reads, which is measured before training. No
schedule can be faster than the slower floor, except for rows in the page cache. So there is also
`disk_floor_of_reads`, for the pages that the system reports as read from the disk.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recsys._support.machine import memory_bytes, set_num_threads, tune_allocator
from recsys._support.memory import advise_random
from recsys._support.sizes import format_bytes
from recsys.bench.parts.disk import Disk, best_num_threads, read_empty_cache, rows_of_empty_cache
from recsys.bench.parts.file_tier_rows import FileTierTurns, rows_of_file_tier
from recsys.bench.parts.harness import Row, take_turns
from recsys.bench.parts.process_memory import AnonymousMemory
from recsys.bench.parts.scheduled import (
    ScheduledSteps,
    Turn,
    count_rows,
    num_ahead,
    steps_of_turn,
    subtract_counts,
    train_plainly,
)
from recsys.bench.parts.worker import Worker, end_turn, freeze_garbage, in_own_process
from recsys.config import ModelConfig, OptimizerConfig
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD
from recsys.errors import ConfigError
from recsys.models.dlrm import DLRM, DLRMTrain
from recsys.train.loop.tier_report import describe_tiers
from recsys.train.parts.tables import table_configs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from recsys.batch import Batch
    from recsys.bench.parts.scheduled import TurnSteps

__all__ = ["FileTierCase", "bench_file_tier", "default_table_bytes", "scaled_table_sizes"]

_LR = 0.01
_NUM_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class FileTierCase:
    """The parameters of a case.

    Attributes:
        table_sizes: Rows per table.
        dim: D.
        batch_size: B.
        budget: Budget of fast memory for recsys.
        cold_path: Folder of the files; created if it does not exist.
        schedules: Names from `SCHEDULES`, for recsys.
        num_rounds: Rounds that count.
        num_fill_steps: Mini-batches that every provider trains on before the first round.
        fill_batch_size: Samples of those, so that slots are equally full for every B.
        disk_seconds: Duration of a turn of the disk.
        is_quick: Whether turns are as short as the schedules allow.
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
        """Bytes of all tables."""
        return sum(self.table_sizes) * self.dim * 4

    @property
    def steps(self) -> TurnSteps:
        """Steps of a turn."""
        return steps_of_turn(self.batch_size, self.schedules, is_quick=self.is_quick)

    @property
    def num_samples(self) -> int:
        """Samples that a provider trains on."""
        of_round = len(self.schedules) * self.steps.num_all + self.steps.num_timed
        num_steps = of_round * (self.num_rounds + _NUM_WARM_UP_ROUNDS)
        num_steps += sum(map(num_ahead, self.schedules))
        return self.num_fill_steps * self.fill_batch_size + num_steps * self.batch_size

    def source(self) -> SyntheticCriteo:
        """The samples, enough for every provider's mini-batches."""
        return SyntheticCriteo(
            num_samples=len(_PROVIDERS) * self.num_samples,
            table_sizes=self.table_sizes,
        )

    def embeddings(self) -> HotColdEmbeddingBagCollection:
        """Recsys embeddings on the files."""
        return HotColdEmbeddingBagCollection(
            table_configs(self.source().table_sizes, self.dim),
            optimizer=SGD(lr=_LR),
            auto_apply=False,
            budget=self.budget,
            cold_tier="file",
            cold_path=self.cold_path,
        )


def scaled_table_sizes(num_bytes: int, dim: int) -> tuple[int, ...]:
    """Kaggle's table sizes, scaled by one factor so that they take `num_bytes`."""
    factor = num_bytes / (sum(KAGGLE_TABLE_SIZES) * dim * 4)
    return tuple(max(1, round(size * factor)) for size in KAGGLE_TABLE_SIZES)


def bench_file_tier(case: FileTierCase) -> list[Row]:
    """Measure all providers.

    Raises:
        ConfigError: the disk has too little free space.
    """
    if not case.cold_path.exists():
        folder = case.cold_path.absolute().parent
        free = shutil.disk_usage(folder).free
        if free < 1.02 * case.num_bytes:
            raise ConfigError(
                f"cold_path: tables take {format_bytes(case.num_bytes)}, but {folder} has only "
                f"{format_bytes(free)} free; choose another folder, or fewer rows"
            )
    in_own_process(_write_files, case)
    _drop_from_page_cache(case.cold_path)
    name = str(case)
    of_empty_cache = read_empty_cache(name, case.cold_path, case.disk_seconds)
    num_threads = best_num_threads(of_empty_cache)
    _drop_from_page_cache(case.cold_path)
    with ExitStack() as stack:
        workers = {
            provider: stack.enter_context(Worker(provider, name, make, *arguments))
            for provider, make, *arguments in (
                ("recsys", _Tiered, case),
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
        memory = {each: workers[each].call("memory") for each in ("recsys", "mmap")}
        workers["recsys"].call("sync")
    rows = rows_of_file_tier(
        name,
        batch_size=case.batch_size,
        row_bytes=case.dim * 4,
        num_bytes=case.num_bytes,
        num_timed_steps=case.steps.num_timed,
        turns=FileTierTurns(
            {each: found[each] for each in case.schedules},
            found["hits"],
            found["mmap"],
            found["disk"],
        ),
        memory=memory,
    )
    return [*rows_of_empty_cache(name, of_empty_cache), *rows]


def _write_files(case: FileTierCase) -> None:
    """Draw every row, unless an earlier run has done so."""
    set_num_threads(0)
    case.embeddings().sync()


def _drop_from_page_cache(folder: Path) -> None:
    """Drop the files from the page cache; no process may have them mapped."""
    for path in folder.glob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# Each provider uses its own range of the samples, in this order.
_PROVIDERS = ("recsys", "mmap")


class _AbstractTrainer:
    """Lives in a worker: a model on the files, and the steps of its turns."""

    def __init__(
        self,
        case: FileTierCase,
        provider: str,
        make_embeddings: Callable[[FileTierCase], tuple[Any, Any]],
    ) -> None:
        set_num_threads(0)
        tune_allocator()
        self._anonymous = AnonymousMemory()
        self._case, self._source = case, case.source()
        self._next = _PROVIDERS.index(provider) * case.num_samples
        self._embeddings, optimizer = make_embeddings(case)
        hidden = tuple(width for width in ModelConfig().dense_arch[:-1] if width > case.dim)
        dlrm = DLRM(
            self._embeddings,
            self._source.num_dense,
            (*hidden, case.dim),
            ModelConfig().over_arch,
        )
        self._model = DLRMTrain(dlrm)
        dense = [*dlrm.dense_arch.parameters(), *dlrm.over_arch.parameters()]
        self._optimizers = [torch.optim.SGD(dense, lr=_LR), optimizer]
        for _ in range(case.num_fill_steps):
            self._train([self._samples(case.fill_batch_size)])
        freeze_garbage()

    def memory(self) -> dict[str, float]:
        """Bytes of anonymous memory of this process."""
        return {
            "anonymous_at_start": self._anonymous.at_start,
            "peak_anonymous": self._anonymous.peak,
        }

    def _batch(self) -> Batch:
        return self._samples(self._case.batch_size)

    def _samples(self, number: int) -> Batch:
        begin = self._next
        self._next += number
        return self._source.read(np.arange(begin, self._next))

    def _train(self, batches: Sequence[Batch]) -> None:
        train_plainly(self._model, self._optimizers, batches)

    def _timed(self, batches: Sequence[Batch]) -> float:
        """Train on mini-batches; return the mean seconds of a step."""
        begin = time.perf_counter()
        self._train(batches)
        return (time.perf_counter() - begin) / len(batches)


class _Tiered(_AbstractTrainer):
    def __init__(self, case: FileTierCase) -> None:
        super().__init__(case, "recsys", _tiered_embeddings)
        self._scheduled = {
            name: ScheduledSteps(self._model, self._optimizers, name, self._batch, case.steps)
            for name in case.schedules
        }

    def turn(self, schedule: str) -> Turn:
        """Make the next turn's steps under a schedule, then release its slots."""
        turn = self._scheduled[schedule].turn()
        self._scheduled[schedule].leave()
        end_turn()
        return turn

    def turn_of_hits(self) -> Turn:
        """Train twice on mini-batches; measure the second time, if no row is fetched in it.

        While rows are fetched, try again with half as many mini-batches.
        """
        batches = [self._batch() for _ in range(self._case.steps.num_timed)]
        while True:
            self._train(batches)
            before = count_rows(self._model)
            seconds = self._timed(batches)
            counts = subtract_counts(count_rows(self._model), before)
            if not counts.num_fetched:
                break
            assert len(batches) > 1, "the rows of one mini-batch have slots"
            batches = batches[: len(batches) // 2]
        end_turn()
        return Turn(seconds, counts=counts)

    def memory(self) -> dict[str, float]:
        tiers = describe_tiers(self._model)
        assert tiers is not None
        return {**super().memory(), "hot_bytes": tiers["hot_bytes"]}

    def sync(self) -> None:
        """Write all rows to the files, for the next run."""
        self._embeddings.sync()


def _tiered_embeddings(case: FileTierCase) -> tuple[Any, Any]:
    """The embeddings and their optimizer."""
    embeddings = case.embeddings()
    return embeddings, embeddings.row_optimizer


class _Mapped(_AbstractTrainer):
    def __init__(self, case: FileTierCase) -> None:
        super().__init__(case, "mmap", _mapped_embeddings)

    def turn(self) -> Turn:
        """Make the next turn's steps in a plain loop."""
        num_warm, num_timed = self._case.steps
        batches = [self._batch() for _ in range(num_warm + num_timed)]
        self._train(batches[:num_warm])
        seconds = self._timed(batches[num_warm:])
        end_turn()
        return Turn(seconds)


def _mapped_embeddings(case: FileTierCase) -> tuple[Any, Any]:
    """The embeddings and their optimizer."""
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
    return embeddings, embeddings.make_optimizer(OptimizerConfig(name="sgd", lr=_LR))


def default_table_bytes(times_memory: float) -> int:
    """A multiple of the memory that this process may use, in bytes."""
    memory = memory_bytes()
    assert memory is not None  # as on every system with `posix_fadvise`
    return int(times_memory * memory)
