"""The settings of a `StalenessTracker`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recsys._support.untrusted import is_finite_number
from recsys.errors import ConfigError

__all__ = ["LEAD", "Staleness"]

# A window that ends after s steps decides which rows are stale for the mini-batches numbered s + 32
# and later. So mini-batches that a schedule has taken ahead keep the rows that they were taken by.
LEAD = 32


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """When a row counts as stale.

    The tracker measures how far rows move in windows of steps: a row's drift is the mean change of
    its numbers. A row is stale if it has moved no
    farther than a threshold in each of its last `patience` windows. A row with fewer than
    `min_updates` updates in a window is unknown, never stale. Updates are counted in every
    `count_every`-th step only, and the count is multiplied by `count_every`. So the number is an
    estimate: a row with fewer updates may be judged, and a row with more may be unknown. With
    `count_every=1` the number is exact.

    A stale row that is not updated goes on trial from time to time: for one window it counts as not
    stale, so it is trained as before. A trial of rows that freeze takes two windows, because flags
    change 32 steps late: the row is judged by the second, in which it is trained throughout. If it
    stays under the threshold, it is stale again, and for `period_step` windows longer than before
    the trial; else its periods are cut. A stale row that other samples update is judged in every
    window, and needs no trial.

    Args:
        window: Steps per window; more than `LEAD`.
        threshold: The highest drift of a stale row; None to find it from the target share of stale
            inputs.
        min_updates: Updates in a window below which a row is unknown; counted as above.
        patience: Windows in a row whose drifts must be under the threshold.
        max_rows: Rows per table group that are followed at once, the most updated first.
        count_every: Updates are counted in every n-th step, and multiplied by n.
        first_period: Windows without enough updates that a stale row waits for its first trial.
        period_step: Windows that are added to the period after a trial that it passes. The period
            is then at least 1: with a period of 0, a stale row is on trial all the time.
        period_cut: Factor of the period when the row moves again; the result is rounded down.

    Raises:
        ConfigError: a value is out of range.

    References:
        Chen et al. (2021), Communication-Efficient Federated Learning with Adaptive Parameter
        Freezing: periods that lengthen additively and are cut multiplicatively.
    """

    window: int = 1000
    threshold: float | None = None
    min_updates: int = 16
    patience: int = 2
    max_rows: int = 2**17
    count_every: int = 4
    first_period: int = 1
    period_step: int = 1
    period_cut: float = 0.5

    def __post_init__(self) -> None:
        least = {"window": LEAD + 1, "first_period": 0, "period_step": 0}
        for name in (field.name for field in fields(self) if field.type == "int"):
            value = getattr(self, name)
            if type(value) is not int or not least.get(name, 1) <= value < 2**31:
                raise ConfigError(
                    f"staleness: {name} must be a whole number in [{least.get(name, 1)}, 2**31), "
                    f"got {value!r}"
                )
        if self.patience >= 2**15:
            raise ConfigError(f"staleness: patience must be less than 2**15, got {self.patience}")
        if self.count_every > self.window:
            raise ConfigError(
                f"staleness: count_every must be at most window ({self.window}), because windows "
                f"without a counted step judge no row, got {self.count_every}"
            )
        if self.window // self.count_every >= 2**15:
            raise ConfigError(
                f"staleness: window / count_every must be less than 2**15, because counts have 15 "
                f"bits, got {self.window} and {self.count_every}; raise count_every"
            )
        most_updates = self.window // self.count_every * self.count_every
        if self.min_updates > most_updates:
            raise ConfigError(
                f"staleness: min_updates must be at most window // count_every * count_every "
                f"({most_updates}), the updates counted for a row that every step updates, got "
                f"{self.min_updates}; lower it, or raise window"
            )
        threshold, cut = self.threshold, self.period_cut
        if threshold is not None and not (is_finite_number(threshold) and threshold >= 0):
            raise ConfigError(
                f"staleness: threshold must be a finite number of at least 0, or None, got "
                f"{threshold!r}"
            )
        if not (is_finite_number(cut) and 0 <= cut <= 1):
            raise ConfigError(f"staleness: period_cut must be a number in [0, 1], got {cut!r}")
