"""`recsys bench tiers`: what training keeps of its speed with less fast memory than tables.

    recsys     rows in two tiers, a budget after the other
    resident   the same module with every row in fast memory: the ceiling

The whole training step of the default model. Each has a process of its own, which take turns. A
budget is a share of what the rows and their state take; `floor` is the least that the mini-batches
at hand can do with. Before its first turn a tier sees the lookups of mini-batches that are not
trained on, as it would have in training: what is measured is not how a tier is filled. The resident
module makes the same lookups, so that the memory of the two differs by the tiers alone.
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
from recsys.bench.worker import Worker, settle
from recsys.build import build_model
from recsys.config import ModelConfig, OptimizerConfig, SyntheticConfig, TrainConfig
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings.hot_tier import floor_bytes, row_bytes, slot_bytes
from recsys.embeddings.tier_report import describe_tiers
from recsys.machine import peak_memory_bytes, set_num_threads, tune_allocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.batch import Batch
    from recsys.models.dlrm import DLRM

__all__ = ["FLOOR", "OPTIMIZERS", "SHARES", "bench_tiers"]

FLOOR = "floor"
SHARES = (FLOOR, "0.02", "0.05", "0.1", "0.2", "0.5")
_STEPS_OF_TURN = 4
_NUM_WARM_UP_ROUNDS = 3
_STATE_SIZES = {"sgd": 0, "rowwise_adagrad": 1}
OPTIMIZERS = tuple(_STATE_SIZES)


def bench_tiers(
    shares: Sequence[str],
    *,
    dim: int,
    batch_size: int,
    optimizer: str,
    num_rounds: int,
    num_fill_steps: int,
    table_sizes: Sequence[int],
) -> list[Row]:
    """Measure a budget after the other beside everything resident.

    Args:
        shares: Of the bytes of rows and state, or "floor".
        dim: D.
        batch_size: B.
        optimizer: Of the rows: "sgd" or "rowwise_adagrad".
        num_rounds: Rounds that count.
        num_fill_steps: Mini-batches that are looked up before, which fills a tier.
        table_sizes: Rows per table.
    """
    config = _config(dim, batch_size, optimizer, table_sizes)
    num_steps = 2 * _STEPS_OF_TURN * (num_rounds + _NUM_WARM_UP_ROUNDS)
    plan = _Run(config, num_fill_steps, num_steps)
    sizes = {"state": _STATE_SIZES[optimizer]}
    num_rows = sum(table_sizes)
    everything = num_rows * row_bytes(dim, torch.float32, sizes)
    of_slot = slot_bytes(dim, torch.float32, sizes)
    floor = floor_bytes(num_rows, [(plan.most_distinct(), of_slot)])
    rows: list[Row] = []
    with ExitStack() as stack:
        resident = stack.enter_context(Worker("resident", "", _Trainer, plan, ""))
        resident.wait()
        for share in shares:
            budget = floor if share == FLOOR else int(float(share) * everything)
            case = f"B={batch_size},D={dim},cold_tier=host,optimizer={optimizer},share={share}"
            if budget < floor:
                print(f"{case}: left out, {budget} bytes are below the floor of {floor}")
                continue
            with Worker("recsys", case, _Trainer, plan, str(budget)) as tiered:
                rows += _rows_of_case(case, budget, everything, resident, tiered, num_rounds)
    return rows


def _rows_of_case(
    case: str,
    budget: int,
    everything: int,
    resident: Worker,
    tiered: Worker,
    num_rounds: int,
) -> list[Row]:
    workers = {"recsys": tiered, "resident": resident}
    for worker in workers.values():
        worker.case = case
        worker.call("begin")
    found: dict[str, list[float]] = take_turns(
        {name: partial(worker.call, "turn") for name, worker in workers.items()},
        num_rounds,
        num_warm_up_rounds=_NUM_WARM_UP_ROUNDS,
    )
    told: dict[str, Any] = tiered.call("tiers")
    peaks = {
        name: float(worker.call("peak_memory_bytes") or "nan") for name, worker in workers.items()
    }
    row_of: Callable[..., Row] = partial(summarize, bench="tiers", case=case, provider="recsys")
    once = {
        ("budget", "bytes"): budget,
        ("budget_share", "ratio"): budget / everything,
        ("hot_memory", "bytes"): told["hot_bytes"],
        ("peak_over_resident", "bytes"): peaks["recsys"] - peaks["resident"],
        ("lookup_hit_rate", "ratio"): told["lookup_hit_rate"],
        ("unique_hit_rate", "ratio"): told["unique_hit_rate"],
    }
    return [
        *rows_by_provider(
            bench="tiers",
            case=case,
            metric="time",
            unit="ms",
            values={name: [1e3 * s for s in spent] for name, spent in found.items()},
        ),
        ratio(
            bench="tiers",
            case=case,
            provider="recsys",
            metric="share_of_resident_speed",
            values=found["recsys"],
            baseline=found["resident"],
        ),
        *(
            row_of(metric=metric, unit=unit, values=[float(value)])
            for (metric, unit), value in once.items()
        ),
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
        num_steps: Mini-batches that are trained on, behind those.
    """

    def __init__(self, config: TrainConfig, num_fill_steps: int, num_steps: int) -> None:
        self.config, self.num_fill_steps, self.num_steps = config, num_fill_steps, num_steps

    def source(self) -> SyntheticCriteo:
        """The stream."""
        num_steps = self.num_fill_steps + self.num_steps
        return SyntheticCriteo(
            seed=self.config.seed,
            num_samples=max(14, 2 * num_steps * self.config.batch_size),
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

    def __init__(self, run: _Run, budget: str) -> None:
        set_num_threads(0)
        tune_allocator()
        self._run = run
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
        settle()

    def turn(self) -> float:
        """Make the next turn's steps; the seconds of a timed one, the mean."""
        batches = []
        for _ in range(2 * _STEPS_OF_TURN):
            batches.append(self._run.batch(self._source, self._next))
            self._next += 1
        self._make_steps(batches[:_STEPS_OF_TURN])
        begin = time.perf_counter()
        self._make_steps(batches[_STEPS_OF_TURN:])
        seconds = (time.perf_counter() - begin) / _STEPS_OF_TURN
        gc.collect()
        settle()
        return seconds

    def _make_steps(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, _ = self._model(batch)
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()

    def tiers(self) -> dict[str, Any] | None:
        """Hit rates and memory."""
        return describe_tiers(self._model)

    def peak_memory_bytes(self) -> int | None:
        """The most memory this process has held."""
        return peak_memory_bytes()
