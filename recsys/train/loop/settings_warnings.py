"""Warnings about settings that make a run slower, or that change what it becomes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from recsys._support.machine import num_cores

if TYPE_CHECKING:
    from recsys.config import TrainConfig
    from recsys.train.loop.full_steps import FullSteps

__all__ = [
    "warn_of_other_rates",
    "warn_of_threads",
]


def warn_of_threads(num_threads: int) -> None:
    """Warn if threads have to share cores, which makes every step slower."""
    if num_threads > num_cores():
        warnings.warn(
            f"num_threads is {num_threads}, and this process may use {num_cores()} cores; threads "
            "that share a core wait for each other; set num_threads to 0 for at most one per core",
            stacklevel=3,
        )


def warn_of_other_rates(before: TrainConfig, config: TrainConfig, full_steps: FullSteps) -> None:
    """Warn if a run that continues with more epochs has other learning rates from now on.

    Args:
        before: The configuration that the run had.
        config: The configuration with which it continues.
        full_steps: Those so far.
    """
    steps = full_steps.num_steps // config.epochs * before.epochs, full_steps.num_steps
    old, new = (config.lr_schedule.factor(full_steps.step, each) for each in steps)
    if old != new:
        warnings.warn(
            f"learning rates rise again: lr_schedule.decay falls to the end of the run, and epochs "
            f"is {config.epochs} now, not {before.epochs}; from step {full_steps.step} on they are "
            f"{new:.3g} of the full rates, not {old:.3g}. The result is not that of "
            f"{config.epochs} epochs in one go; for that, train in a new folder",
            stacklevel=3,
        )
