"""Rows are called stale exactly when their recomputed history says so."""

import gc
import json
from itertools import pairwise
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.staleness.sampled_inputs import InputRows
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from recsys.embeddings.update.update_rows import TableUpdate
from recsys.errors import ConfigError
from tests.embeddings.staleness.test_tracker_state import assert_equal_states

WINDOW = 50
STEPS = 7 * WINDOW


def drift(before, now):
    """The drift of one row, in plain Python."""
    change = [abs(float(b) - float(a)) for a, b in zip(before, now, strict=True)]
    return sum(change) / len(change)


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
        judged = set()
        for row, known in self.known.items():
            updates = counts.get(row, 0) * settings.count_every
            is_resting = self.is_resting(known, window)
            is_judged = updates >= settings.min_updates and not (self.freezes and is_resting)
            if is_judged:
                judged.add(row)
                found = drift(*(self.rows[end][row] for end in ends))
                known["drifts"] = [*known["drifts"], found][-settings.patience :]
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
            assert not 0 < abs(level - threshold) < 1e-5 * abs(threshold) or not settings.threshold
            was_on_trial = known["stale"] and not self.is_resting(known, window)
            is_stale = level <= threshold
            if was_on_trial and is_stale:
                known["period"] = max(1, known["period"] + settings.period_step)
            if known["stale"] and not is_stale and level < np.inf:
                known["period"] = int(known["period"] * settings.period_cut)
                self.thawed[-1] += 1
            if is_stale and row in judged:
                known["trial"] = window + 1 + known["period"]
            known["stale"] = is_stale
        flagged = {
            row
            for row, known in self.known.items()
            if known["stale"] and known["trial"] > window + 1
        }
        self.flagged.append(flagged)
        stale = [row for row, known in self.known.items() if known["stale"]]
        least = -(-settings.min_updates // settings.count_every)
        others = [row for row in counts if counts[row] >= least and row not in stale]
        others.sort(key=lambda row: (-counts[row], row))
        new = {"drifts": [], "stale": False, "trial": 0}
        self.known = {
            row: self.known.get(row, new | {"period": settings.first_period, "drifts": []})
            for row in [*stale, *others[: settings.max_rows - len(stale)]]
        }

    def is_resting(self, known, window):
        """Whether a row is stale and not at its trial's end; if it freezes, a trial takes 2."""
        end = known["trial"] + (1 if self.freezes else 0)
        return known["stale"] and window < end

    def threshold(self, levels):
        if self.share == 0:
            return -np.inf
        if self.settings.threshold is not None:
            return self.settings.threshold
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


def rows_in(small, features):
    """The distinct rows of a mini-batch, counted over all tables, and those of each sample."""
    firsts = np.cumsum([0, *small.SIZES])
    bounds, values = features.offsets().tolist(), features.values().tolist()
    samples = [set() for _ in range(small.BATCH_SIZE)]
    for bag, (begin, end) in enumerate(pairwise(bounds)):
        table, sample = divmod(bag, small.BATCH_SIZE)
        samples[sample] |= {int(firsts[table]) + value for value in values[begin:end]}
    return set().union(*samples), samples


def run(small, settings, *, share=0.5, freezes=False, seed=0, steps=STEPS, **kinds):
    """Train a resident model beside the oracle; compare after every step."""
    model = small.make_model(**kinds)
    tracker = StalenessTracker(model, settings, share=share, freezes_rows=freezes)
    oracle = Oracle(settings, share, freezes)
    oracle.rows.append(small.rows_of(model))
    num_stale = []
    for number in range(steps):
        features = small.make_batch(number, seed=seed)
        part = small.part_of(model, features)
        looked_up, samples = rows_in(small, features)
        oracle.inputs += samples
        tracker.add_inputs(
            number * small.BATCH_SIZE, [part], small.BATCH_SIZE, torch.arange(small.BATCH_SIZE)
        )
        tracker.use_flags_of(number)
        flagged = oracle.flagged_at(number)
        assert listed(small, tracker) == flagged
        found = tracker.all_stale([part], small.BATCH_SIZE)
        assert found.tolist() == [bool(each) and each <= flagged for each in samples]
        tracker.begin_step(number)
        small.step(model, features, number)
        oracle.updated.append(looked_up - flagged if freezes else looked_up)
        oracle.rows.append(small.rows_of(model))
        tracker.end_step((number + 1) * small.BATCH_SIZE)
        if (number + 1) % settings.window == 0:
            oracle.end_window()
            last = tracker.report()["last_window"]
            assert (last["step"], last["num_thawed"]) == (number + 1, oracle.thawed[-1])
            threshold = oracle.thresholds[-1]
            known = None if np.isinf(threshold) else pytest.approx(threshold, rel=1e-6)
            assert last["threshold"] == known
            num_stale.append(len(oracle.flagged[-1]))
    return tracker, oracle, num_stale


def listed(small, tracker):
    """The rows that are marked as stale, counted over all tables."""
    firsts = np.cumsum([0, *small.SIZES])
    stale = tracker.stale_rows()
    assert list(stale) == ["t0", "t1", "t2"]
    return {
        int(first + row)
        for first, rows in zip(firsts, stale.values(), strict=False)
        for row in rows
    }


@pytest.mark.parametrize("freezes", [False, True])
def test_a_row_is_stale_when_its_recomputed_drifts_say_so(small, freezes):
    settings = Staleness(window=WINDOW, threshold=0.4, min_updates=4, count_every=2)
    _, oracle, num_stale = run(small, settings, freezes=freezes)
    assert max(num_stale) > 0
    assert len(set(num_stale)) > 2
    assert any(oracle.thawed)


SETTINGS = [
    {"patience": 1, "first_period": 0},
    {"first_period": 0, "period_step": 0},
    {"period_step": 0, "period_cut": 0.0},
    {"patience": 3, "first_period": 2, "period_step": 2},
    {"min_updates": 9, "count_every": 1, "period_cut": 1.0},
    {"max_rows": 12, "period_cut": 0.0},
    {"count_every": 4, "window": WINDOW + 3},
    {"threshold": None},
    {"threshold": None, "max_rows": 12, "patience": 1},
]


@pytest.mark.in_ci("3", "5", "7")
@pytest.mark.filterwarnings("ignore:staleness. .* have the same level")
@pytest.mark.parametrize("seed", range(len(SETTINGS)))
def test_patience_trials_and_limits_are_as_recomputed(small, seed):
    usual = {"window": WINDOW, "threshold": 0.5, "min_updates": 3, "count_every": 1}
    chosen = Staleness(**usual | SETTINGS[seed])
    _, _, num_stale = run(small, chosen, seed=seed, share=0.05)
    assert max(num_stale) > 0


TRAITS = {"window": WINDOW, "threshold": 0.5, "min_updates": 3, "count_every": 1, "max_rows": 60}


@pytest.mark.in_ci("host-None-False", "file-0.5-True")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("threshold", [0.5, None])
@pytest.mark.parametrize("cold_tier", ["host", "file"])
def test_tiers_change_nothing(small, cold_tier, threshold, freezes, tmp_path):
    settings = Staleness(**TRAITS | {"threshold": threshold})
    where = {"cold_tier": cold_tier, "cold_path": tmp_path} if cold_tier == "file" else {}
    results = []
    for kinds in ({}, {"budget": 18_000, **where}):
        model = small.make_model(**kinds)
        tracker = StalenessTracker(model, settings, share=0.1, freezes_rows=freezes)
        losses = small.train(model, tracker, range(6 * WINDOW))
        results.append((losses, tracker.state_dict(), small.rows_of(model)))
        if kinds:
            assert all(group.fetcher.counts.written > 0 for group in model.groups())
    (losses, state, rows), (tiered_losses, tiered_state, tiered_rows) = results
    assert tiered_losses == losses
    assert_equal_states(tiered_state, state)
    assert torch.equal(tiered_rows, rows)
    assert sum(state["last_window"]["stale_rows"].values()) > 0


def test_an_observing_tracker_changes_nothing(small):
    for kinds in ({}, {"budget": 18_000}):
        plain, observed = small.make_model(**kinds), small.make_model(**kinds)
        tracker = StalenessTracker(observed, Staleness(**TRAITS), share=0.1)
        losses = small.train(plain, None, range(4 * WINDOW))
        assert small.train(observed, tracker, range(4 * WINDOW)) == losses
        assert torch.equal(small.rows_of(observed), small.rows_of(plain))
        assert sum(tracker.report()["last_window"]["stale_rows"].values()) > 0


def test_flags_are_those_of_the_number_that_is_asked_for(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS), share=0.1)
    seen = {}
    for number in range(6 * WINDOW):
        for ahead in (number, number + LEAD, number + 5, number):
            tracker.use_flags_of(ahead)
            found = listed(small, tracker)
            assert seen.setdefault(ahead, found) == found
        small.train(model, tracker, [number])
    assert len({frozenset(each) for each in seen.values()}) > 3


