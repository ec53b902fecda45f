"""What the loader reads from: samples by number, from a store or made up on the spot.

A source is a fixed sequence of samples. `read` returns any of them in any order, so shuffling,
resuming and splitting are the loader's business alone and work alike for a store on disk and for
synthetic data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recsys.batch import Batch

__all__ = ["SPLITS", "SampleSource", "classic_splits", "day_splits"]

SPLITS = ("train", "test", "validation")


class SampleSource(Protocol):
    """A sequence of labelled samples with dense and categorical features."""

    @property
    def num_samples(self) -> int:
        """Samples in all splits together."""

    @property
    def num_dense(self) -> int:
        """I, the number of dense features."""

    @property
    def table_sizes(self) -> dict[str, int]:
        """`num_embeddings` by categorical feature, in column order."""

    @property
    def splits(self) -> dict[str, range]:
        """The sample numbers of "train", "test" and "validation"."""

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Safe to call from several threads at once.

        Shape:
            samples (B,) numbers in [0, num_samples); result: dense_features (B, I) float32,
            sparse_features with one int64 lookup per feature and sample, labels (B,) float32.
        """

    @property
    def fingerprint(self) -> str:
        """Equal for sources with equal samples under equal numbers, different for others."""

    def describe(self) -> dict[str, Any]:
        """What a run record should say of this data; JSON types only."""


def classic_splits(num_samples: int) -> dict[str, range]:
    """The Kaggle split of facebookresearch/dlrm: seven parts in file order, the last one halved.

    The first `num_samples % 7` parts have one sample more. Six parts train; of the seventh, the
    first half (the larger one where it is odd) is the test part and the second half the validation
    part.
    """
    last_part = num_samples // 7
    train_end = num_samples - last_part
    test_end = train_end + (last_part + 1) // 2
    return {
        "train": range(train_end),
        "test": range(train_end, test_end),
        "validation": range(test_end, num_samples),
    }


def day_splits(day_sizes: Sequence[int], *, first_half: str = "validation") -> dict[str, range]:
    """Days split: all but the last train, the last one is halved.

    The first half is the larger one where the day is odd. TorchRec validates on it and tests on the
    second, facebookresearch/dlrm has it the other way round. A single day is split as
    `classic_splits` does; TorchRec would validate and test on samples that it trains on.

    Args:
        day_sizes: Samples of each day.
        first_half: What the last day's first half is: "validation" or "test".
    """
    num_samples = sum(day_sizes)
    if len(day_sizes) == 1:
        return classic_splits(num_samples)
    train_end = num_samples - day_sizes[-1]
    half_end = train_end + (day_sizes[-1] + 1) // 2
    halves = range(train_end, half_end), range(half_end, num_samples)
    validation, test = halves if first_half == "validation" else halves[::-1]
    return {"train": range(train_end), "test": test, "validation": validation}
