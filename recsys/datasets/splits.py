"""How the samples of a source are split into train, test and validation.

A source is a fixed sequence of samples, and a split is a range of sample numbers.
"""

from __future__ import annotations

__all__ = ["SPLITS", "classic_splits"]

SPLITS = ("train", "test", "validation")


def classic_splits(num_samples: int, num_held_out: int | None = None) -> dict[str, range]:
    """Split samples as facebookresearch/dlrm does: the first part trains, the last is halved.

    The first half of the last part (rounded up) is the test part, the second half the validation
    part.

    Args:
        num_samples: Samples in all.
        num_held_out: Samples of the last part, such as the last day of several; by default a
            seventh, as of the Kaggle data.
    """
    train_end = num_samples - (num_samples // 7 if num_held_out is None else num_held_out)
    test_end = train_end + (num_samples - train_end + 1) // 2
    return {
        "train": range(train_end),
        "test": range(train_end, test_end),
        "validation": range(test_end, num_samples),
    }