def test_with_share_0_no_row_is_stale(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS))
    small.train(model, tracker, range(4 * WINDOW))
    tracker.use_flags_of(4 * WINDOW)
    assert listed(small, tracker)
    tracker.share = 0
    small.train(model, tracker, range(4 * WINDOW, 5 * WINDOW + LEAD))
    tracker.use_flags_of(5 * WINDOW + LEAD)
    assert not listed(small, tracker)
    assert tracker.threshold is None


def test_a_share_that_cannot_be_reached_is_named_once(small):
    model = small.make_model()
    settings = Staleness(**TRAITS | {"threshold": None, "patience": 1})
    tracker = StalenessTracker(model, settings, share=0.99)
    with pytest.warns(UserWarning, match=r"share of 0\.99 cannot be reached: only \d+ of 2000"):
        small.train(model, tracker, range(4 * WINDOW))
    small.train(model, tracker, range(4 * WINDOW, 6 * WINDOW))
    window = tracker.report()["last_window"]
    assert 0 < window["stale_share"] < 0.99


def test_rows_that_do_not_move_at_all_do_not_exceed_the_share(small):
    model = small.make_model(SGD(lr=0.0))
    settings = Staleness(**TRAITS | {"threshold": None, "patience": 1, "max_rows": 2000})
    tracker = StalenessTracker(model, settings, share=0.02)
    with pytest.warns(UserWarning, match=r"sampled inputs have the same level, 0,") as warned:
        small.train(model, tracker, range(6 * WINDOW))
    assert len(warned) == 1
    assert tracker.report()["last_window"]["threshold"] is None
    assert tracker.report()["last_window"]["stale_share"] <= 0.03


