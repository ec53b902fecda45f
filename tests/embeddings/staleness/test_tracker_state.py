"""The saved state of a tracker resumes to the bit, and hostile states are refused."""

import copy

import numpy as np
import pytest
import torch

from recsys.embeddings.staleness.followed_rows import history_type
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from recsys.errors import ConfigError

WINDOW = 40
TRAITS = {"window": WINDOW, "min_updates": 3, "count_every": 1, "max_rows": 60}


def leaves(state):
    if isinstance(state, dict):
        return [leaf for key in sorted(state) for leaf in leaves(state[key])]
    if isinstance(state, list):
        return [leaf for each in state for leaf in leaves(each)]
    return [state]


def assert_equal_states(found, expected):
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.in_ci("167-19000", "160-None", "192-19000")
@pytest.mark.parametrize("budget", [None, 19_000])
@pytest.mark.parametrize("at", [4 * WINDOW, 4 * WINDOW + 7, 4 * WINDOW + LEAD, 5 * WINDOW - 3])
def test_a_resumed_tracker_continues_to_the_bit(small, at, budget):
    """In the middle of a window, before flags change, when they change, and at a window's end."""
    settings = Staleness(**TRAITS)
    kinds = {} if budget is None else {"budget": budget}

    def made():
        model = small.make_model(**kinds)
        return model, StalenessTracker(model, settings, share=0.05, freezes_rows=True)

    model, tracker = made()
    small.train(model, tracker, range(at))
    for ahead in range(3):  # mini-batches that are taken again after the resume
        features = small.make_batch(at + ahead)
        tracker.add_inputs(
            (at + ahead) * small.BATCH_SIZE,
            [small.part_of(model, features)],
            small.BATCH_SIZE,
            torch.arange(small.BATCH_SIZE),
        )
        tracker.use_flags_of(at + LEAD + ahead)
    saved = copy.deepcopy((model.state_dict(), tracker.state_dict()))

    resumed, other = made()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert_equal_states(other.state_dict(), saved[1])
    assert other.report() == tracker.report()
    end = range(at, 8 * WINDOW)
    assert small.train(resumed, other, end) == small.train(model, tracker, end)
    assert_equal_states(other.state_dict(), tracker.state_dict())
    assert torch.equal(small.rows_of(resumed), small.rows_of(model))
    assert sum(tracker.report()["last_window"]["stale_rows"].values()) > 0
    assert 0 < tracker.report()["num_lookups_left_out"] < tracker.report()["num_lookups"]


@pytest.fixture
def saved(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS), share=0.05)
    small.train(model, tracker, range(5 * WINDOW + 3))
    return model, tracker, tracker.state_dict()


def changed(path, value):
    """A function that replaces the entry of a state at `path`."""

    def change(state):
        *way, last = path
        for key in way:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return change


