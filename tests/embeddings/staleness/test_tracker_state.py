"""The saved state of a tracker resumes to the bit, and hostile states are refused."""

import copy

import pytest
import torch

from recsys.embeddings import Staleness, StalenessTracker
from recsys.errors import ConfigError
from tests.embeddings.staleness import stream

LEAD = 32  # mini-batches later a decision holds
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


@pytest.mark.parametrize(
    ("at", "budget"), [(4 * WINDOW + 7, 19_000), (4 * WINDOW, None), (4 * WINDOW + LEAD, 19_000)]
)
def test_a_resumed_tracker_continues_to_the_bit(at, budget):
    """In the middle of a window, before flags change, when they change, and at a window's end."""
    settings = Staleness(**TRAITS)
    kinds = {} if budget is None else {"budget": budget}

    def made():
        model = stream.make_model(**kinds)
        return model, StalenessTracker(model, settings, share=0.05, freezes_rows=True)

    model, tracker = made()
    stream.train(model, tracker, range(at))
    for ahead in range(3):  # mini-batches that are taken again after the resume
        features = stream.make_batch(at + ahead)
        tracker.add_inputs(
            (at + ahead) * stream.BATCH_SIZE,
            model.lookups(features),
            stream.BATCH_SIZE,
            torch.arange(stream.BATCH_SIZE),
        )
        tracker.use_flags_of(at + LEAD + ahead)
    saved = copy.deepcopy((model.state_dict(), tracker.state_dict()))

    resumed, other = made()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert_equal_states(other.state_dict(), saved[1])
    assert other.report() == tracker.report()
    end = range(at, 8 * WINDOW)
    assert stream.train(resumed, other, end) == stream.train(model, tracker, end)
    assert_equal_states(other.state_dict(), tracker.state_dict())
    assert_equal_states(stream.rows_of(resumed), stream.rows_of(model))
    assert sum(tracker.report()["stale_rows"].values()) > 0
    assert 0 < tracker.report()["num_lookups_left_out"] < tracker.report()["num_lookups"]


@pytest.fixture
def saved():
    model = stream.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS), share=0.05)
    stream.train(model, tracker, range(5 * WINDOW + 3))
    return model, tracker, tracker.state_dict()


def test_a_state_of_other_settings_or_tables_or_keys_is_refused(saved):
    _, tracker, state = saved
    for change in ({"settings": state["settings"] | {"window": 41}}, {"sizes": [1, 2, 3]}):
        with pytest.raises(ConfigError, match="but this tracker has"):
            tracker.load_state_dict(state | change)
    with pytest.raises(ConfigError, match="with the keys"):
        tracker.load_state_dict(state | {"more": 1})
    assert_equal_states(tracker.state_dict(), state)


def test_nothing_of_the_state_before_is_left(saved):
    _, tracker, state = saved
    settings = Staleness(**TRAITS)
    new = StalenessTracker(stream.make_model(), settings, share=0.05)
    fresh = new.state_dict()
    for change in (tracker.reset, lambda: tracker.load_state_dict(fresh)):
        tracker.use_flags_of(6 * WINDOW)
        tracker.begin_step(tracker.num_steps)
        assert tracker.has_stale_rows
        change()
        assert_equal_states(tracker.state_dict(), fresh)
        assert not tracker.has_stale_rows
        tracker.load_state_dict(state)
        assert_equal_states(tracker.state_dict(), state)