def test_without_sampled_inputs_no_threshold_is_found(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS | {"threshold": None, "patience": 1}))
    with pytest.warns(UserWarning, match="no inputs were sampled"):
        small.train(model, tracker, range(4 * WINDOW), has_inputs=False)
    assert not listed(small, tracker)


def test_the_report_is_json_and_tells_of_the_last_window(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS))
    small.train(model, tracker, range(5 * WINDOW))
    report = json.loads(json.dumps(tracker.report()))
    assert report == tracker.report()
    last = report["last_window"]
    assert last["step"] == 5 * WINDOW
    assert list(last["stale_rows"]) == ["t0", "t1", "t2"]
    assert last["num_judged"] > 10


def test_an_input_is_stale_if_its_rows_are_in_every_group():
    # Bags of two dims, so of two groups, which have no names of their own.
    model = torch.nn.ModuleDict(
        {
            name: HotColdEmbeddingBag(num_rows, dim, mode="sum", optimizer=SGD(lr=0.1))
            for name, num_rows, dim in (("left", 300, 4), ("right", 200, 8))
        }
    )
    settings = Staleness(**TRAITS | {"threshold": None, "patience": 1, "first_period": 9})
    tracker = StalenessTracker(model, settings, share=0.2)
    generator = torch.Generator().manual_seed(0)
    batch_size, inputs = 8, []

    def ids():
        return (torch.rand(batch_size, 2, generator=generator) ** 4 * 200).long()

    def parts_of(batch):
        return [
            part
            for bag, ids in zip(model.values(), batch, strict=True)
            for part in bag.lookups(ids)
        ]

    for number in range(5 * WINDOW):
        batch = [ids(), ids()]
        inputs += zip(batch[0].tolist(), batch[1].tolist(), strict=True)
        samples = torch.arange(batch_size)
        tracker.add_inputs(number * batch_size, parts_of(batch), batch_size, samples)
        tracker.begin_step(number)
        for bag, of_bag in zip(model.values(), batch, strict=True):
            (bag(of_bag) * torch.randn(batch_size, 1, generator=generator)).sum().backward()
        tracker.end_step((number + 1) * batch_size)
    tracker.use_flags_of(5 * WINDOW + LEAD)

    stale = {name: set(rows.tolist()) for name, rows in tracker.stale_rows().items()}
    assert list(stale) == ["left", "right"]
    of_inputs = [set(a) <= stale["left"] and set(b) <= stale["right"] for a, b in inputs]
    share = sum(of_inputs) / len(inputs)
    assert tracker.report()["last_window"]["stale_share"] == pytest.approx(share)
    assert 0.1 < share < 0.3
    batch = [ids(), ids()]
    expected = [
        set(a) <= stale["left"] and set(b) <= stale["right"]
        for a, b in zip(batch[0].tolist(), batch[1].tolist(), strict=True)
    ]
    assert tracker.all_stale(parts_of(batch), batch_size).tolist() == expected


