"""Schedules: settings for a `TrainPipeline` that say what runs when.

Sequential    each lookup fetches its rows; nothing is fetched ahead
LookAhead     fetch for mini-batches i + 1 to i + depth while mini-batch i computes
Hotline       fetch for the samples with missing rows while the other samples compute
"""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.untrusted import AbstractSettings, setting

__all__ = [
    "Hotline",
    "LookAhead",
    "Schedule",
    "Sequential",
]


@dataclass(frozen=True)
class Sequential:
    """The baseline: each lookup fetches its own rows, and nothing is fetched ahead."""


@dataclass(frozen=True)
class LookAhead(AbstractSettings):
    """Fetches the rows of the next mini-batches while the current one computes.

    The order of samples does not change, and losses and rows equal those of `Sequential` to the
    last bit. Rows that get no slot ahead get one in their step, or are used in the cold tier.

    Args:
        depth: Mini-batches ahead.

    Raises:
        ConfigError: depth is not a whole number of at least 1.
    """

    depth: int = setting(2, "mini-batches whose rows are fetched ahead", ge=1)


@dataclass(frozen=True)
class Hotline(AbstractSettings):
    """Splits a mini-batch: computes on popular samples while rows are fetched for the others.

    A sample is popular if all its rows are pinned in fast memory. The gradients of both parts are
    added, and every parameter and row is updated once. So a step equals that of the whole
    mini-batch up to the order in which floats are summed, and to the last bit if one part is empty.
    Nothing is fetched ahead.

    The loss must be a mean or a sum over samples. The pipeline measures which of them it is on the
    first mini-batch that it splits: the model computes the loss of the mini-batch and of its parts
    in evaluation mode without gradient. A loss that is neither raises an error.

    Popular rows are found during training: nothing is split in the first `learning_steps`, after
    which the most used rows are pinned in fast memory. After every further `learning_steps` they
    are chosen again. A plan's rows are pinned from the start.

    Args:
        learning_steps: Mini-batches between two choices; with 0 only a plan's rows are pinned.
        pinned_share: The largest share of the slots that pinned rows take, including a plan's.

    Raises:
        ConfigError: a number is out of range.

    References:
        Adnan et al. (2024), Heterogeneous Acceleration Pipeline for Recommendation System Training:
        the split, and learning in 5 % of the mini-batches. The paper logs accesses in a separate
        hash table; this implementation uses the counts that every slot has.
    """

    learning_steps: int = setting(1000, "mini-batches between two choices", ge=0)
    pinned_share: float = setting(
        0.5, "share of the fast memory that popular rows may keep", ge=0, le=1
    )


Schedule = Sequential | LookAhead | Hotline
