"""Synthetic data whose popularity and preferences change with time, and its splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.config import load_config
from recsys.datasets.splits import classic_splits
from recsys.datasets.synthetic.kernel import drift_cycle, occupant
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.errors import ConfigError

SETTINGS = [
    {"drift": 0.5},
    {"preference_changes": [500]},
    {"preference_changes": [500], "preference_share": 0.9},
    {"split": "random"},
    {"test_samples": 90},
]


def row_counts(source, start, stop, column=0):
    """How often each row of a column is looked up from one time to another."""
    ids = source.read(np.arange(start, stop)).sparse_features[f"cat_{column}"].values().numpy()
    return np.bincount(ids, minlength=source.table_sizes[f"cat_{column}"])


def popular_rows(counts, num_rows):
    return set(np.argsort(counts, kind="stable")[::-1][:num_rows].tolist())


def click_rates(source, start, stop):
    """The share of clicks by row of the only column."""
    batch = source.read(np.arange(start, stop))
    ids, size = batch.sparse_features.values().numpy(), source.table_sizes["cat_0"]
    clicks = np.bincount(ids, weights=batch.labels.numpy(), minlength=size)
    return clicks / np.maximum(np.bincount(ids, minlength=size), 1)


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


def test_no_drift_and_no_changes_are_the_default():
    plain = SyntheticCriteo(num_samples=1_000, table_sizes=[50, 60])

    same = SyntheticCriteo(num_samples=1_000, table_sizes=[50, 60], drift=0, preference_changes=[])

    batch, expected = same.read(np.arange(1_000)), plain.read(np.arange(1_000))
    assert same.fingerprint == plain.fingerprint
    assert torch.equal(batch.sparse_features.values(), expected.sparse_features.values())
    assert torch.equal(batch.labels, expected.labels)


def test_a_drifting_sample_is_the_same_in_any_order():
    source = SyntheticCriteo(
        num_samples=500, table_sizes=[50, 60], drift=5_000.0, preference_changes=[100, 300]
    )
    order = np.random.default_rng(0).permutation(500)

    shuffled, expected = source.read(order), source.read(np.arange(500))

    ids_FB = expected.sparse_features.values().reshape(2, -1)
    assert torch.equal(shuffled.sparse_features.values().reshape(2, -1), ids_FB[:, order])
    assert torch.equal(shuffled.labels, expected.labels[order])


@pytest.mark.outside_ci
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_preference_change_draws_the_effects_of_its_share_of_rows_anew(share):
    source = SyntheticCriteo(
        num_samples=200_000,
        seed=1,
        table_sizes=[200],
        preference_changes=[100_000],
        preference_share=share,
    )
    numbers = np.arange(200_000)
    ids = source.read(numbers).sparse_features.values().numpy()
    effects = source.logit_parts(numbers)["rows"]

    before, after = (
        dict(zip(ids[part].tolist(), effects[part].tolist(), strict=True))
        for part in (slice(0, 100_000), slice(100_000, None))
    )

    both = before.keys() & after.keys()
    changed = [before[row] != after[row] for row in both]
    assert len(both) > 150
    assert np.mean(changed) == pytest.approx(share, abs=0.1)


@pytest.mark.outside_ci
def test_clicks_follow_a_preference_change_and_lookups_do_not():
    changing = SyntheticCriteo(
        num_samples=600_000, table_sizes=[20], preference_changes=[300_000], preference_share=1.0
    )

    before, rest = click_rates(changing, 0, 150_000), click_rates(changing, 150_000, 300_000)
    after = click_rates(changing, 300_000, 600_000)

    assert np.corrcoef(before, rest)[0, 1] > 0.9
    assert np.corrcoef(before, after)[0, 1] < 0.7
    lookups = row_counts(changing, 0, 300_000), row_counts(changing, 300_000, 600_000)
    np.testing.assert_allclose(lookups[0], lookups[1], atol=2_000)


@pytest.mark.outside_ci
def test_each_preference_change_comes_on_top_of_those_before():
    source = SyntheticCriteo(
        num_samples=600_000, seed=1, table_sizes=[200], preference_changes=[200_000, 400_000]
    )
    ids = source.read(np.arange(600_000)).sparse_features.values().numpy()
    effects = source.logit_parts(np.arange(600_000))["rows"]

    first, second, third = (
        dict(zip(ids[part].tolist(), effects[part].tolist(), strict=True))
        for part in (slice(0, 200_000), slice(200_000, 400_000), slice(400_000, None))
    )

    both = first.keys() & second.keys() & third.keys()
    kept_once = np.mean([first[row] == second[row] for row in both])
    kept_twice = np.mean([first[row] == third[row] for row in both])
    assert kept_once == pytest.approx(0.5, abs=0.15)
    assert kept_twice == pytest.approx(0.25, abs=0.15)


@pytest.mark.parametrize("num_samples", [7, 13, 14, 15, 20, 21, 27, 28, 1_003, 50_000])
def test_a_random_split_has_the_classic_sizes_and_every_sample_once(num_samples):
    source = SyntheticCriteo(num_samples=num_samples, table_sizes=[3], split="random")

    times = source.times(np.arange(num_samples))

    assert source.splits == classic_splits(num_samples)
    assert sorted(times.tolist()) == list(range(num_samples))


@pytest.mark.parametrize("split", ["train", "test", "validation"])
def test_a_random_split_is_spread_over_all_times_and_keeps_their_order(split):
    source = SyntheticCriteo(num_samples=140_000, table_sizes=[3], split="random")

    times = source.times(np.array(source.splits[split]))

    assert (np.diff(times) > 0).all()
    assert np.histogram(times, 10, (0, 140_000))[0] == pytest.approx(len(times) / 10, rel=0.01)
    places = np.bincount(times % 14, minlength=14)
    assert places == pytest.approx(len(times) / 14, rel=0.15)


def test_a_chronological_split_holds_out_the_last_samples():
    source = SyntheticCriteo(num_samples=700, table_sizes=[3])

    assert source.times(np.array(source.splits["test"])).min() == 600
    assert source.times(np.arange(700)).tolist() == list(range(700))


def test_a_random_split_has_the_samples_of_a_chronological_one_in_another_order():
    chronological = SyntheticCriteo(num_samples=500, table_sizes=[50])
    random = SyntheticCriteo(num_samples=500, table_sizes=[50], split="random")
    test = np.array(random.splits["test"])

    batch, expected = random.read(test), chronological.read(random.times(test))

    assert torch.equal(batch.dense_features, expected.dense_features)
    assert torch.equal(batch.labels, expected.labels)


def test_another_seed_holds_out_other_samples():
    first, second = (
        SyntheticCriteo(num_samples=1_400, seed=seed, table_sizes=[3], split="random")
        for seed in (0, 1)
    )
    test = np.array(first.splits["test"])

    same = first.times(test) == second.times(test)

    assert same.mean() < 0.25


@pytest.mark.outside_ci
def test_drift_hurts_a_chronological_split_and_not_a_random_one():
    """Clicks of the train part, by row, foretell those of the held out part where it is near."""

    def correlation(split):
        source = SyntheticCriteo(
            num_samples=700_000,
            table_sizes=[300],
            preference_changes=[600_000],
            preference_share=1.0,
            split=split,
        )
        train, test = (
            click_rates(source, source.splits[part].start, source.splits[part].stop)
            for part in ("train", "test")
        )
        test_range = source.splits["test"]
        often = row_counts(source, test_range.start, test_range.stop) > 200
        return np.corrcoef(train[often], test[often])[0, 1]

    assert correlation("random") > correlation("chronological") + 0.2


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
            "synthetic.preference_changes=[50]",
            "synthetic.preference_share=0.25",
            "synthetic.split=random",
        ],
    )

    described = open_source(config).describe()

    assert described["drift"] == 2.0
    assert described["preference_changes"] == [50]
    assert described["preference_share"] == 0.25
    assert described["split"] == "random"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drift": -1}, r"synthetic\.drift must be in \[0, 1e\+06\], got -1\.0"),
        ({"preference_changes": [9, 3]}, r"synthetic\.preference_changes must be rising"),
        ({"preference_share": -1}, r"synthetic\.preference_share must be in \[0, 1\]"),
        ({"split": "middle"}, r"synthetic\.split must be one of 'chronological', 'random'"),
        ({"test_samples": -1}, r"synthetic\.test_samples must be at least 0, got -1"),
        (
            {"test_samples": 50, "split": "random"},
            r"synthetic\.test_samples is for split 'chronological', got 50 with 'random'",
        ),
        (
            {"test_samples": 500},
            r"synthetic\.test_samples must be less than half of num_samples 700, got 500",
        ),
    ],
)
def test_bad_settings_are_config_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticCriteo(num_samples=700, **arguments)


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


@pytest.mark.parametrize("split", ["chronological", "random"])
def test_samples_have_days_if_the_settings_say_so(split):
    source = SyntheticCriteo(num_samples=700, table_sizes=[9], split=split, samples_per_day=100)

    seconds = source.seconds(range(300, 700))

    assert (seconds // 86_400).tolist() == (source.times(np.arange(300, 700)) // 100).tolist()
    assert SyntheticCriteo(num_samples=700, table_sizes=[9]).seconds(range(700)) is None
    assert source.describe()["samples_per_day"] == 100
