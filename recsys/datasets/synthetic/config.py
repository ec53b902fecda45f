"""The keys of `synthetic`: the shape of synthetic data."""

from __future__ import annotations

from dataclasses import dataclass

from recsys._support.config_fields import check_fields
from recsys._support.config_fields import key as _key
from recsys.errors import ConfigError

__all__ = ["SyntheticConfig"]

_MAX_DRIFT = 1e6
_MOST_ROWS = 1 << 31  # a rank times a multiplier below the table's size must fit in 63 bits


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What synthetic data looks like."""

    num_samples: int = _key(1_000_000, "samples in all splits together", least=7)
    seed: int = _key(0, "seed of the data; the run has its own", least=0)
    table_sizes: tuple[int, ...] = _key((), "rows per table; empty: Kaggle's 26 sizes")
    drift: float = _key(
        0.0,
        "share of popularity that moves to other rows per million samples",
        least=0,
        most=_MAX_DRIFT,
    )
    test_samples: int = _key(
        0,
        "samples to test on, and as many to validate on; 0: a fourteenth of all samples each",
        least=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not 1 <= size <= _MOST_ROWS for size in self.table_sizes):
            raise ConfigError(
                f"table_sizes must lie in [1, {_MOST_ROWS}], got {list(self.table_sizes)}"
            )
        if self.num_samples <= 2 * self.test_samples:
            raise ConfigError(
                f"test_samples must be less than half of num_samples {self.num_samples}, got "
                f"{self.test_samples}; lower it, or raise num_samples"
            )
