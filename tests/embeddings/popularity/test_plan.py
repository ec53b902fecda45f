import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import JaggedIds
from recsys.datasets import SyntheticCriteo
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotPlan,
    PopularityProfile,
    RowWiseAdagrad,
    TableConfig,
    plan_hot_rows,
)
from recsys.errors import BudgetTooSmall, ProfileError


def table(name, size, dim, features=(), data_type="fp32"):
    return TableConfig(
        name=name,
        num_embeddings=size,
        embedding_dim=dim,
        feature_names=features,
        data_type=data_type,
    )


def profile_of(counts):
    """A profile with these counts, by table."""
    profile = PopularityProfile({name: len(of) for name, of in counts.items()})
    lists = [np.repeat(np.arange(len(of)), of) for of in counts.values()]
    offsets = np.cumsum([0, *map(len, lists)])
    profile.add(
        JaggedIds(list(counts), torch.from_numpy(np.concatenate(lists)), torch.from_numpy(offsets))
    )
    return profile


def pinned(plan):
    return {name: plan.pinned_rows(name).tolist() for name in plan.tables}


# Slots of 11 + 4 * D bytes without state; a mini-batch's window of one row for each feature.
A, B = table("a", 5, 2), table("b", 4, 6)
COUNTS = {"a": [3, 0, 9, 1, 0], "b": [0, 6, 5, 0]}
FLOOR = 4 * 9 + 19 + 35


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        # Lookups per byte: 9/19, 6/35, 3/19, 5/35, 1/19.
        (0, {"a": [], "b": []}),
        (19, {"a": [2], "b": []}),
        (53, {"a": [2], "b": []}),
        (54, {"a": [2], "b": [1]}),
        (73, {"a": [0, 2], "b": [1]}),
        (108, {"a": [0, 2], "b": [1, 2]}),
        (127, {"a": [0, 2, 3], "b": [1, 2]}),
        (165, {"a": [0, 2, 3], "b": [1, 2]}),  # all rows seen are there
    ],
)
def test_rows_are_pinned_by_lookups_saved_per_byte_and_unseen_ones_never(room, expected):
    plan = plan_hot_rows(profile_of(COUNTS), [A, B], FLOOR + room, window_lookups=1, small_share=0)

    assert pinned(plan) == expected
    assert plan.floor_bytes == FLOOR
    assert plan.num_shared_slots == {(2, "fp32"): 1, (6, "fp32"): 1}


def test_everything_is_pinned_and_nothing_shared_where_everything_fits():
    everything = 4 * 9 + 5 * 19 + 4 * 35

    plan = plan_hot_rows(profile_of(COUNTS), [A, B], everything, window_lookups=1)
    nearly = plan.retarget(everything - 1)

    assert plan.everything_bytes == everything
    assert plan.num_pinned == 9
    assert (plan.shared_bytes, plan.pinned_bytes) == (0, everything - 36)
    assert nearly.num_pinned < 9
    assert nearly.shared_bytes == 54


def test_small_tables_are_pinned_whole_before_all_others():
    counts = {"small": [0, 1, 0], "large": [50] * 100}
    tables = [table("small", 3, 2), table("large", 100, 2)]
    floor = 4 * 103 + 2 * 19

    plan = plan_hot_rows(
        profile_of(counts), tables, floor + 76, window_lookups=1, small_share=57 / (floor + 76)
    )
    none_small = plan_hot_rows(
        profile_of(counts), tables, floor + 76, window_lookups=1, small_share=56 / (floor + 76)
    )

    assert pinned(plan) == {"small": [0, 1, 2], "large": [0]}
    assert pinned(none_small) == {"small": [], "large": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("optimizer", "data_type", "expected"),
    [
        (None, "fp32", 11 + 4 * 16),
        (SGD(lr=0.1), "fp32", 11 + 4 * 16),
        (RowWiseAdagrad(lr=0.1), "fp32", 11 + 4 * 16 + 4),
        (Adagrad(lr=0.1), "fp32", 11 + 4 * 32),
        (Adagrad(lr=0.1), "bf16", 11 + 2 * 16 + 4 * 16),
    ],
)
def test_a_slot_is_a_row_its_state_and_what_is_known_of_it(optimizer, data_type, expected):
    tables = [table("a", 5, 16, data_type=data_type)]

    plan = plan_hot_rows(profile_of({"a": COUNTS["a"]}), tables, "1GiB", optimizer)

    assert plan.tables["a"].slot_bytes == expected
    assert plan.pinned_bytes == 5 * expected


