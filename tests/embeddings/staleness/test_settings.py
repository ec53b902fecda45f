"""Settings are checked when they are made."""

import pytest

from recsys.embeddings import Staleness
from recsys.errors import ConfigError


def test_the_defaults_are_valid():
    assert Staleness().window == 1000
    assert Staleness(window=33, min_updates=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 32),
        ("window", 100.0),
        ("window", True),
        ("window", 2**40),
        ("min_updates", 0),
        ("min_updates", 1001),
        ("patience", 0),
        ("max_rows", 0),
        ("count_every", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"staleness: {name} must be"):
        Staleness(**{name: value})


def test_a_window_with_more_counts_than_15_bits_is_refused():
    with pytest.raises(ConfigError, match="window / count_every must be less than"):
        Staleness(window=2**16, count_every=2)
    Staleness(window=2**16, count_every=4)


def test_counts_that_a_row_never_reaches_are_refused():
    with pytest.raises(ConfigError, match="min_updates must be at most"):
        Staleness(window=50, count_every=51, min_updates=1)
    # 12 or 13 of 50 steps are counted.
    with pytest.raises(ConfigError, match=r"min_updates must be at most .* \(48\), .* got 49"):
        Staleness(window=50, count_every=4, min_updates=49)
    Staleness(window=50, count_every=4, min_updates=48)