def with_item(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


def with_rows(change):
    """A function that changes the rows of a history."""

    def change_rows(history):
        values = history.numpy().copy().view(history_type(2))
        values["row"] = change(values["row"].copy())
        return torch.from_numpy(values.view(np.uint8))

    return change_rows


GROUP = ("groups", 0)
HOSTILE = {
    "no mapping": lambda state: None,
    "other settings": changed(("settings", "window"), 41),
    "settings of another type": changed(("settings",), 3),
    "negative steps": changed(("num_steps",), -1),
    "huge steps": changed(("num_steps",), 2**70),
    "rows frozen in later steps": changed(("frozen_until",), 5 * WINDOW + 4),
    "text for a number": changed(("num_seen",), "3"),
    "no groups": changed(("groups",), []),
    "groups of another type": changed(("groups",), 7),
    "a window without keys": changed(("last_window",), {}),
    "half a row": changed((*GROUP, "history"), lambda history: history[:-1]),
    "rows beyond the tables": changed((*GROUP, "history"), with_rows(lambda rows: rows + 10**6)),
    "negative rows": changed((*GROUP, "history"), with_rows(lambda rows: rows - 10**6)),
    "rows out of order": changed((*GROUP, "history"), with_rows(lambda rows: rows[::-1])),
    "too many rows": changed((*GROUP, "history"), lambda history: history.repeat(9)),
    "history of another dtype": changed((*GROUP, "history"), lambda history: history.int()),
    "other tables": changed((*GROUP, "sizes"), [1, 2, 3]),
    "snapshots of another shape": changed((*GROUP, "before"), lambda rows: rows[:-1]),
    "snapshots of another dtype": changed((*GROUP, "before"), lambda rows: rows.double()),
    "no snapshots": changed((*GROUP, "before"), None),
    "counts without rows": changed((*GROUP, "counted"), lambda rows: rows[:-1]),
    "a count of 0": changed((*GROUP, "counts"), with_item(0, 0)),
    "a negative count": changed((*GROUP, "counts"), with_item(0, -5)),
    "counts of another dtype": changed((*GROUP, "counts"), lambda counts: counts.long()),
    "lookups as text": changed((*GROUP, "lookups"), "12"),
    "no flag sets": changed(("flag_sets",), []),
    "too many flag sets": changed(("flag_sets",), lambda sets: sets * 3),
    "a flag set that never begins": changed(("flag_sets", -1, "first_number"), 10**9),
    "a flag set that comes too late": changed(("flag_sets", 0, "first_number"), 5 * WINDOW + 4),
    "flags of rows beyond the tables": changed(("flag_sets", 0, "rows", 0), torch.tensor([10**6])),
    "flags of no groups": changed(("flag_sets", 0, "rows"), []),
    "inputs without rows": changed(("inputs", "rows"), []),
    "inputs of later steps": changed(("inputs", "indices"), with_item(-1, 10**6)),
    "inputs out of order": changed(("inputs", "indices"), lambda each: each.flip(0)),
    "bounds that fall": changed(("inputs", "bounds", 0), with_item(1, 10**6)),
    "bounds that do not begin at 0": changed(("inputs", "bounds", 0), with_item(0, 1)),
    "a list of numbers for a tensor": changed(("inputs", "rows", 0), [1, 2]),
}


def is_refused(tracker, state):
    try:
        tracker.load_state_dict(state)
    except ConfigError:
        return True
    return False


def test_hostile_states_are_refused_and_change_nothing(saved):
    _, tracker, state = saved
    before = copy.deepcopy(state)
    for name, change in HOSTILE.items():
        hostile = copy.deepcopy(state)
        hostile = None if name == "no mapping" else (change(hostile), hostile)[1]
        assert is_refused(tracker, hostile), name
        assert_equal_states(tracker.state_dict(), before)
    tracker.load_state_dict(state)
    assert_equal_states(tracker.state_dict(), before)


def test_missing_and_unknown_keys_are_refused(saved):
    _, tracker, state = saved
    for key in state:
        with pytest.raises(ConfigError, match="keys must be"):
            tracker.load_state_dict({name: state[name] for name in state if name != key})
    with pytest.raises(ConfigError, match="keys must be"):
        tracker.load_state_dict(state | {"more": 1})


def test_nothing_of_the_state_before_is_left(small, saved):
    _, tracker, state = saved
    settings = Staleness(**TRAITS)
    new = StalenessTracker(small.make_model(), settings, share=0.05)
    fresh = new.state_dict()
    for change in (tracker.reset, lambda: tracker.load_state_dict(fresh)):
        tracker.use_flags_of(6 * WINDOW)
        tracker.begin_step(tracker.num_steps)
        assert tracker.has_stale_rows
        change()
        assert_equal_states(tracker.state_dict(), fresh)
        assert not tracker.has_stale_rows
        assert not tracker._inputs.newest(10**6)[0].size
        assert not any(each.marks.is_counting for each in tracker._followed)
        tracker.load_state_dict(state)
        assert_equal_states(tracker.state_dict(), state)


def test_a_tracker_that_was_reset_is_as_a_new_one(small, saved):
    _, tracker, _ = saved
    tracker.reset()
    model = small.make_model()
    settings = Staleness(**TRAITS)
    new = StalenessTracker(model, settings, share=0.05)
    other = saved[0]
    other.load_state_dict(model.state_dict())
    small.train(other, tracker, range(4 * WINDOW))
    small.train(model, new, range(4 * WINDOW))
    assert_equal_states(tracker.state_dict(), new.state_dict())


def test_a_state_after_no_step_can_be_loaded(small):
    states = []
    for _ in range(2):
        tracker = StalenessTracker(small.make_model(), Staleness(**TRAITS))
        tracker.load_state_dict(tracker.state_dict())
        states.append(tracker.state_dict())
    assert_equal_states(*states)
