"""Which synthetic samples are held out, and how samples are numbered.

`classic_splits` divides sample numbers into train, test and validation. The `split` setting maps
each number to a time, the sample's place in the sequence.

- "chronological": number and time are equal, so the held-out samples come last.
- "random": in every group of 14 consecutive times, a hash chooses one for the test part and one for
  the validation part. Within each part, numbers ascend with time. If the last group is short, it
  gives one test sample or none, so that the parts have the classic sizes.

Shape letters: B samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.splits import classic_splits

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["times_of_random_split"]

_GROUP = 14
_GROUP_TRAIN = _GROUP - 2


def times_of_random_split(
    numbers_B: NDArray[np.int64], num_samples: int, key: np.uint64
) -> NDArray[np.int64]:
    """The times of the given sample numbers, by a bijection of [0, num_samples).

    Shape:
        numbers_B (B,) in [0, num_samples); result (B,).
    """
    splits = classic_splits(num_samples)
    test, validation = splits["test"], splits["validation"]
    in_test = (numbers_B >= test.start) & (numbers_B < test.stop)
    in_validation = numbers_B >= validation.start
    # A last group of under 14 samples is for training, except one test sample if it has seven.
    group_B = np.where(
        in_test,
        numbers_B - test.start,
        np.where(
            in_validation,
            numbers_B - validation.start,
            np.minimum(numbers_B // _GROUP_TRAIN, num_samples // _GROUP),
        ),
    )
    size_B = np.minimum(num_samples - group_B * _GROUP, _GROUP)
    hash_B = mix64(key + group_B.astype(np.uint64) * GOLDEN)
    test_at_B = (hash_B % size_B.astype(np.uint64)).astype(np.int64)
    step_B = 1 + ((hash_B >> np.uint64(32)) % np.uint64(_GROUP - 1)).astype(np.int64)
    validation_at_B = (test_at_B + step_B) % _GROUP
    # A place after the group's end stands for "none" and does not shift the numbers below.
    test_at_B = np.where(size_B >= _GROUP // 2, test_at_B, _GROUP)
    validation_at_B = np.where(size_B == _GROUP, validation_at_B, _GROUP)

    at_B = numbers_B - group_B * _GROUP_TRAIN
    first_B = np.minimum(test_at_B, validation_at_B)
    at_B += at_B >= first_B
    at_B += at_B >= np.maximum(test_at_B, validation_at_B)
    at_B = np.where(in_test, test_at_B, np.where(in_validation, validation_at_B, at_B))
    return group_B * _GROUP + at_B
