"""Rows are called stale exactly when their recomputed history says so."""

from bisect import bisect
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBag, Staleness, StalenessTracker
from tests.embeddings.staleness import stream
from tests.embeddings.staleness.test_tracker_state import assert_equal_states

LEAD = 32  # mini-batches later a decision holds
REST = 4  # windows in which a stale row is not judged before its trial
WINDOW = 50
STEPS = 12 * WINDOW
FIRSTS = list(accumulate(stream.SIZES, initial=0))  # of each table's rows, and their end


class Oracle:
    """All rows after every step, and from them the stale rows of every window."""

    def __init__(self, settings, share, freezes):
        self.settings, self.share, self.freezes = settings, share, freezes
        self.rows, self.updated, self.inputs = [], [], []
        self.flagged = [set()]  # in each window, by its decision
        self.known = {}  # followed rows
        self.thresholds, self.thawed = [], []

    def flagged_at(self, number):
        """The rows that count as stale for a mini-batch."""
        window = max(0, number - LEAD) // self.settings.window
        return self.flagged[window]

    def end_window(self):
        settings, window = self.settings, len(self.flagged) - 1
        steps = range(window * settings.window, (window + 1) * settings.window)
        counted = [self.updated[step] for step in steps if step % settings.count_every == 0]
        counts = {}
        for each in counted:
            for row in each:
                counts[row] = counts.get(row, 0) + 1
        ends = [window * settings.window, (window + 1) * settings.window]
        for row, known in self.known.items():
            updates = counts.get(row, 0) * settings.count_every
            is_resting = self.is_resting(known, window)
            is_judged = updates >= settings.min_updates and not (self.freezes and is_resting)
            if is_judged:
                known["judged"] = window
                known["drifts"] = [*known["drifts"], self.drift(row, *ends)][-settings.patience :]
            elif not is_resting:
                known["drifts"] = []
        levels = {
            row: max(known["drifts"])
            for row, known in self.known.items()
            if len(known["drifts"]) == settings.patience
        }
        threshold = self.threshold(levels)
        self.thresholds.append(threshold)
        self.thawed.append(0)
        for row, known in self.known.items():
            level = levels.get(row, np.inf)
            is_stale = level <= threshold
            self.thawed[-1] += known["stale"] and not is_stale and level < np.inf
            known["stale"] = is_stale
        flagged = {
            row
            for row, known in self.known.items()
            if known["stale"] and window + 1 - known["judged"] <= REST
        }
        self.flagged.append(flagged)
        stale = [row for row, known in self.known.items() if known["stale"]]
        least = -(-settings.min_updates // settings.count_every)
        others = [row for row in counts if counts[row] >= least and row not in stale]
        others.sort(key=lambda row: (-counts[row], row))
        self.known = {
            row: self.known.get(row, {"drifts": [], "stale": False, "judged": 0})
            for row in [*stale, *others[: settings.max_rows - len(stale)]]
        }

    def drift(self, row, begin, end):
        """How far a row has moved, in plain Python."""
        table = bisect(FIRSTS, row) - 1
        before, now = (self.rows[at][table][row - FIRSTS[table]].tolist() for at in (begin, end))
        return sum(abs(b - a) for a, b in zip(before, now, strict=True)) / len(now)

    def is_resting(self, known, window):
        """Whether a row is stale and not at its trial's end; if it freezes, a trial takes 2."""
        return known["stale"] and window - known["judged"] <= REST + self.freezes

    def threshold(self, levels):
        if self.share == 0:
            return -np.inf
        inputs = self.inputs[-4096:]
        found = sorted(
            max((levels.get(r, np.inf) for r in each), default=np.inf) for each in inputs
        )
        rank = int(self.share * len(found))
        if rank and found[rank - 1] == np.inf:
            return max((each for each in found if each < np.inf), default=-np.inf)
        if rank and sum(each <= found[rank - 1] for each in found) > 1.5 * self.share * len(found):
            return max((each for each in found if each < found[rank - 1]), default=-np.inf)
        return found[rank - 1] if rank else -np.inf


def rows_in(features):
    """The distinct rows of a mini-batch, counted over all tables, and those of each sample."""
    bounds, values = features.offsets().tolist(), features.values().tolist()
    samples = [set() for _ in range(stream.BATCH_SIZE)]
    for bag, (begin, end) in enumerate(pairwise(bounds)):
        table, sample = divmod(bag, stream.BATCH_SIZE)
        samples[sample] |= {FIRSTS[table] + value for value in values[begin:end]}
    return set().union(*samples), samples


def run(settings, *, share, freezes):
    """Train a resident model beside the oracle; compare after every step."""
    model = stream.make_model()
    tracker = StalenessTracker(model, settings, share=share, freezes_rows=freezes)
    oracle = Oracle(settings, share, freezes)
    oracle.rows.append(stream.rows_of(model))
    num_stale = []
    for number in range(STEPS):
        features = stream.make_batch(number, seed=1)
        parts = model.lookups(features)
        looked_up, samples = rows_in(features)
        oracle.inputs += samples
        tracker.add_inputs(
            number * stream.BATCH_SIZE, parts, stream.BATCH_SIZE, torch.arange(stream.BATCH_SIZE)
        )
        tracker.use_flags_of(number)
        flagged = oracle.flagged_at(number)
        assert listed(tracker) == flagged
        found = tracker.all_stale(parts, stream.BATCH_SIZE)
        assert found.tolist() == [bool(each) and each <= flagged for each in samples]
        tracker.begin_step(number)
        stream.step(model, features, number)
        oracle.updated.append(looked_up - flagged if freezes else looked_up)
        oracle.rows.append(stream.rows_of(model))
        tracker.end_step((number + 1) * stream.BATCH_SIZE)
        if (number + 1) % settings.window == 0:
            oracle.end_window()
            threshold = oracle.thresholds[-1]
            known = None if np.isinf(threshold) else pytest.approx(threshold, rel=1e-6)
            assert tracker.report()["threshold"] == known
            num_stale.append(len(oracle.flagged[-1]))
    return tracker, oracle, num_stale


def listed(tracker):
    """The rows that are marked as stale, counted over all tables."""
    stale = tracker.stale_rows()
    assert list(stale) == ["t0", "t1", "t2"]
    return {
        first + row
        for first, rows in zip(FIRSTS, stale.values(), strict=False)
        for row in rows.tolist()
    }


@pytest.mark.parametrize(
    ("settings", "freezes", "share"),
    [
        ({"min_updates": 4, "count_every": 2, "patience": 1}, False, 0.03),
        ({"min_updates": 4, "count_every": 2, "patience": 1}, True, 0.03),
        ({"patience": 3}, False, 0.05),
        ({"max_rows": 12, "patience": 1}, True, 0.05),
        ({"count_every": 4, "window": WINDOW + 3}, True, 0.05),
    ],
)
def test_a_row_is_stale_when_its_recomputed_drifts_say_so(settings, freezes, share):
    chosen = Staleness(**{"window": WINDOW, "min_updates": 3, "count_every": 1} | settings)
    _, oracle, num_stale = run(chosen, share=share, freezes=freezes)
    assert max(num_stale) > 0
    assert any(oracle.thawed) or share > 0.03


TRAITS = {"window": WINDOW, "min_updates": 3, "count_every": 1, "max_rows": 60}


def test_flags_are_those_of_the_number_that_is_asked_for():
    model = stream.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS), share=0.1)
    seen = {}
    for number in range(6 * WINDOW):
        for ahead in (number, number + LEAD, number + 5, number):
            tracker.use_flags_of(ahead)
            found = listed(tracker)
            assert seen.setdefault(ahead, found) == found
        stream.train(model, tracker, [number])
    assert len({frozenset(each) for each in seen.values()}) > 3