def make_bag():
    return HotColdEmbeddingBag(8, 4, mode="sum", optimizer=SGD(lr=1.0))


IDS = torch.arange(8)[:, None]
QUICK = {"window": WINDOW, "min_updates": 1, "count_every": 1, "patience": 1}


def train_bags(tracker, bags, num_steps, gradient_of=lambda _: 0.0, **freezes):
    """Steps in which each row moves by -`gradient_of` the mini-batch, times its learning rate.

    Returns what is reported at the end of each window.
    """
    windows = []
    for number in range(num_steps):
        gradient = gradient_of(number)
        tracker.begin_step(number, **{name: each(number) for name, each in freezes.items()})
        sum((gradient * bag(IDS)).sum() for bag in bags).backward()
        tracker.end_step(8 * number + 8)
        if (number + 1) % tracker.staleness.window == 0:
            windows.append(tracker.report()["last_window"])
    return windows


@pytest.mark.in_ci("40", "64")
@pytest.mark.parametrize("window", [40, 64, 200])
def test_a_frozen_row_is_judged_by_a_window_that_it_moves_in_throughout(window):
    bag = make_bag()
    with torch.no_grad():
        bag.weight.zero_()
    # A gradient of 1 moves each row by 1 in each step.
    settings = Staleness(**QUICK | {"window": window}, threshold=1.05 * window, period_step=0)
    tracker = StalenessTracker(bag, settings, freezes_rows=True)
    windows = train_bags(
        tracker, [bag], 5 * window, lambda number: 1.125 if number >= 3 * window else 1.0
    )
    assert [each["num_judged"] for each in windows] == [0, 8, 0, 0, 8]
    assert [each["num_thawed"] for each in windows] == [0, 0, 0, 0, 8]


@pytest.mark.in_ci("periods0-True", "periods1-False")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("periods", [{"first_period": 0}, {"period_cut": 0.0}])
def test_a_row_that_passed_a_trial_is_marked_as_stale(periods, freezes):
    """Also with a first period of 0, and after a cut to 0."""
    bag = make_bag()
    settings = Staleness(**QUICK, **periods, period_step=0, threshold=1.0)
    tracker = StalenessTracker(bag, settings, freezes_rows=freezes)
    moves = range(4 * WINDOW, 7 * WINDOW)  # so they thaw
    windows = train_bags(tracker, [bag], 14 * WINDOW, lambda number: float(number in moves))
    assert sum(each["num_thawed"] for each in windows) == 8
    is_marked = []
    for window in range(14, 16):
        tracker.use_flags_of(window * WINDOW - 1)
        is_marked.append(tracker.has_stale_rows)
    assert any(is_marked)


