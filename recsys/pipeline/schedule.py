"""Schedules: settings for a `TrainPipeline` that say what runs when.

Sequential    each lookup fetches its rows; nothing is fetched ahead
LookAhead     fetch for mini-batches i + 1 to i + depth while mini-batch i computes
Hotline       fetch for the samples with missing rows while the other samples compute
"""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.untrusted import is_number

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
class LookAhead:
    """Fetches the rows of the next mini-batches while the current one computes.

    The order of samples does not change, and losses and rows equal those of `Sequential` to the
    last bit. Rows that get no slot ahead get one in their step, or are used in the cold tier.

    Args:
        depth: Mini-batches ahead.

    Raises:
        ValueError: depth is not a whole number of at least 1.
    """

    depth: int = 2

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(
                f"LookAhead: depth must be a whole number of at least 1, got {self.depth!r}; for "
                "none ahead use Sequential()"
            )


@dataclass(frozen=True)
class Hotline:
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
        ValueError: a number is out of range.

    References:
        Adnan et al. (2024), Heterogeneous Acceleration Pipeline for Recommendation System Training:
        the split, and learning in 5 % of the mini-batches. The paper logs accesses in a separate
        hash table; this implementation uses the counts that every slot has.
    """

    learning_steps: int = 1000
    pinned_share: float = 0.5

    def __post_init__(self) -> None:
        steps, share = self.learning_steps, self.pinned_share
        if type(steps) is not int or steps < 0:
            raise ValueError(
                f"Hotline: learning_steps must be a whole number of at least 0, got {steps!r}"
            )
        if not (is_number(share) and 0 <= share <= 1):
            raise ValueError(f"Hotline: pinned_share must lie in [0, 1], got {share!r}")


Schedule = Sequential | LookAhead | Hotline