def test_with_share_0_no_row_is_stale():
    model = stream.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS))
    stream.train(model, tracker, range(4 * WINDOW))
    tracker.use_flags_of(4 * WINDOW)
    assert listed(tracker)
    assert 0 < tracker.report()["stale_share"] < 0.99
    tracker.share = 0
    stream.train(model, tracker, range(4 * WINDOW, 5 * WINDOW + LEAD))
    tracker.use_flags_of(5 * WINDOW + LEAD)
    assert not listed(tracker)
    assert tracker.report()["threshold"] is None


def test_rows_that_do_not_move_at_all_do_not_exceed_the_share():
    model = stream.make_model(SGD(lr=0.0))
    settings = Staleness(**TRAITS | {"patience": 1, "max_rows": 2000})
    tracker = StalenessTracker(model, settings, share=0.02)
    stream.train(model, tracker, range(6 * WINDOW))
    assert tracker.report()["threshold"] is None
    assert tracker.report()["stale_share"] == 0


def make_bag():
    return HotColdEmbeddingBag(8, 4, mode="sum", optimizer=SGD(lr=1.0))


IDS = torch.arange(8)[:, None]
QUICK = {"window": WINDOW, "min_updates": 1, "count_every": 1, "patience": 1}


def train_bags(tracker, bags, num_steps, gradient_of=lambda _: 1.0):
    """Steps in which each row moves by -`gradient_of` the mini-batch, times its learning rate.

    Returns what is reported at the end of each window.
    """
    windows = []
    for number in range(num_steps):
        parts = [part for bag in bags for part in bag.lookups(IDS)]
        tracker.add_inputs(8 * number, parts, 8, torch.arange(8))
        tracker.begin_step(number)
        sum((gradient_of(number) * bag(IDS)).sum() for bag in bags).backward()
        tracker.end_step(8 * number + 8)
        if (number + 1) % tracker.staleness.window == 0:
            windows.append(tracker.report())
    return windows


