"""`recsys bench tiers`: training speed with less fast memory than the tables take.

    recsys     rows in two tiers, trained by `TrainPipeline` at each budget under each schedule
    resident   the same module with every row in fast memory, in a plain loop: the upper bound

This measures the whole training step of the default model. Each provider has its own process, and
they take turns. A budget is a share of the bytes of rows and state; `floor` is the least that these
mini-batches need. Before its first turn a tier is filled by the lookups of other mini-batches, as
in training, so filling is not measured. The resident module makes the same lookups, so that the
memory of the two processes differs only by the tiers.

At a share of 1 everything is resident, so this measures the pipeline itself. Pipeline and plain
loop then take turns in one process on one module.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from recsys._support.machine import peak_memory_bytes, set_num_threads, tune_allocator
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, summarize, take_turns
from recsys.bench.parts.scheduled import (
    ScheduledSteps,
    Turn,
    TurnSteps,
    num_ahead,
    steps_of_turn,
    sum_counts,
    train_plainly,
)
from recsys.bench.parts.shares import EVERYTHING, FLOOR, parse_shares
from recsys.bench.parts.worker import Worker, end_turn, freeze_garbage, settle
from recsys.config import ModelConfig, OptimizerConfig, SyntheticConfig, TrainConfig
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.embeddings.tiers.slot_costs import floor_bytes, row_bytes, slot_bytes
from recsys.train.loop.tier_report import describe_tiers
from recsys.train.parts.build import build_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from recsys.batch import Batch
    from recsys.models.dlrm import DLRM

__all__ = ["OPTIMIZERS", "SHARES", "bench_tiers"]

SHARES = (FLOOR, "0.02", "0.05", "0.1", "0.2", "0.5", "1")
_NUM_WARM_UP_ROUNDS = 3
_STATE_SIZES = {"sgd": 0, "rowwise_adagrad": 1}
OPTIMIZERS = tuple(_STATE_SIZES)


def bench_tiers(
    shares: Sequence[str],
    schedules: Sequence[str],
    *,
    dim: int,
    batch_size: int,
    optimizer: str,
    num_rounds: int,
    num_fill_steps: int,
    table_sizes: Sequence[int],
    is_quick: bool = False,
) -> Iterator[Row]:
    """Measure every budget under every schedule, compared with everything resident.

    Args:
        shares: Shares of the bytes of rows and state, or "floor". At 1 everything is resident.
        schedules: Names from `SCHEDULES`; at a share of 1 only "sequential" is used.
        dim: D.
        batch_size: B.
        optimizer: Optimizer of the rows: "sgd" or "rowwise_adagrad".
        num_rounds: Rounds that count.
        num_fill_steps: Mini-batches whose lookups fill a tier before the first round.
        table_sizes: Rows per table.
        is_quick: Whether turns are as short as the schedules allow.

    Raises:
        ConfigError: a share is neither "floor" nor above 0 and at most 1.
    """
    shares = parse_shares(shares)
    config = _config(dim, batch_size, optimizer, table_sizes)
    steps = steps_of_turn(batch_size, schedules, is_quick=is_quick)
    num_steps = steps.num_all * (num_rounds + _NUM_WARM_UP_ROUNDS) + max(map(num_ahead, schedules))
    plan = _Run(config, num_fill_steps, num_steps, steps)
    sizes = {"state": _STATE_SIZES[optimizer]}
    num_rows = sum(table_sizes)
    everything = num_rows * row_bytes(dim, torch.float32, sizes)
    of_slot = slot_bytes(dim, torch.float32, sizes)
    floor = floor_bytes(num_rows, [(plan.most_distinct(), of_slot)])
    with ExitStack() as stack:
        resident = stack.enter_context(Worker("resident", "", _Trainer, plan, "", "sequential"))
        resident.wait()
        for share in shares:
            named = f"B={batch_size},D={dim},cold_tier=host,optimizer={optimizer},share={share}"
            if share == EVERYTHING:
                case = f"{named},schedule=sequential"
                yield from _rows_of_pipeline(case, everything, resident, num_rounds)
                continue
            budget = floor if share == FLOOR else int(float(share) * everything)
            if budget < floor:
                print(f"{named}: skipped, because {budget} bytes are below the floor of {floor}")
                continue
            for schedule in schedules:
                case = f"{named},schedule={schedule}"
                with Worker("recsys", case, _Trainer, plan, str(budget), schedule) as tiered:
                    yield from _rows_of_tiers(
                        case, budget, everything, resident, tiered, num_rounds
                    )


def _rows_of_pipeline(case: str, everything: int, resident: Worker, num_rounds: int) -> list[Row]:
    """Measure the cost of the pipeline when there is nothing to fetch."""
    resident.case = case
    resident.call("begin")
    found = _take_turns(resident, resident, num_rounds)
    return [
        *_rows_of_times(case, found),
        *_rows_of_values(
            case,
            {
                ("budget", "bytes"): everything,
                ("budget_share", "ratio"): 1,
                ("hot_memory", "bytes"): everything,
            },
        ),
    ]


def _rows_of_tiers(
    case: str,
    budget: int,
    everything: int,
    resident: Worker,
    tiered: Worker,
    num_rounds: int,
) -> list[Row]:
    for worker in (tiered, resident):
        worker.case = case
        worker.call("begin")
    found = _take_turns(tiered, resident, num_rounds)
    hot_bytes: int = tiered.call("hot_bytes")
    peaks = [float(worker.call("peak_memory_bytes") or "nan") for worker in (tiered, resident)]
    counts = sum_counts(turn.counts for turn in found["recsys"])
    return [
        *_rows_of_times(case, found),
        summarize(
            "tiers",
            case,
            "recsys",
            "exposed_fetch",
            "ms",
            [1e3 * turn.exposed_seconds for turn in found["recsys"]],
        ),
        *_rows_of_values(
            case,
            {
                ("budget", "bytes"): budget,
                ("budget_share", "ratio"): budget / everything,
                ("hot_memory", "bytes"): hot_bytes,
                ("peak_over_resident", "bytes"): peaks[0] - peaks[1],
                ("mean_depth", "mini-batches"): found["recsys"][-1].mean_depth,
                ("lookup_hit_rate", "ratio"): counts.num_hits / max(1, counts.num_lookups),
                ("unique_hit_rate", "ratio"): counts.num_rows_hit / max(1, counts.num_rows),
            },
        ),
    ]


def _take_turns(scheduled: Worker, resident: Worker, num_rounds: int) -> dict[str, list[Turn]]:
    return take_turns(
        {
            "recsys": partial(scheduled.call, "turn"),
            "resident": partial(resident.call, "plain_turn"),
        },
        num_rounds,
        num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
    )


def _rows_of_times(case: str, found: Mapping[str, Sequence[Turn]]) -> list[Row]:
    seconds = {name: [turn.seconds for turn in turns] for name, turns in found.items()}
    times = {name: [1e3 * s for s in spent] for name, spent in seconds.items()}
    ours, baseline = seconds["recsys"], seconds["resident"]
    return [
        *rows_by_provider("tiers", case, "time", "ms", times),
        ratio("tiers", case, "recsys", "share_of_resident_speed", values=ours, baseline=baseline),
    ]


def _rows_of_values(case: str, values: Mapping[tuple[str, str], float]) -> list[Row]:
    return [
        summarize("tiers", case, "recsys", metric, unit, [float(value)])
        for (metric, unit), value in values.items()
    ]


def _config(dim: int, batch_size: int, optimizer: str, table_sizes: Sequence[int]) -> TrainConfig:
    model = ModelConfig()
    # The interaction needs a dense vector of the rows' length.
    hidden = tuple(width for width in model.dense_arch[:-1] if width > dim)
    return TrainConfig(
        batch_size=batch_size,
        model=ModelConfig(embedding_dim=dim, dense_arch=(*hidden, dim)),
        optimizer=OptimizerConfig(name=optimizer, lr=0.01),
        synthetic=SyntheticConfig(table_sizes=tuple(table_sizes)),
    )


@dataclass(frozen=True)
class _Run:
    """The mini-batches that every worker trains on: the first samples of a stream.

    Attributes:
        config: Configuration of the model.
        num_fill_steps: Mini-batches whose lookups fill a tier.
        num_steps: Mini-batches after those, for training.
        steps: Numbers of steps in a turn.
    """

    config: TrainConfig
    num_fill_steps: int
    num_steps: int
    steps: TurnSteps

    def source(self) -> SyntheticCriteo:
        """The stream, long enough for two loops over one module."""
        num_steps = self.num_fill_steps + 2 * self.num_steps
        return SyntheticCriteo(
            seed=self.config.seed,
            num_samples=max(14, num_steps * self.config.batch_size),
            table_sizes=self.config.synthetic.table_sizes,
        )

    def batch(self, source: SyntheticCriteo, number: int) -> Batch:
        """A mini-batch of the stream."""
        size = self.config.batch_size
        return source.read(np.arange(number * size, (number + 1) * size))

    def most_distinct(self) -> int:
        """The largest number of distinct rows in a mini-batch."""
        source = self.source()
        most = 0
        for number in range(self.num_fill_steps + self.num_steps):
            ids = self.batch(source, number).sparse_features.values().numpy()
            by_table = np.sort(ids.reshape(len(source.table_sizes), -1), axis=1)
            count = np.count_nonzero(np.diff(by_table, axis=1)) + len(by_table)
            most = max(most, int(count))
        return most


class _Trainer:
    """Lives in a worker: a model, and the steps of its turns."""

    def __init__(self, run: _Run, budget: str, schedule: str) -> None:
        set_num_threads(0)
        tune_allocator()
        self._run, self._schedule = run, schedule
        self._source = run.source()
        self._model, self._optimizers = build_model(
            replace(run.config, budget=budget), self._source
        )
        dlrm = cast("DLRM", self._model.model)
        for number in range(run.num_fill_steps):
            dlrm.sparse_arch(run.batch(self._source, number).sparse_features)
        freeze_garbage()

    def begin(self) -> None:
        """Begin again with the first mini-batch for training."""
        self._next = self._run.num_fill_steps
        self._scheduled = ScheduledSteps(
            self._model, self._optimizers, self._schedule, self._batch, self._run.steps
        )
        settle()

    def turn(self) -> Turn:
        """Make the next turn's steps under the schedule."""
        turn = self._scheduled.turn()
        self._scheduled.rest()
        end_turn()
        return turn

    def plain_turn(self) -> Turn:
        """Make the next turn's steps in a plain loop."""
        num_warm, num_timed = self._run.steps
        batches = [self._batch() for _ in range(num_warm + num_timed)]
        train_plainly(self._model, self._optimizers, batches[:num_warm])
        begin = time.perf_counter()
        train_plainly(self._model, self._optimizers, batches[num_warm:])
        seconds = (time.perf_counter() - begin) / num_timed
        end_turn()
        return Turn(seconds)

    def _batch(self) -> Batch:
        batch = self._run.batch(self._source, self._next)
        self._next += 1
        return batch

    def hot_bytes(self) -> int:
        """Bytes of fast memory that the tiers take."""
        tiers = describe_tiers(self._model)
        assert tiers is not None
        return int(tiers["hot_bytes"])

    def peak_memory_bytes(self) -> int | None:
        """The most memory that this process has held."""
        return peak_memory_bytes()
