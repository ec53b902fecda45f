"""The memory of a tracker is counted, and taken out of the budget."""

import gc
import re
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch

from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.staleness import tracker as tracker_module
from recsys.embeddings.staleness.settings import Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from recsys.embeddings.update.group_updater import GroupUpdater
from recsys.embeddings.update.row_updater import RowUpdater
from recsys.errors import BudgetTooSmall, ConfigError

BUDGET = 19_000
TRAITS = {"window": 40, "min_updates": 1, "count_every": 1}


NOT_OF_TRACKERS = (RowUpdater, GroupUpdater, TableGroup, type, ModuleType, FunctionType)


def arrays_in(tracker):
    """Bytes of all arrays and tensors that are reachable from a tracker, each memory once.

    Not those of the model, and not those with a number per table.
    """
    most_per_table = max(len(each.marks.first_rows) for each in tracker._followed)
    found, seen, left = {}, set(), [tracker]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, NOT_OF_TRACKERS):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray):
            while isinstance(each.base, np.ndarray):
                each = each.base
            if each.size > most_per_table:
                found[each.ctypes.data] = each.nbytes
        else:
            left += gc.get_referents(each)
    return sum(found.values())


def tiered(small, budget=BUDGET):
    model = small.make_model(budget=budget)
    [tiers] = model.tiers()
    return model, tiers, tiers.hot.num_slots


@pytest.mark.parametrize("measure", ["mean_change", "signal_to_noise"])
def test_the_bytes_reported_are_those_allocated(small, measure):
    model = small.make_model()
    settings = Staleness(**TRAITS, measure=measure, threshold=1e9, max_rows=30, patience=1)
    tracker = StalenessTracker(model, settings, share=1.0)
    for number in range(200):
        small.train(model, tracker, [number], has_inputs=False)
        assert arrays_in(tracker) <= tracker.num_bytes
    # The most that flags can take: two lists of all rows that are followed.
    [flags, *_] = tracker._flag_sets._sets
    tracker._flag_sets._sets = [flags._replace(rows=[np.arange(30)]) for _ in range(2)]
    assert arrays_in(tracker) == tracker.num_bytes
    assert tracker.report()["memory_bytes"] == tracker.num_bytes


def test_memory_comes_out_of_the_budget_and_goes_back(small):
    model, tiers, num_slots = tiered(small)
    tracker = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    assert tiers.hot.num_slots < num_slots
    assert tiers.hot.num_bytes + tracker.num_bytes <= BUDGET
    assert tiers.hot.num_bytes + tracker.num_bytes > BUDGET - 100
    small.train(model, tracker, range(50))
    assert tiers.hot.num_bytes + tracker.num_bytes <= BUDGET  # with room for larger mini-batches
    rows = small.rows_of(model)
    tracker.close()
    assert tiers.hot.num_slots == num_slots
    assert torch.equal(small.rows_of(model), rows)
    assert model.row_updater.groups[0].group.staleness is None


def test_a_budget_without_room_is_named(small):
    model, tiers, num_slots = tiered(small, 12_000)
    with pytest.raises(BudgetTooSmall, match=r"staleness tracker takes \d+ bytes .* max_rows"):
        StalenessTracker(model, Staleness(**TRAITS, max_rows=1000))
    assert tiers.hot.num_slots == num_slots
    assert model.row_updater.groups[0].group.staleness is None
    small.train(model, None, range(3))


def named_budget(error):
    return int(re.search(r"raise it to (\d+)", str(error.value))[1])


def test_the_budget_that_is_named_is_enough(small):
    settings = Staleness(**TRAITS, max_rows=60)
    model = small.make_model(budget=12_000)
    with pytest.raises(BudgetTooSmall, match=r"tracker \(\d+ bytes\).*budget is 12000") as error:
        StalenessTracker(model, settings)
    model = small.make_model(budget=named_budget(error))
    tracker = StalenessTracker(model, settings)
    # What a mini-batch needs is named, too.
    with pytest.raises(BudgetTooSmall, match=rf"tracker \({tracker.num_bytes} bytes\)") as error:
        small.train(model, tracker, range(1))
    model = small.make_model(budget=named_budget(error))
    small.train(model, StalenessTracker(model, settings), range(1))


def test_a_close_that_failed_can_be_repeated(small):
    model, tiers, num_slots = tiered(small)
    tracker = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    pooled = model(small.make_batch(0)).values()
    with pytest.raises(BudgetTooSmall, match="in use"):
        tracker.close()
    del pooled
    tracker.close()
    assert tiers.hot.num_slots == num_slots


def test_a_repeated_close_leaves_a_new_tracker_its_memory(small):
    model, tiers, _ = tiered(small)
    tracker = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    pooled = model(small.make_batch(0)).values()
    with pytest.raises(BudgetTooSmall, match="in use"):
        tracker.close()
    del pooled
    new = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    tracker.close()
    del tracker
    small.train(model, new, range(50))
    assert tiers.hot.num_bytes + new.num_bytes <= BUDGET


def test_a_tracker_that_was_dropped_frees_its_tables(small):
    model, tiers, num_slots = tiered(small)
    tracker = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    del tracker
    assert model.row_updater.groups[0].group.staleness is None
    tracker = StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    assert tiers.hot.num_bytes + tracker.num_bytes <= BUDGET
    del tracker
    model.row_updater.reserve(0)
    assert tiers.hot.num_slots == num_slots
    with pytest.raises(ConfigError, match="share"):
        StalenessTracker(model, share=2)
    with pytest.raises(TypeError, match="modules"):
        StalenessTracker()


def test_memory_that_cannot_be_had_is_not_kept(small, monkeypatch):
    model = small.make_model(budget=BUDGET)
    with monkeypatch.context() as patched:
        patched.setattr(tracker_module, "FollowedRows", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    gc.collect()
    assert model.row_updater._reserved_bytes == 0


def test_a_tracker_does_not_begin_while_slots_are_in_use(small):
    model = small.make_model(budget=BUDGET)
    pooled = model(small.make_batch(0)).values()
    with pytest.raises(BudgetTooSmall, match="in use"):
        StalenessTracker(model, Staleness(**TRAITS, max_rows=60))
    del pooled
    StalenessTracker(model, Staleness(**TRAITS, max_rows=60))


def test_sampled_inputs_do_not_pile_up_within_a_window(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(window=1000))
    small.train(model, tracker, range(500))
    assert sum(len(each.indices) for each in tracker._inputs._chunks) < 4096 + 2 * small.BATCH_SIZE