@pytest.mark.parametrize("window", [40, 64])
def test_a_frozen_row_is_judged_by_a_window_that_it_moves_in_throughout(window):
    bag = make_bag()
    tracker = StalenessTracker(
        bag, Staleness(**QUICK | {"window": window}), share=1.0, freezes_rows=True
    )
    # A gradient of 1 moves each row by 1 in each step. A frozen part of a window would show.
    reports = train_bags(tracker, [bag], 16 * window)
    assert [each["threshold"] for each in reports] == [None, *[pytest.approx(window)] * 15]
    assert 0.5 < reports[-1]["num_lookups_left_out"] / reports[-1]["num_lookups"] < 0.8


def test_a_step_that_raised_leaves_nothing_on():
    bag = make_bag()
    tracker = StalenessTracker(bag, Staleness(**QUICK), share=1.0, freezes_rows=True)
    train_bags(tracker, [bag], 2 * WINDOW + LEAD)
    before, state = bag.weight.detach().clone(), tracker.state_dict()
    tracker.begin_step(2 * WINDOW + LEAD)
    assert tracker.has_stale_rows
    tracker.cancel_step()
    bag(IDS).sum().backward()
    assert (bag.weight.detach() != before).all()
    assert_equal_states(tracker.state_dict(), state)


def test_a_sample_without_rows_is_not_stale():
    bag = make_bag()
    tracker = StalenessTracker(bag, Staleness(window=WINDOW), share=0.5)
    tracker._marks.set_stale(np.arange(8))
    parts = bag.lookups(torch.tensor([1, 5]), torch.tensor([0, 1, 1]))
    assert tracker.all_stale(parts, 3).tolist() == [True, False, True]
    assert tracker.all_stale([], 2).tolist() == [False, False]


def test_an_id_outside_its_table_is_not_the_stale_row_of_the_next_table():
    model = stream.make_model(dims=(4, 4, 4))
    tracker = StalenessTracker(model, Staleness(window=WINDOW), share=0.5)
    tracker._marks.set_stale(np.arange(FIRSTS[-1]))
    ids = torch.tensor([[0, 500, 0, 0, 0], [0, 0, -1, 6, 0], [0, 0, 0, 0, 900]])
    parts = model.lookups(JaggedIds.from_one_hot(["f0", "f1", "f2"], ids))
    assert tracker.all_stale(parts, 5).tolist() == [True, *[False] * 4]


def test_a_count_stops_before_the_bit_of_stale_rows():
    tracker = StalenessTracker(make_bag(), Staleness(**QUICK))
    state = tracker.state_dict()
    state["counted"] = [torch.tensor([3]), torch.tensor([2**15 - 2], dtype=torch.int16)]
    tracker.load_state_dict(state)
    for _ in range(2):
        tracker._marks.count(np.array([3, 4, -1]))
    assert [each.tolist() for each in tracker._marks.counted()] == [[3, 4], [2**15 - 1, 2]]
    assert tracker._marks.are_stale(np.arange(8)).sum() == 0


def test_a_lookup_in_tables_that_are_not_followed_makes_no_sample_stale():
    own, other = make_bag(), make_bag()
    tracker = StalenessTracker(own, Staleness(**QUICK), share=1.0)
    train_bags(tracker, [own], 2 * WINDOW)
    tracker.use_flags_of(2 * WINDOW + LEAD)
    assert tracker.all_stale(own.lookups(IDS), 8).all()
    assert not tracker.all_stale(own.lookups(IDS) + other.lookups(IDS), 8).any()
    with pytest.raises(ValueError, match="8 bags is not of 4 samples"):
        tracker.all_stale(own.lookups(IDS), 4)


def test_rows_have_one_tracker():
    model = stream.make_model()
    tracker = StalenessTracker(model)
    with pytest.raises(ValueError, match="StalenessTracker"):
        StalenessTracker(model)
    tracker.close()
    StalenessTracker(model)


@pytest.mark.parametrize("ends", [True, False])
def test_a_mini_batch_that_is_not_the_next_one_is_refused(ends):
    tracker = StalenessTracker(stream.make_model(), Staleness(window=WINDOW))
    tracker.begin_step(0)
    if ends:  # as in a second epoch that is counted from 0
        tracker.end_step(8)

    with pytest.raises(ValueError, match=r"begin_step: mini-batch \d must come next, got \d"):
        tracker.begin_step(0 if ends else 1)
    tracker.num_steps = 7
    tracker.begin_step(7)