def test_stale_rows_are_judged_in_windows_in_which_none_is_frozen():
    """As after a guard stopped: nothing is frozen from window 6 on, and all rows move far."""
    bag = make_bag()
    settings = Staleness(**QUICK, threshold=0.5, first_period=20)
    tracker = StalenessTracker(bag, settings, freezes_rows=True)

    windows = train_bags(
        tracker,
        [bag],
        9 * WINDOW,
        lambda number: 1.0 if number >= 6 * WINDOW else 0.001,
        freezes=lambda number: number < 6 * WINDOW,
    )
    found = [(each["num_judged"], each["stale_rows"]["weight"]) for each in windows[4:]]
    assert found == [(0, 8)] * 2 + [(8, 0)] * 3
    tracker.use_flags_of(9 * WINDOW + LEAD)
    assert not tracker.has_stale_rows


def test_a_step_that_raised_leaves_nothing_on(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(window=WINDOW, count_every=1), freezes_rows=True)
    [followed] = tracker._followed
    followed.marks.set_stale(np.arange(sum(small.SIZES)), True)
    before = small.rows_of(model)
    tracker.begin_step(0)
    tracker.cancel_step()
    small.step(model, small.make_batch(0), 0)
    assert not torch.equal(small.rows_of(model), before)
    assert not len(followed.marks.counted()[0])


def test_a_sample_without_rows_is_not_stale(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(window=WINDOW), share=0.5)
    [followed] = tracker._followed
    followed.marks.set_stale(np.arange(sum(small.SIZES)), True)
    features = small.make_batch(0)
    lengths = features.offsets().diff().view(len(small.SIZES), -1)
    assert (lengths.sum(0) > 0).all()
    keep = torch.repeat_interleave(
        torch.arange(lengths.numel()) % small.BATCH_SIZE != 3, lengths.flatten()
    )
    lengths[:, 3] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    without = JaggedIds(keys=features.keys(), values=features.values()[keep], offsets=offsets)
    part = small.part_of(model, without)
    expected = [number != 3 for number in range(small.BATCH_SIZE)]
    assert tracker.all_stale([part], small.BATCH_SIZE).tolist() == expected
    # With two bags for each sample, one of them may be empty.
    bag = make_bag()
    tracker = StalenessTracker(bag, Staleness(window=WINDOW))
    tracker._followed[0].marks.set_stale(np.arange(8), True)
    [part] = bag.lookups(torch.tensor([1, 2]), torch.tensor([0, 0, 1, 2, 2, 2]))
    assert tracker.all_stale([part], 3).tolist() == [True, True, False]
    assert tracker.all_stale([], 2).tolist() == [False, False]


def test_a_lookup_in_tables_that_are_not_followed_makes_no_sample_stale():
    own, other = make_bag(), make_bag()
    tracker = StalenessTracker(own, Staleness(**QUICK, threshold=1.0))
    for number in range(2 * WINDOW):
        parts = own.lookups(IDS)
        if number >= WINDOW:
            parts += other.lookups(IDS)
        tracker.add_inputs(8 * number, parts, 8, torch.arange(8))
        tracker.begin_step(number)
        (0 * own(IDS)).sum().backward()
        tracker.end_step(8 * number + 8)
    tracker.use_flags_of(2 * WINDOW + LEAD)
    assert tracker.all_stale(own.lookups(IDS), 8).all()
    assert not tracker.all_stale(parts, 8).any()
    last = tracker.report()["last_window"]
    assert (last["num_inputs"], last["stale_share"]) == (16 * WINDOW, 0.5)


def test_all_of_several_modules_are_followed():
    bags = [make_bag(), make_bag()]
    tracker = StalenessTracker(bags, Staleness(**QUICK, threshold=1.0))
    train_bags(tracker, bags, 2 * WINDOW)
    tracker.use_flags_of(2 * WINDOW + LEAD)

    stale = {name: rows.tolist() for name, rows in tracker.stale_rows().items()}
    assert stale == {"0.weight": list(range(8)), "1.weight": list(range(8))}


