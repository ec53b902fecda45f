"""Slipstream's published code as a policy: its constants, and its search for a threshold.

    change of a row      largest absolute change of a number of the row between two snapshots
    stale row            a hot row with a change under the threshold
    level of a sample    largest change of the rows that it looks up
    stale sample         a sample with a level under the threshold: each of its rows is stale

The source is the authors' review artefact, anonymous6116/Slipstream of March 2023, in particular
`Slipstream/slipstream.py`. The paper itself (arXiv 2404.04270) gives no constants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Paper", "Search", "draw_places", "search_threshold"]

_TYPES: Final = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("True or False", (bool,)),
}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Drops hot samples whose rows have stopped changing, as Slipstream's published code does.

    Each epoch begins with its cold mini-batches; the hot ones follow. Two snapshots of the hot rows
    are taken in the hot part. A bisection then looks for a threshold under which the target share
    of a sample of the later hot samples is stale. Stale samples are dropped for the rest of the
    epoch. If the bisection does not converge, the threshold is 0 and no sample is dropped. The next
    epoch decides anew; no row is checked again before.

    This needs the mini-batches of a `HotColdLoader` with `FAE(rate=100, is_adaptive=False)`, and a
    schedule that takes no mini-batch ahead. The hot rows are those that a plan pins, or all if all
    are resident. The snapshot takes as much memory as the hot rows without their optimizer state,
    and is not part of the tables' budget.

    Two things differ from the published code. There the window ends before the last mini-batch that
    is trained on in it, so some samples are trained on twice. And it cannot train for a second
    epoch, because the first one releases memory that both need.

    Args:
        first_snapshot: The first snapshot is taken before the update of the hot mini-batch with
            this number, counted from 0 in each epoch.
        window_share: Hot mini-batches between the snapshots, as a share of those of an epoch.
        target: Share of hot samples to drop.
        tolerance: How far the sample's stale share may be from `target`.
        highest_threshold: The highest threshold that the bisection considers; the lowest is 0.
        first_threshold: The first threshold that it tries.
        max_tries: The largest number of thresholds that it tries.
        sample_share: Size of the sample, as a share of the hot samples of an epoch. It is drawn
            with replacement from the hot samples after the window.
        seed: Seed of the sample.
        counts_unseen_rows_as_stale: Whether a hot row that was not looked up between the snapshots
            counts as stale. It has not changed because it was not trained. The published code
            counts it.

    Raises:
        ConfigError: a constant is out of range.
    """

    first_snapshot: int = 1000
    window_share: float = 0.03
    target: float = 0.3
    tolerance: float = 0.08
    highest_threshold: float = 0.1
    first_threshold: float = 0.05
    max_tries: int = 25
    sample_share: float = 0.001
    seed: int = 0
    counts_unseen_rows_as_stale: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (what, types) = getattr(self, field.name), _TYPES[str(field.type)]
            if type(value) not in types:
                raise ConfigError(f"Paper: {field.name} must be {what}, got {value!r}")
        names = ("window_share", "target", "tolerance", "sample_share")
        shares = [getattr(self, name) for name in names]
        if not all(0 <= share <= 1 for share in shares):
            raise ConfigError(f"Paper: {', '.join(names)} must lie in [0, 1], got {shares}")
        if not 0 < self.first_threshold < self.highest_threshold < inf:
            raise ConfigError(
                "Paper: thresholds must be 0 < first_threshold < highest_threshold, got "
                f"{self.first_threshold} and {self.highest_threshold}"
            )
        if self.first_snapshot < 0 or self.max_tries < 1 or self.seed < 0:
            raise ConfigError(
                "Paper: first_snapshot and seed must be at least 0 and max_tries at least 1, got "
                f"{self.first_snapshot}, {self.seed} and {self.max_tries}"
            )

    def last_of_window(self, num_hot_batches: int) -> int:
        """The hot mini-batch after whose update the second snapshot is taken.

        Args:
            num_hot_batches: Hot mini-batches of an epoch.
        """
        return self.first_snapshot + round(self.window_share * num_hot_batches)

    def num_sampled(self, num_hot_samples: int) -> int:
        """The size of the sample.

        Args:
            num_hot_samples: Hot samples of an epoch.
        """
        return int(self.sample_share * num_hot_samples)


class Search(NamedTuple):
    """The result of a search for a threshold.

    Attributes:
        threshold: The threshold; 0 if the search has not converged.
        tries: How many thresholds were tried.
        share: Share of the sample that is stale under the threshold tried last.
        has_converged: Whether that share is within the tolerance.
    """

    threshold: float
    tries: int
    share: float
    has_converged: bool


def search_threshold(levels: NDArray[np.float64], paper: Paper) -> Search:
    """Look for a threshold under which the target share of the sample is stale, by bisection.

    Args:
        levels: The level of each sample.
        paper: The constants.

    Shape:
        levels (n,), n at least 1.
    """
    least, most = paper.target - paper.tolerance, paper.target + paper.tolerance
    # The published code compares float32 numbers.
    low, high, threshold, share = 0.0, paper.highest_threshold, paper.first_threshold, 0.0
    for tries in range(1, paper.max_tries + 1):
        share = int((levels < np.float32(threshold)).sum()) / len(levels)
        if least <= share <= most:
            return Search(threshold, tries, share, has_converged=True)
        if share < least:
            low = threshold
        else:
            high = threshold
        threshold = (low + high) / 2
    return Search(0.0, paper.max_tries, share, has_converged=False)


def draw_places(seed: int, epoch: int, num_left: int, num_sampled: int) -> NDArray[np.int64]:
    """Draw a sample with replacement: a function of seed and epoch.

    Args:
        seed: The seed.
        epoch: The epoch.
        num_left: Number of samples to draw from.
        num_sampled: Number of samples to draw.

    Shape:
        result (num_sampled,), in [0, num_left).
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.integers(num_left, size=num_sampled)
