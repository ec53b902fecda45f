"""How the samples of a source are split into train, test and validation.

A source is a fixed sequence of samples, and a split is a range of sample numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SPLITS", "classic_splits", "day_splits"]

SPLITS = ("train", "test", "validation")


def classic_splits(num_samples: int) -> dict[str, range]:
    """Split samples as facebookresearch/dlrm splits the Kaggle data: 6/7, 1/14 and 1/14.

    The samples are cut into seven parts in file order; the first `num_samples % 7` parts have one
    sample more. The first six parts are for training. The first half of the seventh (rounded up)
    is the test part, the second half the validation part.
    """
    last_part = num_samples // 7
    train_end = num_samples - last_part
    test_end = train_end + (last_part + 1) // 2
    return {
        "train": range(train_end),
        "test": range(train_end, test_end),
        "validation": range(test_end, num_samples),
    }


def day_splits(day_sizes: Sequence[int]) -> dict[str, range]:
    """Train on all days but the last; test on its first half, and validate on the second.

    The first half of an odd number of samples is the larger one. A single day is split by
    `classic_splits`.

    Args:
        day_sizes: Samples of each day.
    """
    num_samples = sum(day_sizes)
    if len(day_sizes) == 1:
        return classic_splits(num_samples)
    train_end = num_samples - day_sizes[-1]
    half_end = train_end + (day_sizes[-1] + 1) // 2
    return {
        "train": range(train_end),
        "test": range(train_end, half_end),
        "validation": range(half_end, num_samples),
    }