def test_a_closed_tracker_says_nothing_of_the_rows_of_the_next_one():
    bag, settings = make_bag(), Staleness(**QUICK, threshold=1.0)
    closed = StalenessTracker(bag, settings)
    closed.close()
    tracker = StalenessTracker(bag, settings)
    train_bags(tracker, [bag], 2 * WINDOW)
    tracker.use_flags_of(2 * WINDOW + LEAD)

    assert tracker.all_stale(bag.lookups(IDS), 8).all()
    assert not closed.all_stale(bag.lookups(IDS), 8).any()


def test_the_level_of_an_input_without_rows_is_infinite(small):
    tracker = StalenessTracker(small.make_model(), Staleness(window=WINDOW), share=1.0)
    inputs = [InputRows(np.array([0, 1]), np.array([0, 1, 1, 2]))]
    [followed] = tracker._followed
    followed.history = followed._memory[:2]
    followed.history["row"] = [0, 1]
    followed.levels = np.array([0.0, 2.0])
    assert tracker._levels_of(inputs).tolist() == [0.0, np.inf, 2.0]


def test_rows_of_modules_that_are_not_given_are_not_frozen():
    model = torch.nn.ModuleDict(
        {name: torch.nn.EmbeddingBag(9, 4, mode="sum", sparse=True) for name in ("user", "item")}
    )
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), always=True)
    with pytest.raises(ValueError, match=r"would freeze rows of tables \['user'\], too"):
        StalenessTracker(model["item"], freezes_rows=True)
    StalenessTracker(model["item"]).close()
    StalenessTracker([model["item"], model["user"]], freezes_rows=True).close()


def test_rows_have_one_tracker(small):
    model = small.make_model()
    tracker = StalenessTracker(model)
    with pytest.raises(ValueError, match="StalenessTracker"):
        StalenessTracker(model)
    tracker.close()
    tracker.close()
    StalenessTracker(model)


@pytest.mark.parametrize("ends", [True, False])
def test_a_mini_batch_that_is_not_the_next_one_is_refused(small, ends):
    tracker = StalenessTracker(small.make_model(), Staleness(window=WINDOW))
    tracker.begin_step(0)
    if ends:  # as in a second epoch that is counted from 0
        tracker.end_step(8)

    with pytest.raises(ValueError, match=r"begin_step: mini-batch \d must come next, got \d"):
        tracker.begin_step(0 if ends else 1)
    tracker.num_steps = 7
    tracker.begin_step(7)


NOT_OF_TRACKERS = (TableGroup, TableUpdate, type, ModuleType, FunctionType)


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


def test_the_bytes_reported_are_those_allocated(small):
    model = small.make_model()
    traits = {"window": 40, "min_updates": 1, "count_every": 1, "max_rows": 30, "patience": 1}
    settings = Staleness(**traits, threshold=1e9)
    tracker = StalenessTracker(model, settings, share=1.0)
    for number in range(200):
        small.train(model, tracker, [number], has_inputs=False)
        assert arrays_in(tracker) <= tracker.num_bytes
    # The most that flags can take: two lists of all rows that are followed.
    [flags, *_] = tracker._flag_sets._sets
    tracker._flag_sets._sets = [flags._replace(rows=[np.arange(30)]) for _ in range(2)]
    assert arrays_in(tracker) == tracker.num_bytes
    assert tracker.report()["memory_bytes"] == tracker.num_bytes


def test_sampled_inputs_do_not_pile_up_within_a_window(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(window=1000))
    small.train(model, tracker, range(500))
    assert sum(len(each.indices) for each in tracker._inputs._chunks) < 4096 + 2 * small.BATCH_SIZE


def test_a_tracker_that_was_deleted_lets_go_of_the_rows(small):
    model = small.make_model()
    tracker = StalenessTracker(model)
    del tracker
    StalenessTracker(model)
    for wrong, error in ((2, ConfigError), ("much", ConfigError)):
        with pytest.raises(error, match="share"):
            StalenessTracker(model, share=wrong)
