"""Schedules: what runs when. They are values, given to a `TrainPipeline`.

Sequential    fetch, compute, write back; then the next mini-batch
LookAhead     fetch for mini-batches i + 1 to i + depth while i computes
Hotline       fetch for the samples that lack rows while the others of their mini-batch compute
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hotline", "LookAhead", "Schedule", "Sequential"]


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


@dataclass(frozen=True)
class Hotline:
    """A mini-batch is computed on in two parts: popular samples, while rows come for the others.

    Popular are samples all of whose rows are in fast memory when the mini-batch comes. Gradients of
    both parts are added up and every parameter and row is moved once, so a step is that of the
    whole mini-batch but for the order in which floats are summed; where one part is empty, to the
    last bit. It needs no look at mini-batches to come; with a depth, a mini-batch is split only if
    its rows have not come by the time it is computed on.

    The loss must be a mean or a sum over samples, or one loss for each sample. Which of the first
    two it is, is measured on the first mini-batch that is to be split: the model computes its loss
    once more, whole and in parts, in evaluation mode and without gradient. A loss that is neither
    is refused by name. A module with `scale_grad_by_freq=True`, or with `mode="max"` and rows in
    two tiers, needs whole mini-batches: then none is split, and a warning says why.

    Which rows are popular is learned on line: after `learning_steps`, in which nothing is split,
    the rows used most are kept in fast memory, and after as many more they are chosen anew.

    Args:
        depth: Mini-batches ahead whose rows are fetched, as with `LookAhead`.
        learning_steps: Mini-batches; with 0 none are learned from, and rows stay only by being
            used.
        pinned_share: Of the slots, which popular rows keep at most; those of a plan among them.

    Raises:
        ValueError: a number is not in its range.

    References:
        Adnan et al. (2024), Heterogeneous Acceleration Pipeline for Recommendation System Training:
        the split, and learning in 5 % of the mini-batches. There a hash table of its own logs
        accesses; here it is what is counted for every slot.
    """

    depth: int = 0
    learning_steps: int = 1000
    pinned_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("depth", "learning_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(
                    f"Hotline: {name} must be a whole number of at least 0, got {value!r}"
                )
        if not 0 <= self.pinned_share <= 1:
            raise ValueError(f"Hotline: pinned_share must lie in [0, 1], got {self.pinned_share}")


Schedule = Sequential | LookAhead | Hotline
