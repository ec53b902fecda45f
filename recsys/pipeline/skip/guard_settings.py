"""The settings of the guard."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recsys._support.untrusted import is_finite_number, is_int
from recsys.embeddings.staleness.settings import LEAD
from recsys.errors import ConfigError

__all__ = ["Guard"]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """When and how quality is checked while a run skips; see `guard` for the rule.

    Args:
        every: Steps from the start of a window to the start of the next one.
        steps: Steps of a window; nothing is skipped in them.
        logloss: Band of the logloss, relative.
        auc: Band of the AUC.
        calibration: Band of mean prediction / mean label, relative.
        standard_errors: How many standard errors beyond its band a measure leaves it in one window.
        far: How many times that far outside stops skipping at once.
        rate: Weight of the newest window in the running estimate.
        calm: Windows in a row inside the bands after which the factor rises.
        recovery: What is then added to the factor of the share of skipped samples.

    Raises:
        ConfigError: a number is out of range.
    """

    every: int = 1000
    steps: int = 50
    logloss: float = 0.01
    auc: float = 0.005
    calibration: float = 0.02
    standard_errors: float = 4.0
    far: float = 3.0
    rate: float = 0.2
    calm: int = 2
    recovery: float = 0.25

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_whole = getattr(self, field.name), field.type == "int"
            if not (is_int(value, 1) if is_whole else is_finite_number(value) and value > 0):
                raise ConfigError(
                    f"Guard: {field.name} must be a {'whole ' if is_whole else ''}number above 0, "
                    f"got {value!r}"
                )
        if self.steps < 10:
            raise ConfigError(f"Guard: steps must be at least 10, got {self.steps}")
        if self.every < self.steps + LEAD:
            raise ConfigError(
                f"Guard: every must be at least steps + {LEAD}, so that a decision holds before "
                f"the next window, got {self.every} with steps {self.steps}"
            )
        if self.standard_errors < 2 or self.far < 1:
            raise ConfigError(
                "Guard: standard_errors must be at least 2 and far at least 1, got "
                f"{self.standard_errors} and {self.far}"
            )
        if self.rate > 1 or self.recovery > 1:
            raise ConfigError(
                f"Guard: rate and recovery must be in (0, 1], got {self.rate} and {self.recovery}"
            )
