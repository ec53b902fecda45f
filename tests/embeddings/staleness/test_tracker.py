"""Rows are called stale exactly when their recomputed history says so."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.lookup.fused_lookup import Part
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.staleness.drift import NEEDS_EARLIER
from recsys.embeddings.staleness.sampled_inputs import InputRows
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from tests.embeddings.staleness.test_tracker_state import assert_equal_states
from tests.torch_kernels import BY_NUMBA, BY_TORCH

WINDOW = 50
STEPS = 7 * WINDOW


def drift(measure, rows, updates, rate):
    """Drift of one row from its values at the last three points in time, in plain Python."""
    earlier, before, now = ([float(value) for value in each] for each in rows)
    change = [abs(b - a) for a, b in zip(before, now, strict=True)]
    mean = sum(change) / len(change)
    if measure == "largest_change":
        return max(change)
    if measure == "mean_change":
        return mean
    if measure == "relative_change":
        return mean / (sum(map(abs, before)) / len(before))
    if measure == "change_per_update":
        return mean / updates
    if measure == "change_per_step_size":
        return mean / rate
    first = [b - a for a, b in zip(earlier, before, strict=True)]
    second = [b - a for a, b in zip(before, now, strict=True)]
    signal = max(0.0, sum(a * b for a, b in zip(first, second, strict=True)))
    return signal / (sum(a * a for a in first + second) / 2)


class Oracle:
    """All rows after every step, and from them the stale rows of every window."""

    def __init__(self, settings, share, rate, freezes):
        self.settings, self.share, self.rate, self.freezes = settings, share, rate, freezes
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
        ends = [max(0, (window + 1 - back) * settings.window) for back in (2, 1, 0)]
        judged = set()
        for row, known in self.known.items():
            updates = counts.get(row, 0) * settings.count_every
            is_resting = self.is_resting(known, window)
            is_judged = updates >= settings.min_updates and not (self.freezes and is_resting)
            if settings.measure in NEEDS_EARLIER and known["windows"] < 1:
                is_judged = False
            if is_judged:
                judged.add(row)
                values = [self.rows[end][row] for end in ends]
                found = drift(settings.measure, values, updates, self.rate)
                known["drifts"] = [*known["drifts"], found][-settings.patience :]
            elif not is_resting:
                known["drifts"] = []
            known["windows"] += 1
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
        new = {"drifts": [], "windows": 0, "stale": False, "trial": 0}
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
    oracle = Oracle(settings, share, 0.1, freezes)
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


@pytest.mark.in_ci("True", "mean_change-0.4-False", "signal_to_noise-0.1-False")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize(
    ("measure", "threshold"),
    [
        ("largest_change", 0.7),
        ("mean_change", 0.4),
        ("relative_change", 0.5),
        ("change_per_update", 0.03),
        ("change_per_step_size", 4.0),
        ("signal_to_noise", 0.1),
    ],
)
def test_a_row_is_stale_when_its_recomputed_drifts_say_so(small, measure, threshold, freezes):
    settings = Staleness(
        window=WINDOW, measure=measure, threshold=threshold, min_updates=4, count_every=2
    )
    tracker, oracle, num_stale = run(small, settings, freezes=freezes)
    assert max(num_stale) > 0
    assert len(set(num_stale)) > 2
    assert [each["num_thawed"] for each in tracker.report()["windows"]] == oracle.thawed
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
    {"threshold": None, "measure": "relative_change"},
]


@pytest.mark.in_ci("3", "5", "7")
@pytest.mark.filterwarnings("ignore:staleness. .* have the same level")
@pytest.mark.parametrize("seed", range(len(SETTINGS)))
def test_patience_trials_and_limits_are_as_recomputed(small, seed):
    usual = {"window": WINDOW, "threshold": 0.5, "min_updates": 3, "count_every": 1}
    chosen = Staleness(**usual | SETTINGS[seed])
    tracker, oracle, num_stale = run(small, chosen, seed=seed, share=0.05)
    assert max(num_stale) > 0
    windows = tracker.report()["windows"]
    assert [each["num_thawed"] for each in windows] == oracle.thawed
    for found, expected in zip(windows, oracle.thresholds, strict=True):
        known = None if np.isinf(expected) else pytest.approx(expected, rel=1e-6)
        assert found["threshold"] == known


TRAITS = {"window": WINDOW, "threshold": 0.5, "min_updates": 3, "count_every": 1, "max_rows": 60}


@pytest.mark.in_ci("host-None-False", "file-0.5-True")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("threshold", [0.5, None])
@pytest.mark.parametrize("cold_tier", ["host", "file"])
def test_tiers_change_nothing(small, cold_tier, threshold, freezes, tmp_path):
    settings = Staleness(**TRAITS | {"threshold": threshold, "measure": "largest_change"})
    where = {"cold_tier": cold_tier, "cold_path": tmp_path} if cold_tier == "file" else {}
    results = []
    for kinds in ({}, {"budget": 18_000, **where}):
        model = small.make_model(**kinds)
        tracker = StalenessTracker(model, settings, share=0.1, freezes_rows=freezes)
        losses = small.train(model, tracker, range(6 * WINDOW))
        results.append((losses, tracker.state_dict(), small.rows_of(model)))
        if kinds:
            [tiers] = model.tiers()
            assert tiers.hot.num_bytes + tracker.num_bytes <= 18_000
            assert tiers.residency.counts.num_written_back > 0
    (losses, state, rows), (tiered_losses, tiered_state, tiered_rows) = results
    assert tiered_losses == losses
    assert_equal_states(tiered_state, state)
    assert torch.equal(tiered_rows, rows)
    assert sum(state["windows"][-1]["stale_rows"].values()) > 0


def test_an_observing_tracker_changes_nothing(small):
    for kinds in ({}, {"budget": 18_000}):
        plain, observed = small.make_model(**kinds), small.make_model(**kinds)
        tracker = StalenessTracker(observed, Staleness(**TRAITS), share=0.1)
        losses = small.train(plain, None, range(4 * WINDOW))
        assert small.train(observed, tracker, range(4 * WINDOW)) == losses
        assert torch.equal(small.rows_of(observed), small.rows_of(plain))
        assert sum(tracker.report()["windows"][-1]["stale_rows"].values()) > 0


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
    window = tracker.report()["windows"][-1]
    assert 0 < window["stale_share"] < 0.99


def test_rows_that_do_not_move_at_all_do_not_exceed_the_share(small):
    model = small.make_model(SGD(lr=0.0))
    settings = Staleness(**TRAITS | {"threshold": None, "patience": 1, "max_rows": 2000})
    tracker = StalenessTracker(model, settings, share=0.02)
    with pytest.warns(UserWarning, match=r"sampled inputs have the same level, 0,") as warned:
        small.train(model, tracker, range(6 * WINDOW))
    assert len(warned) == 1
    assert tracker.report()["windows"][-1]["threshold"] is None
    assert max(each["stale_share"] for each in tracker.report()["windows"]) <= 0.03


def test_without_sampled_inputs_no_threshold_is_found(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS | {"threshold": None, "patience": 1}))
    with pytest.warns(UserWarning, match="no inputs were sampled"):
        small.train(model, tracker, range(4 * WINDOW), has_inputs=False)
    assert not listed(small, tracker)


def test_the_report_is_json_and_counts_every_window(small):
    model = small.make_model()
    tracker = StalenessTracker(model, Staleness(**TRAITS))
    small.train(model, tracker, range(5 * WINDOW))
    report = json.loads(json.dumps(tracker.report()))
    assert report == tracker.report()
    assert [each["step"] for each in report["windows"]] == [WINDOW * n for n in range(1, 6)]
    last = report["windows"][-1]
    assert list(last["stale_rows"]) == ["t0", "t1", "t2"]
    assert len(last["drift_by_decile"]) == 10
    assert last["num_judged"] > 10
    assert all(each is not None for each in last["drift_by_decile"])


@pytest.mark.in_ci("cuda", "cpu-kinds0")
@pytest.mark.parametrize("kinds", [{}, {"budget": 18_000}])
def test_torch_kernels_find_the_same_rows(small, kinds, device, monkeypatch):
    settings = Staleness(**TRAITS)
    found = []
    for kernels in (BY_TORCH, BY_NUMBA):
        monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", kernels)
        model = small.make_model(**kinds)
        tracker = StalenessTracker(model, settings, freezes_rows=True)
        small.train(model, tracker, range(6 * WINDOW))
        tracker.use_flags_of(6 * WINDOW + LEAD)
        part = small.part_of(model, small.make_batch(0))
        found.append((listed(small, tracker), tracker.all_stale([part], small.BATCH_SIZE).tolist()))
    assert found[0] == found[1]
    assert found[0][0]


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
            Part(
                bag._places[0][0],
                Lookups.one(0, bag.embedding_dim),
                Bags.from_tensors(
                    ids.flatten(), torch.arange(0, 17, 2), None, batch_size, is_mean=False
                ),
            )
            for bag, ids in zip(model.values(), batch, strict=True)
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
    assert tracker.report()["windows"][-1]["stale_share"] == pytest.approx(share)
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
    """Steps in which each row moves by -`gradient_of` the mini-batch, times its learning rate."""
    for number in range(num_steps):
        gradient = gradient_of(number)
        tracker.begin_step(number, **{name: each(number) for name, each in freezes.items()})
        sum((gradient * bag(IDS)).sum() for bag in bags).backward()
        tracker.end_step(8 * number + 8)


@pytest.mark.in_ci("40", "64")
@pytest.mark.parametrize("window", [40, 64, 200])
def test_a_frozen_row_is_judged_by_a_window_that_it_moves_in_throughout(window):
    bag = make_bag()
    with torch.no_grad():
        bag.weight.zero_()
    # A gradient of 1 moves each row by 1 in each step.
    settings = Staleness(**QUICK | {"window": window}, threshold=1.05 * window, period_step=0)
    tracker = StalenessTracker(bag, settings, freezes_rows=True)
    train_bags(tracker, [bag], 5 * window, lambda number: 1.125 if number >= 3 * window else 1.0)
    windows = tracker.report()["windows"]
    assert [each["num_judged"] for each in windows] == [0, 8, 0, 0, 8]
    assert [each["num_thawed"] for each in windows] == [0, 0, 0, 0, 8]
    assert windows[-1]["drift_by_decile"][0] == pytest.approx(1.125 * window)


@pytest.mark.in_ci("periods0-True", "periods1-False")
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("periods", [{"first_period": 0}, {"period_cut": 0.0}])
def test_a_row_that_passed_a_trial_is_marked_as_stale(periods, freezes):
    """Also with a first period of 0, and after a cut to 0."""
    bag = make_bag()
    settings = Staleness(**QUICK, **periods, period_step=0, threshold=1.0)
    tracker = StalenessTracker(bag, settings, freezes_rows=freezes)
    moves = range(4 * WINDOW, 7 * WINDOW)  # so they thaw
    train_bags(tracker, [bag], 14 * WINDOW, lambda number: float(number in moves))
    assert sum(each["num_thawed"] for each in tracker.report()["windows"]) == 8
    is_marked = []
    for window in range(14, 16):
        tracker.use_flags_of(window * WINDOW - 1)
        is_marked.append(tracker.has_stale_rows)
    assert any(is_marked)


@pytest.mark.parametrize("measure", ["mean_change", "signal_to_noise"])
def test_stale_rows_are_judged_in_windows_in_which_none_is_frozen(measure):
    """As after a guard stopped: nothing is frozen from window 6 on, and all rows move far."""
    bag = make_bag()
    settings = Staleness(**QUICK, measure=measure, threshold=0.5, first_period=20)
    tracker = StalenessTracker(bag, settings, freezes_rows=True)

    def gradient_of(number):
        # Until then, rows move little, and in opposite directions in windows that follow.
        return 1.0 if number >= 6 * WINDOW else 0.001 * (-1) ** (number // WINDOW)

    train_bags(tracker, [bag], 9 * WINDOW, gradient_of, freezes=lambda number: number < 6 * WINDOW)
    windows = tracker.report()["windows"]
    found = [(each["num_judged"], each["stale_rows"]["weight"]) for each in windows[4:]]
    resting = [(0, 8), (0, 8)]
    if measure == "signal_to_noise":  # window 7 is the first that follows one without frozen rows
        resting.append((0, 8))
    thawed = [(8, 0)] * (5 - len(resting))
    assert found == resting + thawed
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
    bags = Bags.from_tensors(
        torch.tensor([1, 2]), torch.tensor([0, 0, 1, 2, 2, 2, 2]), None, 6, is_mean=False
    )
    part = Part(part.group, Lookups.one(0, small.DIM), bags)
    assert tracker.all_stale([part], 3).tolist() == [True, True, False]
    assert tracker.all_stale([], 2).tolist() == [False, False]


def test_a_lookup_in_tables_that_are_not_followed_makes_no_sample_stale():
    own, other = make_bag(), make_bag()
    tracker = StalenessTracker(own, Staleness(**QUICK, threshold=1.0))
    for number in range(2 * WINDOW):
        parts = own.parts(IDS)
        if number >= WINDOW:
            parts += other.parts(IDS)
        tracker.add_inputs(8 * number, parts, 8, torch.arange(8))
        tracker.begin_step(number)
        (0 * own(IDS)).sum().backward()
        tracker.end_step(8 * number + 8)
    tracker.use_flags_of(2 * WINDOW + LEAD)
    assert tracker.all_stale(own.parts(IDS), 8).all()
    assert not tracker.all_stale(parts, 8).any()
    last = tracker.report()["windows"][-1]
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

    assert tracker.all_stale(bag.parts(IDS), 8).all()
    assert not closed.all_stale(bag.parts(IDS), 8).any()


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
    with pytest.raises(ValueError, match=r"a StalenessTracker; .*pipeline\.skipping\.close\(\)"):
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
