"""The steps of a run, with errors in the words of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.sizes import round_up_bytes
from recsys.errors import BudgetTooSmall, TrainingDiverged
from recsys.train.loop.progress import LOWER_LR
from recsys.train.parts.budget import enough_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from recsys.config import TrainConfig
    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline import TrainPipeline
    from recsys.pipeline.fae.hot_cold_loader import HotColdLoader
    from recsys.train.loop.progress import Progress

__all__ = ["steps_of"]


def steps_of(
    pipeline: TrainPipeline,
    loader: BatchLoader | HotColdLoader,
    progress: Progress,
    config: TrainConfig,
) -> Iterator[tuple[Tensor, Any]]:
    """Steps over the rest of an epoch; their errors name the step, or a budget that suffices."""
    try:
        yield from pipeline.steps(loader)
    except BudgetTooSmall as error:
        if config.plan or config.schedule.name == "fae":
            raise
        enough = round_up_bytes(enough_bytes(config, loader.source))
        raise BudgetTooSmall(f"{error}; budget={enough} holds every mini-batch") from None
    except TrainingDiverged as error:
        advice = str(error).replace("lower the learning rate", LOWER_LR)  # by the keys
        raise TrainingDiverged(f"step {progress.num_steps + 1}: {advice}") from error
