"""How much longer a step of another batch size computes: a probe of the run's own model.

One run cannot tell the fixed cost of a step from the cost of a sample. So the model is built with
every row resident, and makes a few steps of both sizes in turns. Tables too large for that are not
built.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from recsys._support.machine import memory_bytes
from recsys.config import ScheduleConfig
from recsys.pipeline.stalls import StageClock
from recsys.train.parts.build import (
    build_loader,
    build_model,
    build_pipeline,
    compile_kernels,
)

if TYPE_CHECKING:
    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["may_build", "step_ratio"]

_MOST_BYTES = 4 * 2**30
_SHARE_OF_MEMORY = 4
_NUM_BATCHES = 4
_NUM_WARM, _NUM_ROUNDS = 3, 25


def may_build(everything_bytes: int) -> bool:
    """Whether tables are small enough to be built for the probe.

    Args:
        everything_bytes: Bytes of all rows and their state.
    """
    memory = memory_bytes() or 0  # 0: not known
    return everything_bytes <= min(_MOST_BYTES, memory // _SHARE_OF_MEMORY)


def step_ratio(config: TrainConfig, source: SampleSource, batch_size: int) -> float:
    """Seconds of a resident step of another batch size, over those of the run's size.

    Args:
        config: The configuration of the run.
        source: Its data.
        batch_size: The other size.
    """
    config = replace(config, budget="", cold_tier="host", cold_path="", schedule=ScheduleConfig())
    compile_kernels(config, source)
    model, optimizers = build_model(config, source)
    model.train()
    pipeline = build_pipeline(model, optimizers, config, StageClock(), 1)
    batches = []
    for size in (config.batch_size, batch_size):
        loader: Any = build_loader(replace(config, batch_size=size), source, None)
        batches.append(cycle(list(islice(loader, _NUM_BATCHES))))
    seconds: list[list[float]] = [[], []]
    for _ in range(_NUM_WARM + _NUM_ROUNDS):
        for found, of_size in zip(seconds, batches, strict=True):
            begin = perf_counter()
            pipeline.progress(of_size)
            found.append(perf_counter() - begin)
    now, other = (median(each[_NUM_WARM:]) for each in seconds)
    return other / now
