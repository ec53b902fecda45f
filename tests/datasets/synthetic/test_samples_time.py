"""Synthetic data whose popularity changes with time, and its splits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.config import load_config
from recsys.datasets.synthetic.samples import SyntheticCriteo, drift_cycle, occupant

SETTINGS = [
    {"drift": 0.5},
    {"test_samples": 90},
]


def row_counts(source, start, stop, column=0):
    """How often each row of a column is looked up from one time to another."""
    ids = source.read(np.arange(start, stop)).sparse_features[f"cat_{column}"].values().numpy()
    return np.bincount(ids, minlength=source.table_sizes[f"cat_{column}"])


def popular_rows(counts, num_rows):
    return set(np.argsort(counts, kind="stable")[::-1][:num_rows].tolist())


def test_popular_rows_are_replaced_at_the_rate_of_the_drift():
    # The shape of Kaggle's second column, which has no row that outweighs the others.
    source = SyntheticCriteo(num_samples=4_000_000, table_sizes=[1, 5_000], drift=0.5)
    first = popular_rows(row_counts(source, 0, 60_000, 1), 60)

    kept = [
        len(first & popular_rows(row_counts(source, start, start + 60_000, 1), 60)) / 60
        for start in (60_000, 940_000, 1_940_000, 3_900_000)
    ]

    np.testing.assert_allclose(kept, [0.97, 0.53, 0.03, 0.01], atol=0.15)


@pytest.mark.outside_ci
@pytest.mark.parametrize("column", [1, 2])
def test_drift_leaves_the_popularity_curve_as_it_is(column):
    sizes = [1, 500, 100_000]
    still = SyntheticCriteo(num_samples=9_000_000, table_sizes=sizes)
    drifting = SyntheticCriteo(num_samples=9_000_000, table_sizes=sizes, drift=0.3)
    expected = np.sort(row_counts(still, 0, 50_000, column))[::-1].cumsum() / 50_000

    for start in (0, 1_000_000, 4_700_000, 8_900_000):
        counts = row_counts(drifting, start, start + 50_000, column)
        shares = np.sort(counts)[::-1].cumsum() / 50_000
        np.testing.assert_allclose(shares, expected, atol=0.02)


def rows_of(ranks, size, progress, key):
    """The rows that ranks have when time has gone through so many cycles of drift."""
    cycle = int(progress)
    offset, centre, moment_key = drift_cycle(cycle, size, key)
    moment = (progress - cycle, offset, centre, np.uint64(moment_key))
    return [occupant(rank, size, cycle, *moment) for rank in ranks]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    size=st.integers(1, 60),
    progress=st.floats(0, 1_000) | st.integers(0, 1_000).map(float),
    key=st.integers(0, 2**64 - 1).map(np.uint64),
)
def test_at_any_time_each_rank_has_a_row_of_its_own(size, progress, key):
    rows = rows_of(range(size), size, progress, key)

    assert sorted(rows) == list(range(size))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(cycle=st.integers(1, 1_000), key=st.integers(0, 2**64 - 1).map(np.uint64))
def test_nothing_jumps_where_a_cycle_of_drift_ends(cycle, key):
    before, after = (
        rows_of(range(1_000), 1_000, progress, key) for progress in (cycle - 1e-12, float(cycle))
    )

    assert before == after


def test_ranks_change_rows_one_after_the_other():
    def rows(ranks, progress):
        return np.array(rows_of(ranks, 10_000, progress, np.uint64(5)))

    changed = [
        np.mean(rows(ranks, 3.2 + later) != rows(ranks, 3.2))
        for later in (0.1, 0.4, 0.8)
        for ranks in (range(10_000), range(1_000))
    ]

    np.testing.assert_allclose(changed, [0.1, 0.1, 0.4, 0.4, 0.8, 0.8], atol=0.05)


def test_drift_leaves_no_gaps_in_the_largest_tables():
    source = SyntheticCriteo(num_samples=1_000_000, table_sizes=[1, 2**31, 2**31], drift=3.0)

    batch = source.read(np.arange(990_000, 1_000_000)).sparse_features

    rows = np.unique(batch["cat_2"].values().numpy())
    np.testing.assert_allclose(np.bincount(rows % 8) / len(rows), np.full(8, 1 / 8), atol=0.02)


@pytest.mark.outside_ci
def test_drift_keeps_bringing_rows_never_seen_before():
    def new_lookups(drift):
        source = SyntheticCriteo(num_samples=3_000_000, table_sizes=[20_000], drift=drift)
        seen = row_counts(source, 0, 1_000_000) > 0
        late = row_counts(source, 2_900_000, 3_000_000)
        return late[~seen].sum() / late.sum()

    still, drifting = new_lookups(0.0), new_lookups(0.3)

    assert drifting > still + 0.02


@pytest.mark.parametrize("changed", SETTINGS)
def test_every_setting_is_in_the_fingerprint_and_the_description(changed):
    plain = SyntheticCriteo(num_samples=1_000, table_sizes=[3])

    source = SyntheticCriteo(num_samples=1_000, table_sizes=[3], **changed)

    others = [
        SyntheticCriteo(num_samples=1_000, table_sizes=[3], **other).fingerprint
        for other in SETTINGS
        if other != changed
    ]
    assert source.fingerprint not in [plain.fingerprint, *others]
    assert {key: source.describe()[key] for key in changed} == changed


def test_a_configuration_reaches_the_data():
    from recsys.train.parts.build import open_source

    config = load_config(
        None,
        [
            "synthetic.num_samples=100",
            "synthetic.table_sizes=[5]",
            "synthetic.drift=2",
        ],
    )

    described = open_source(config).describe()

    assert described["drift"] == 2.0


def test_a_number_of_test_samples_changes_the_parts_and_no_sample():
    plain = SyntheticCriteo(num_samples=1_000, table_sizes=[9, 30])
    source = SyntheticCriteo(num_samples=1_000, table_sizes=[9, 30], test_samples=300)

    assert source.splits == {
        "train": range(400),
        "test": range(400, 700),
        "validation": range(700, 1_000),
    }
    numbers = np.arange(1_000)
    for name in ("dense_features", "labels"):
        assert torch.equal(getattr(source.read(numbers), name), getattr(plain.read(numbers), name))
    assert source.fingerprint == f"{plain.fingerprint} test=300"
    assert source.describe() == plain.describe() | {
        "test_samples": 300,
        "best_auc": source.best_auc(),
    }
