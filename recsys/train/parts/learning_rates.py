"""The learning rates of a run: one schedule for the dense part and the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from recsys.config import LearningRateConfig

__all__ = ["build_schedulers", "continue_at"]


def build_schedulers(
    config: LearningRateConfig, optimizers: Sequence[Optimizer], num_steps: int
) -> list[LambdaLR]:
    """Schedulers that are stepped after every training step; none if rates are constant.

    Args:
        config: The schedule.
        optimizers: New optimizers, whose rates are the full ones.
        num_steps: Steps of the run.
    """
    if config.is_constant:
        return []
    return [
        LambdaLR(optimizer, lambda step: config.factor(step, num_steps)) for optimizer in optimizers
    ]


def continue_at(schedulers: Sequence[LambdaLR], step: int) -> None:
    """Set schedulers, and the rates of their optimizers, to the state after `step` steps.

    Rates are a function of the step, so nothing of them needs to be saved.
    """
    for scheduler in schedulers:
        scheduler.last_epoch = step
        groups = scheduler.optimizer.param_groups
        for group, rate, factor in zip(
            groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(step)
