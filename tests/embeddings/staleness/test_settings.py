"""Settings are checked when they are made."""

import pytest

from recsys.embeddings import Staleness
from recsys.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("window", {"window": value}) for value in (32, 100.0, True, 2**40)),
        *(("min_updates", {"min_updates": value}) for value in (0, 1001)),
        *((name, {name: 0}) for name in ("patience", "max_rows", "count_every")),
        # More counts than 15 bits hold.
        ("window / count_every", {"window": 2**16, "count_every": 2}),
        # Counts that a row never reaches: 12 or 13 of 50 steps are counted.
        ("min_updates", {"window": 50, "count_every": 51, "min_updates": 1}),
        ("min_updates", {"window": 50, "count_every": 4, "min_updates": 49}),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, settings):
    with pytest.raises(ConfigError, match=name):
        Staleness(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 33, "min_updates": 1},
        {"window": 2**16, "count_every": 4},
        {"window": 50, "count_every": 4, "min_updates": 48},
    ],
)
def test_values_at_the_edge_are_valid(settings):
    assert Staleness(**settings)