def test_a_budget_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(BudgetTooSmall, match=rf"at least {FLOOR}\b"):
        plan_hot_rows(profile_of(COUNTS), [A, B], FLOOR - 1, window_lookups=1)


sizes = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=25), min_size=1, max_size=4)


@given(sizes, st.integers(0, 4000), st.sampled_from([0.0, 0.02, 0.2]), st.data())
def test_a_plan_fits_its_budget_and_pins_no_unseen_row_while_a_seen_one_waits(
    counts, room, small_share, data
):
    dims = data.draw(st.lists(st.sampled_from([2, 4, 16]), min_size=4, max_size=4))
    counts = {f"t{number}": of for number, of in enumerate(counts)}
    tables = [
        table(name, len(of), dim) for (name, of), dim in zip(counts.items(), dims, strict=False)
    ]
    if not any(map(sum, counts.values())):
        return
    profile = profile_of(counts)
    least = 4 * sum(map(len, counts.values())) + sum(11 + 4 * each.embedding_dim for each in tables)

    plan = plan_hot_rows(profile, tables, least + room, window_lookups=1, small_share=small_share)

    rows = {name: set(plan.pinned_rows(name).tolist()) for name in counts}
    spent = plan.map_bytes + plan.shared_bytes + plan.pinned_bytes
    assert spent <= plan.budget_bytes
    waiting = [
        (of[row] / plan.tables[name].slot_bytes, plan.tables[name].slot_bytes)
        for name, of in counts.items()
        for row in range(len(of))
        if of[row] and row not in rows[name]
    ]
    for name, of in counts.items():
        is_whole = len(rows[name]) == len(of)
        slot_bytes = plan.tables[name].slot_bytes
        is_small = slot_bytes * len(of) <= small_share * plan.budget_bytes
        if waiting and not (is_whole and is_small):
            assert all(of[row] for row in rows[name])
            most = max(value for value, _ in waiting)
            assert all(of[row] / slot_bytes >= most * (1 - 1e-12) for row in rows[name])
    if waiting:  # the next one would not have fitted
        next_bytes = max(waiting, key=lambda each: each[0])[0]
        biggest = max(size for value, size in waiting if value >= next_bytes * (1 - 1e-12))
        assert spent + biggest > plan.budget_bytes


def test_a_plan_of_some_rows_is_the_plan_made_for_their_counts():
    whole = plan_hot_rows(profile_of(COUNTS), [A, B], FLOOR + 54, window_lookups=1)
    some = {"b": [6, 5], "a": [1, 0, 0]}

    found = whole.of_rows({"b": (1, 2), "a": (3, 3)}, 120)  # the last row of "a" is unknown

    tables = [table("b", 2, 6), table("a", 3, 2)]
    expected = plan_hot_rows(profile_of(some), tables, 120, window_lookups=1)
    assert {name: found.profile.counts(name).tolist() for name in some} == some
    assert pinned(found) == pinned(expected)
    assert found.budget_bytes == 120
    assert whole.of_rows({"a": (0, 5)}).budget_bytes == whole.budget_bytes


def test_a_plan_is_loaded_as_it_was_saved_and_can_be_made_for_another_budget(tmp_path):
    source = SyntheticCriteo(num_samples=3000, table_sizes=[30, 7, 1, 500])
    tables = [
        table(f"t_{name}", size, 4 * (1 + number % 2), (name,))
        for number, (name, size) in enumerate(source.table_sizes.items())
    ]
    profile = PopularityProfile.count(source, range(1500))
    plan = plan_hot_rows(profile, tables, "10KiB", RowWiseAdagrad(lr=0.1), window_lookups=50)

    plan.save(tmp_path / "new" / "plan.npz")
    loaded = HotPlan.load(tmp_path / "new" / "plan.npz")

    assert pinned(loaded) == pinned(plan)
    assert repr(loaded) == repr(plan)
    assert str(loaded) == str(plan)
    assert loaded.tables == plan.tables
    assert pinned(loaded.retarget("8KiB")) == pinned(plan.retarget("8KiB"))
    # A plan's file is that of its counts, too.
    assert PopularityProfile.load(tmp_path / "new" / "plan.npz").num_samples == 1500


def test_a_profile_is_no_plan(tmp_path):
    profile_of(COUNTS).save(tmp_path / "profile.npz")

    with pytest.raises(ProfileError, match="is a profile, not a plan; make one with `recsys plan"):
        HotPlan.load(tmp_path / "profile.npz")
