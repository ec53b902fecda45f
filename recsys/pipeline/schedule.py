"""Schedules: settings for a `TrainPipeline` that say what runs when.

Sequential    fetch, compute, write back; then the next mini-batch
LookAhead     fetch for mini-batches i + 1 to i + depth while mini-batch i computes
Hotline       fetch for the samples with missing rows while the other samples compute
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys._support.sizes import format_bytes
from recsys._support.untrusted import is_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = [
    "Hotline",
    "LookAhead",
    "Schedule",
    "Sequential",
    "no_effect",
    "other_ids",
    "too_deep",
]


@dataclass(frozen=True)
class Sequential:
    """The baseline: fetches the rows of a mini-batch when its step begins."""


@dataclass(frozen=True)
class LookAhead:
    """Fetches the rows of the next mini-batches while the current one computes.

    The order of samples does not change, and losses and rows equal those of `Sequential` to the
    last bit. With too few slots it looks fewer mini-batches ahead, and warns once.

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

    A sample is popular if all its rows are in fast memory when its step begins. The gradients of
    both parts are added, and every parameter and row is updated once. So a step equals that of the
    whole mini-batch up to the order in which floats are summed, and to the last bit if one part is
    empty. Nothing is fetched ahead.

    The loss must be a mean or a sum over samples. The pipeline measures which of them it is on the
    first mini-batch that it splits: the model computes the loss of the mini-batch and of its parts
    in evaluation mode without gradient. A loss that is neither raises an error. A module with
    `scale_grad_by_freq=True` needs whole mini-batches: then none is split, and a warning says why.

    Popular rows are found during training: nothing is split in the first `learning_steps`, after
    which the most used rows are pinned in fast memory. After every further `learning_steps` they
    are chosen again.

    Args:
        learning_steps: Mini-batches between two choices; with 0 no rows are pinned.
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


def no_effect(schedule: object) -> str:
    """What to say if there are no rows to fetch."""
    return (
        f"schedule={schedule} has no effect: every row is in fast memory, so none is fetched; "
        "leave it out, or give the tables a budget"
    )


def too_deep(schedule: object, tiers: Sequence[Tiers], wanted: int, depth: int) -> str:
    """What to say if there is no room for as many mini-batches ahead as wanted.

    Args:
        schedule: As the user gave it.
        tiers: Of the model.
        wanted: Mini-batches ahead that the schedule wants.
        depth: Those that there is room for.
    """
    slots = ", ".join(
        f"{each.hot.num_slots} rows of embedding_dim {each.hot.rows.shape[1]}" for each in tiers
    )
    remedy = f"or LookAhead(depth={depth})" if depth else "or Sequential()"
    # The host does not wait to learn how many rows the last one has, so it counts the most.
    may = "may have" if any(each.are_reached for each in tiers) else "has"
    return (
        f"schedule={schedule}: a budget with slots for {slots} "
        f"({format_bytes(sum(each.hot.num_bytes for each in tiers))}) {may} room for {depth} of "
        f"{wanted} mini-batches ahead; rows of the others are fetched when there is room. Give a "
        f"larger budget, {remedy}"
    )


def other_ids(schedule: object) -> str:
    """What to say if the model looks up other ids than were fetched ahead."""
    return (
        f"schedule={schedule}: the model has looked up other ids than were fetched ahead for its "
        "mini-batch, or a part or another order of its KeyedJaggedTensor (split, permute), so rows "
        "were fetched only when they were needed; give TrainPipeline(..., ids=fn) a function that "
        "returns the input of each module, and an iterator that does not change a mini-batch "
        "before its step"
    )
