"""The policy of a configuration: what a run leaves out."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

from recsys._support.sizes import counted
from recsys.embeddings.staleness.settings import LEAD
from recsys.pipeline import DropInput, FreezeRows, Importance, Observe, RandomDrop, Subsample

if TYPE_CHECKING:
    from recsys.config import TrainConfig
    from recsys.pipeline.skip.paper import Paper
    from recsys.pipeline.skip.policies import Policy

__all__ = ["skip_policy", "warn_of_no_skipping"]


def skip_policy(config: TrainConfig) -> Policy | Paper | None:
    """The policy of `config.skip`; None to train on everything."""
    keys = config.skip
    if not keys.is_on:
        return None
    seed = keys.seed or config.seed
    if keys.policy == "random_drop":
        return RandomDrop(keys.share, seed, weighted=keys.weighted, refill=keys.refill)
    if keys.policy == "paper":
        return keys.paper.settings(seed)
    if keys.policy == "importance":
        return Importance(
            share=keys.share, seed=seed, guard=keys.guard.settings(), **asdict(keys.importance)
        )
    staleness, guard = keys.staleness.settings(), keys.guard.settings()
    if keys.policy == "observe":
        return Observe(share=keys.share, staleness=staleness)
    if keys.policy == "drop_input":
        return DropInput(share=keys.share, staleness=staleness, guard=guard)
    if keys.policy == "freeze_rows":
        return FreezeRows(share=keys.share, staleness=staleness, guard=guard)
    return Subsample(share=keys.share, keep=keys.keep, staleness=staleness, guard=guard, seed=seed)


def warn_of_no_skipping(config: TrainConfig, num_steps: int) -> None:
    """Warn about a run that is too short for its policy, or for the guard of it.

    Args:
        config: The configuration.
        num_steps: Steps of the run if it skips nothing.
    """
    keys = config.skip
    staleness, guard = keys.staleness, keys.guard
    num_windows = staleness.patience + 1
    if keys.needs_stale_rows and staleness.window * num_windows + LEAD >= num_steps:
        warnings.warn(
            f"nothing is skipped: rows become stale after {num_windows} windows of "
            f"skip.staleness.window {staleness.window} steps and {LEAD} steps more, with "
            f"skip.staleness.patience {staleness.patience}, and the run has "
            f"{counted(num_steps, 'step')}; lower skip.staleness.window",
            stacklevel=4,
        )
    elif keys.policy == "importance" and keys.importance.warm_up >= num_steps:
        warnings.warn(
            f"no sample is left out: skip.importance.warm_up is {keys.importance.warm_up}, and the "
            f"run has {counted(num_steps, 'step')}; lower it",
            stacklevel=4,
        )
    elif keys.has_guard and guard.every + guard.steps > num_steps:
        warnings.warn(
            f"the guard never compares: skip.guard.every is {guard.every} and skip.guard.steps is "
            f"{guard.steps}, and the run has {counted(num_steps, 'step')}; lower skip.guard.every",
            stacklevel=4,
        )
