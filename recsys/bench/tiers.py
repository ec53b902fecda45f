"""`recsys bench tiers`: what training keeps of its speed with less fast memory than tables.

    recsys     rows in two tiers, a budget and a schedule after the other, by `TrainPipeline`
    resident   the same module with every row in fast memory, in a plain loop: the ceiling

The whole training step of the default model. Each has a process of its own, which take turns. A
budget is a share of what the rows and their state take; `floor` is the least that the mini-batches
at hand can do with. Before its first turn a tier sees the lookups of mini-batches that are not
trained on, as it would have in training: what is measured is not how a tier is filled. The resident
module makes the same lookups, so that the memory of the two differs by the tiers alone.

At a share of 1 everything is resident, and what is measured is the pipeline: it takes turns with
the plain loop in one process, on one module, so that the two differ by nothing else.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from recsys.bench.harness import Row, ratio, rows_by_provider, summarize, take_turns
from recsys.bench.scheduled import ScheduledSteps, Turn, added_up, num_ahead, steps_of_turn
from recsys.bench.worker import Worker, settle
from recsys.build import build_model
from recsys.config import ModelConfig, OptimizerConfig, SyntheticConfig, TrainConfig
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.slots import floor_bytes, row_bytes, slot_bytes
from recsys.embeddings.tier_report import describe_tiers
from recsys.machine import peak_memory_bytes, set_num_threads, tune_allocator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from recsys.batch import Batch
    from recsys.bench.scheduled import TurnSteps
    from recsys.models.dlrm import DLRM

__all__ = ["FLOOR", "OPTIMIZERS", "SHARES", "bench_tiers"]

FLOOR = "floor"
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
) -> list[Row]:
    """Measure every budget under every schedule beside everything resident.

    Args:
        shares: Of the bytes of rows and state, or "floor"; 1 is everything resident.
        schedules: Names, as in `SCHEDULES`; at a share of 1 it is "sequential" alone.
        dim: D.
        batch_size: B.
        optimizer: Of the rows: "sgd" or "rowwise_adagrad".
        num_rounds: Rounds that count.
        num_fill_steps: Mini-batches that are looked up before, which fills a tier.
        table_sizes: Rows per table.
        is_quick: Whether a turn may be as short as schedules allow.
    """
    config = _config(dim, batch_size, optimizer, table_sizes)
    steps = steps_of_turn(batch_size, schedules, is_quick=is_quick)
    num_steps = steps.num_all * (num_rounds + _NUM_WARM_UP_ROUNDS) + max(map(num_ahead, schedules))
    plan = _Run(config, num_fill_steps, num_steps, steps)
    sizes = {"state": _STATE_SIZES[optimizer]}
    num_rows = sum(table_sizes)
    everything = num_rows * row_bytes(dim, torch.float32, sizes)
    of_slot = slot_bytes(dim, torch.float32, sizes)
    floor = floor_bytes(num_rows, [(plan.most_distinct(), of_slot)])
    rows: list[Row] = []
    with ExitStack() as stack:
        resident = stack.enter_context(Worker("resident", "", _Trainer, plan, "", "sequential"))
        resident.wait()
        for share in shares:
            named = f"B={batch_size},D={dim},cold_tier=host,optimizer={optimizer},share={share}"
            if share != FLOOR and float(share) == 1:
                case = f"{named},schedule=sequential"
                rows += _rows_of_pipeline(case, everything, resident, num_rounds)
                continue
            budget = floor if share == FLOOR else int(float(share) * everything)
            if budget < floor:
                print(f"{named}: left out, {budget} bytes are below the floor of {floor}")
                continue
            for schedule in schedules:
                case = f"{named},schedule={schedule}"
                with Worker("recsys", case, _Trainer, plan, str(budget), schedule) as tiered:
                    rows += _rows_of_tiers(case, budget, everything, resident, tiered, num_rounds)
    return rows


def _rows_of_pipeline(case: str, everything: int, resident: Worker, num_rounds: int) -> list[Row]:
    """What the pipeline costs where it has nothing to fetch."""
    resident.case = case
    resident.call("begin")
    found: dict[str, list[Turn]] = take_turns(
        {
            "recsys": partial(resident.call, "turn"),
            "resident": partial(resident.call, "plain_turn"),
        },
        num_rounds,
        num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
    )
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
    found: dict[str, list[Turn]] = take_turns(
        {
            "recsys": partial(tiered.call, "turn"),
            "resident": partial(resident.call, "plain_turn"),
        },
        num_rounds,
        num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
    )
    told: dict[str, Any] = tiered.call("tiers")
    peaks = [float(worker.call("peak_memory_bytes") or "nan") for worker in (tiered, resident)]
    counts = added_up(turn.counts for turn in found["recsys"])
    return [
        *_rows_of_times(case, found),
        summarize(
            bench="tiers",
            case=case,
            provider="recsys",
            metric="exposed_fetch",
            unit="ms",
            values=[1e3 * turn.exposed_seconds for turn in found["recsys"]],
        ),
        *_rows_of_values(
            case,
            {
                ("budget", "bytes"): budget,
                ("budget_share", "ratio"): budget / everything,
                ("hot_memory", "bytes"): told["hot_bytes"],
                ("peak_over_resident", "bytes"): peaks[0] - peaks[1],
                ("mean_depth", "mini-batches"): found["recsys"][-1].mean_depth,
                ("lookup_hit_rate", "ratio"): counts.num_hits / max(1, counts.num_lookups),
                ("unique_hit_rate", "ratio"): counts.num_rows_hit / max(1, counts.num_rows),
            },
        ),
    ]


def _rows_of_times(case: str, found: Mapping[str, Sequence[Turn]]) -> list[Row]:
    seconds = {name: [turn.seconds for turn in turns] for name, turns in found.items()}
    return [
        *rows_by_provider(
            bench="tiers",
            case=case,
            metric="time",
            unit="ms",
            values={name: [1e3 * s for s in spent] for name, spent in seconds.items()},
        ),
        ratio(
            bench="tiers",
            case=case,
            provider="recsys",
            metric="share_of_resident_speed",
            values=seconds["recsys"],
            baseline=seconds["resident"],
        ),
    ]


def _rows_of_values(case: str, values: Mapping[tuple[str, str], float]) -> list[Row]:
    row_of: Callable[..., Row] = partial(summarize, bench="tiers", case=case, provider="recsys")
    return [
        row_of(metric=metric, unit=unit, values=[float(value)])
        for (metric, unit), value in values.items()
    ]


def _config(dim: int, batch_size: int, optimizer: str, table_sizes: Sequence[int]) -> TrainConfig:
    model = ModelConfig()
    # The dense vector meets those of the rows, so it is as long.
    hidden = tuple(width for width in model.dense_arch[:-1] if width > dim)
    return TrainConfig(
        batch_size=batch_size,
        model=ModelConfig(embedding_dim=dim, dense_arch=(*hidden, dim)),
        optimizer=OptimizerConfig(name=optimizer, lr=0.01),
        synthetic=SyntheticConfig(table_sizes=tuple(table_sizes)),
    )


class _Run:
    """What every worker trains on: the samples of a stream, from the first on.

    Args:
        config: Of the model.
        num_fill_steps: Mini-batches whose lookups fill a tier.
        num_steps: Mini-batches that tiers are trained on, behind those.
        steps: Of a turn.
    """

    def __init__(
        self, config: TrainConfig, num_fill_steps: int, num_steps: int, steps: TurnSteps
    ) -> None:
        self.config, self.num_fill_steps, self.num_steps = config, num_fill_steps, num_steps
        self.steps = steps

    def source(self) -> SyntheticCriteo:
        """The stream, which lasts for two loops over one module, too."""
        num_steps = self.num_fill_steps + 2 * self.num_steps
        return SyntheticCriteo(
            seed=self.config.seed,
            num_samples=max(14, num_steps * self.config.batch_size),
            table_sizes=self.config.synthetic.table_sizes,
        )

    def batch(self, source: SyntheticCriteo, number: int) -> Batch:
        """A mini-batch of it."""
        size = self.config.batch_size
        return source.read(np.arange(number * size, (number + 1) * size))

    def most_distinct(self) -> int:
        """Distinct rows of the mini-batch that has most."""
        source = self.source()
        found = 0
        for number in range(self.num_fill_steps + self.num_steps):
            ids = self.batch(source, number).sparse_features.values().numpy()
            by_table = np.sort(ids.reshape(len(source.table_sizes), -1), axis=1)
            count = np.count_nonzero(np.diff(by_table, axis=1)) + len(by_table)
            found = max(found, int(count))
        return found


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
        gc.disable()  # a turn ends with a collection; what is here now is here to stay
        gc.collect()
        gc.freeze()

    def begin(self) -> None:
        """Begin with the first mini-batch that is trained on."""
        self._next = self._run.num_fill_steps
        self._scheduled = ScheduledSteps(
            self._model, self._optimizers, self._schedule, self._batch, self._run.steps
        )
        settle()

    def turn(self) -> Turn:
        """Make the next turn's steps under the schedule."""
        made = self._scheduled.turn()
        self._scheduled.rest()
        self._end_turn()
        return made

    def plain_turn(self) -> Turn:
        """Make the next turn's steps in a plain loop."""
        num_warm, num_timed = self._run.steps
        batches = [self._batch() for _ in range(num_warm + num_timed)]
        self._make_steps(batches[:num_warm])
        begin = time.perf_counter()
        self._make_steps(batches[num_warm:])
        seconds = (time.perf_counter() - begin) / num_timed
        self._end_turn()
        return Turn(seconds)

    def _batch(self) -> Batch:
        batch = self._run.batch(self._source, self._next)
        self._next += 1
        return batch

    def _make_steps(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, _ = self._model(batch)
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()

    def _end_turn(self) -> None:
        gc.collect()
        settle()

    def tiers(self) -> dict[str, Any] | None:
        """Memory that the tiers take."""
        return describe_tiers(self._model)

    def peak_memory_bytes(self) -> int | None:
        """The most memory this process has held."""
        return peak_memory_bytes()
