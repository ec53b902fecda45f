"""Warnings about settings that make a run slower, or that have no effect in it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from recsys._support.machine import num_cores
from recsys.train.parts.skip_policy import warn_of_no_skipping

if TYPE_CHECKING:
    from recsys.config import TrainConfig
    from recsys.train.loop.full_steps import FullSteps

__all__ = ["warn_of_no_effect", "warn_of_threads"]


def warn_of_threads(num_threads: int) -> None:
    """Warn if threads have to share cores, which makes every step slower."""
    if num_threads > num_cores():
        warnings.warn(
            f"num_threads is {num_threads}, and this process may use {num_cores()} cores; threads "
            "that share a core wait for each other; set num_threads to 0 for at most one per core",
            stacklevel=3,
        )


def warn_of_no_effect(config: TrainConfig, full_steps: FullSteps) -> None:
    """Warn about settings that take effect only after the last step."""
    schedule, num_steps = config.lr_schedule, full_steps.num_steps
    if schedule.warmup_steps > num_steps:
        warnings.warn(
            "learning rates never reach their full value: lr_schedule.warmup_steps is "
            f"{schedule.warmup_steps}, and the run has {num_steps} steps; lower it",
            stacklevel=3,
        )
    if config.eval.every_steps > num_steps:
        warnings.warn(
            "the only evaluation is the one after the last step: eval.every_steps is "
            f"{config.eval.every_steps}, and the run has {num_steps} steps; lower it, or "
            "ablate.eval_every_samples in an ablation with a target",
            stacklevel=3,
        )
    if schedule.decay != "none" and schedule.first_decay_step >= num_steps:
        warnings.warn(
            f"learning rates never fall: lr_schedule.decay is {schedule.decay!r} from step "
            f"{schedule.first_decay_step} on, and the run has {num_steps} steps; "
            "lower lr_schedule.decay_start or lr_schedule.warmup_steps",
            stacklevel=3,
        )
    warn_of_no_skipping(config, num_steps)
