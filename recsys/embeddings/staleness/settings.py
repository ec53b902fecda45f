"""The settings of a `StalenessTracker`."""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.untrusted import AbstractSettings, setting
from recsys.errors import ConfigError

__all__ = ["LEAD", "Staleness"]

# A window that ends after s steps decides which rows are stale for the mini-batches numbered s + 32
# and later. So mini-batches that a schedule has taken ahead keep the rows that they were taken by.
LEAD = 32


@dataclass(frozen=True, kw_only=True)
class Staleness(AbstractSettings):
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

    window: int = setting(1000, "steps over which rows' drift is measured", gt=LEAD, lt=2**31)
    min_updates: int = setting(
        16, "updates in a window; a row with fewer is unknown", ge=1, lt=2**31
    )
    patience: int = setting(2, "windows in a row that a row's drift must be small", ge=1, lt=2**31)
    max_rows: int = setting(2**17, "rows that are followed at once", ge=1, lt=2**31)
    count_every: int = setting(4, "updates are counted in every n-th step", ge=1, lt=2**31)

    def __post_init__(self) -> None:
        super().__post_init__()
        num_counted = self.window // self.count_every
        if num_counted >= 2**15:
            raise ConfigError(
                f"Staleness: window / count_every must be less than 2**15, because counts have 15 "
                f"bits, got {self.window} and {self.count_every}; raise count_every"
            )
        if self.min_updates > num_counted * self.count_every:
            raise ConfigError(
                f"Staleness: min_updates must be at most window // count_every * count_every "
                f"({num_counted * self.count_every}), the updates counted for a row that every "
                f"step updates, got {self.min_updates}; lower it, or raise window"
            )
