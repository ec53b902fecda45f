"""Schedules: what runs when. They are values, given to a `TrainPipeline`; none changes a number.

Sequential    fetch, compute, write back; then the next mini-batch
LookAhead     fetch for mini-batches i + 1 to i + depth while i computes
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LookAhead", "Schedule", "Sequential"]


@dataclass(frozen=True)
class Sequential:
    """Every mini-batch's rows are fetched when it comes: the baseline."""


@dataclass(frozen=True)
class LookAhead:
    """Rows of the mini-batches behind the current one are fetched while it computes.

    The order of samples stays, and losses and rows are those of `Sequential`, to the last bit.
    Where slots are few, fewer mini-batches are fetched for; a warning says so once.

    Args:
        depth: Mini-batches ahead.

    Raises:
        ValueError: there are none.
    """

    depth: int = 2

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(
                f"LookAhead: depth must be a whole number of at least 1, got {self.depth!r}; for "
                "none ahead use Sequential()"
            )


Schedule = Sequential | LookAhead
