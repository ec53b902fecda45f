"""The settings of a `StalenessTracker`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recsys._support.untrusted import is_int
from recsys.errors import ConfigError

__all__ = ["LEAD", "Staleness"]

# A window that ends after s steps decides which rows are stale for the mini-batches numbered s + 32
# and later. So mini-batches that a schedule has taken ahead keep the rows that they were taken by.
LEAD = 32


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """When a row counts as stale.

    The tracker measures how far rows move in windows of steps: a row's drift is the mean change of
    its numbers. A row is stale if it has moved no farther than a threshold in each of its last
    `patience` windows. The tracker finds the threshold from the share of inputs that are to be
    stale. A row with fewer than `min_updates` updates in a window is unknown, never stale. Updates
    are counted in every `count_every`-th step only, and the count is multiplied by `count_every`.
    So the number is an estimate: a row with fewer updates may be judged, and a row with more may be
    unknown. With `count_every=1` the number is exact.

    A stale row that is not updated goes on trial after four windows: it counts as not stale until a
    window has judged it again. A stale row that other samples update is judged in every window, and
    needs no trial.

    Args:
        window: Steps per window; more than `LEAD`.
        min_updates: Updates in a window below which a row is unknown; counted as above.
        patience: Windows in a row whose drifts must be under the threshold.
        max_rows: Rows that are followed at once, the most updated first.
        count_every: Updates are counted in every n-th step, and multiplied by n.

    Raises:
        ConfigError: a value is out of range.
    """

    window: int = 1000
    min_updates: int = 16
    patience: int = 2
    max_rows: int = 2**17
    count_every: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), LEAD + 1 if field.name == "window" else 1
            if not is_int(value, least, 2**31 - 1):
                raise ConfigError(
                    f"staleness: {field.name} must be a whole number in [{least}, 2**31), got "
                    f"{value!r}"
                )
        num_counted = self.window // self.count_every
        if num_counted >= 2**15:
            raise ConfigError(
                f"staleness: window / count_every must be less than 2**15, because counts have 15 "
                f"bits, got {self.window} and {self.count_every}; raise count_every"
            )
        if self.min_updates > num_counted * self.count_every:
            raise ConfigError(
                f"staleness: min_updates must be at most window // count_every * count_every "
                f"({num_counted * self.count_every}), the updates counted for a row that every "
                f"step updates, got {self.min_updates}; lower it, or raise window"
            )
