"""The guard on synthetic streams: logits of a model that is right, and labels drawn from them."""

import copy
import json
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from recsys.embeddings.staleness.settings import LEAD
from recsys.pipeline.skip.guard import Guard, QualityGuard
from recsys.pipeline.skip.window_quality import MEASURES, WindowQuality

FEW = Guard(every=100, steps=50)


@dataclass
class Stream:
    """Samples whose labels have the probabilities that the model predicts, unless harmed.

    A fifth of the samples are of the skipped kind; these are easier, and have more positive labels.
    """

    batch_size: int = 2048
    seed: int = 0
    noise: float = 0.0  # standard deviation added to the logits of the skipped kind
    spread: float = 1.2  # standard deviation of the logits: the smaller, the harder
    is_flipped: bool = False  # labels of the skipped kind

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size, random = self.batch_size, self._random
        is_stale = random.random(size) < 0.2
        logits = random.normal(np.where(is_stale, -0.6, -1.5), self.spread)
        labels = random.random(size) < 1 / (1 + np.exp(-logits))
        if self.is_flipped:
            labels ^= is_stale
        if self.noise:
            logits += random.normal(0, self.noise, size) * is_stale
        return torch.from_numpy(logits), torch.from_numpy(labels), torch.from_numpy(is_stale)

    def window(self, guard: QualityGuard, index: int) -> bool:
        """Let a guard see window `index`; whether it decided something."""
        first = index * guard.guard.every
        changes = [guard.add(first + step, *self.step()) for step in range(guard.guard.steps)]
        assert not any(changes[:-1])
        return changes[-1]


@contextmanager
def guard_warns():
    """Within the block the guard may warn, and at least once it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert caught
    assert all(str(each.message).startswith("guard: from mini-batch ") for each in caught)


@pytest.mark.in_ci("128")
@pytest.mark.parametrize("batch_size", [128, 2048])
def test_calm_streams_change_nothing(batch_size):
    guard, stream = QualityGuard(FEW), Stream(batch_size)

    assert not any(stream.window(guard, index) for index in range(40))
    assert guard.decisions == []
    assert guard.report()["num_windows"] == 40


def test_difficulty_that_changes_slowly_changes_nothing():
    guard, stream = QualityGuard(FEW), Stream(512)

    for index in range(60):  # in all, normalized entropy rises from 0.79 to 0.86
        stream.spread = 1.2 - 0.3 * index / 60
        assert not stream.window(guard, index)


@pytest.mark.parametrize("batch_size", [128, 2048])
def test_flipped_labels_stop_skipping_after_the_first_window(batch_size):
    guard, stream = QualityGuard(FEW), Stream(batch_size)
    for index in range(4):
        stream.window(guard, index)

    stream.is_flipped = True
    with pytest.warns(UserWarning, match=r"from mini-batch 481 on, the run stops skipping: "):
        assert stream.window(guard, 4)

    (decision,) = guard.decisions
    assert decision["step"] == 449
    assert (decision["action"], decision["factor"]) == ("stopped", 0.0)
    assert {"samples": "skipped", "measure": "logloss"}.items() <= decision["reasons"][-3].items()
    assert guard.factor_of(449 + LEAD - 1) == 1.0
    assert guard.factor_of(449 + LEAD) == 0.0


def test_a_mild_harm_lowers_skipping_within_a_few_windows():
    guard, stream = QualityGuard(FEW), Stream()
    for index in range(6):
        stream.window(guard, index)
    before = guard.report()["estimates"]["skipped"]["logloss"]

    stream.noise = 0.45  # the logloss of the skipped kind rises by 3 %
    with pytest.warns(
        UserWarning, match=r"skips nothing until .* 50% of the share .* of skipped samples"
    ):
        index = next(index for index in range(6, 12) if stream.window(guard, index))

    assert index <= 9
    (reason, *_) = guard.decisions[0]["reasons"]
    assert reason["samples"] == "skipped"
    assert reason["value"] < 1.08 * before  # mild indeed
    assert guard.decisions[0]["factor"] == 0.5


def lower(guard, stream):
    """Windows 0 to 4, the last one with a mild harm."""
    for index in range(4):
        stream.window(guard, index)
    stream.noise = 0.55
    with guard_warns():
        assert stream.window(guard, 4)
    stream.noise = 0.0


def test_nothing_is_skipped_until_the_window_after_a_mild_harm_has_ended():
    guard = QualityGuard(FEW)
    lower(guard, Stream())

    found = [guard.factor_of(number) for number in (480, 481, 580, 581)]
    assert found == [1.0, 0.0, 0.0, 0.5]
    assert guard.tracked_factor == 0.5


def test_a_harm_that_comes_back_with_skipping_stops_it():
    guard, stream = QualityGuard(FEW), Stream()
    lower(guard, stream)

    stream.window(guard, 5)  # nothing was skipped before it
    stream.noise = 0.55
    with guard_warns():
        stream.window(guard, 6)

    assert [each["action"] for each in guard.decisions] == ["lowered", "stopped"]
    assert guard.factor_of(10_000) == 0.0


def test_a_change_that_is_not_due_to_skipping_lowers_it_once():
    guard, stream = QualityGuard(FEW), Stream()
    lower(guard, stream)

    stream.noise = 0.55  # also without skipping, and from now on
    for index in range(5, 12):
        stream.window(guard, index)

    assert [each["factor"] for each in guard.decisions] == [0.5, 0.75, 1.0]


def test_skipping_recovers_step_by_step_after_calm_windows():
    guard, stream = QualityGuard(FEW), Stream(512)
    for index in range(4):
        stream.window(guard, index)
    stream.is_flipped = True
    with guard_warns():
        stream.window(guard, 4)

    stream.is_flipped = False  # the model has learned the new labels
    found = [stream.window(guard, index) for index in range(5, 15)]

    assert found == [False, True] * 4 + [False, False]
    assert [each["factor"] for each in guard.decisions] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_what_a_window_shows_while_nothing_is_skipped_is_not_held_against_skipping():
    guard, stream = QualityGuard(FEW), Stream(512)
    for index in range(3):
        for step in range(50):
            logits, labels, is_stale = stream.step()
            guard.add(100 * index + step, logits, labels, torch.zeros_like(is_stale))
        stream.spread -= 0.5  # much harder data, but no sample was skipped

    assert guard.decisions == []


def test_a_window_that_is_clearly_better_replaces_the_estimate():
    guard, stream = QualityGuard(FEW), Stream(noise=2.0)
    stream.window(guard, 0)

    stream.noise = 0.0
    stream.window(guard, 1)
    stream.noise = 0.7  # bad, but better than the first window

    with guard_warns():
        assert any(stream.window(guard, index) for index in (2, 3))


def test_windows_open_at_the_start_of_every_period():
    guard = QualityGuard(Guard(every=200, steps=20))

    assert [number for number in range(450) if guard.is_open(number)] == [
        *range(20),
        *range(200, 220),
        *range(400, 420),
    ]


def test_a_state_taken_inside_a_window_continues_equally():
    stream = Stream(512)
    steps = [(100 * index + step, *stream.step()) for index in range(8) for step in range(50)]
    flipped = [
        (number, logits, labels ^ (is_stale & (number >= 400)), is_stale)
        for number, logits, labels, is_stale in steps
    ]
    expected, killed = QualityGuard(FEW), QualityGuard(FEW)

    with guard_warns():
        for step in flipped:
            expected.add(*step)
    with guard_warns():
        for step in flipped[:230]:
            killed.add(*step)
        state = json.loads(json.dumps(killed.state_dict()))
        resumed = QualityGuard(FEW)
        resumed.load_state_dict(state)
        for step in flipped[230:]:
            resumed.add(*step)

    assert expected.decisions
    assert resumed.decisions == expected.decisions
    assert resumed.state_dict() == expected.state_dict()


def test_the_state_is_a_copy():
    guard, stream = QualityGuard(FEW), Stream(512)
    state = guard.state_dict()
    expected = copy.deepcopy(state)

    stream.window(guard, 0)

    assert state == expected


def test_a_step_with_infinite_predictions_is_left_out():
    guard, logits = QualityGuard(FEW), torch.tensor([[0.0], [float("inf")]])

    guard.add(0, logits, torch.tensor([0.0, 1.0]), torch.tensor([True, True]))

    assert guard.state_dict() == {**QualityGuard(FEW).state_dict(), "next_step": 1}


@pytest.mark.in_ci("True")
@pytest.mark.parametrize("of_a_kind", [False, True])
def test_measures_and_their_errors_are_those_of_many_draws(of_a_kind):
    random = np.random.default_rng(3)
    found = []
    for _ in range(400):
        quality = WindowQuality(of_a_kind=of_a_kind)
        for _ in range(20):
            logits = random.normal(-1, 1, 200)
            quality.add(logits, (random.random(200) < 1 / (1 + np.exp(-logits))).astype(float))
        found.append(quality.result())

    assert list(found[0]) == list(MEASURES)
    for measure in MEASURES:
        values = np.array([each[measure].value for each in found])
        scale = 1 if measure == "auc" else values.mean()
        error = np.mean([each[measure].error for each in found])
        assert error == pytest.approx(values.std() / scale, rel=0.15)  # 4 errors of 400 draws
        if of_a_kind:  # right predictions keep what they promise
            assert values.mean() == pytest.approx(1, abs=4 * values.std() / 20)


LOGITS, LABELS = np.linspace(-3, 2, 60), (np.arange(60) % 3 == 0).astype(float)


@pytest.mark.parametrize("of_a_kind", [False, True])
def test_measures_of_one_window_follow_their_formulas(of_a_kind):
    logits, labels = LOGITS.copy(), LABELS
    logits[7] = logits[8] = logits[9]  # ties
    quality = WindowQuality(of_a_kind=of_a_kind)
    for _ in range(10):
        quality.add(logits, labels)
    found = quality.result()

    p = 1 / (1 + np.exp(-logits))
    logloss = -np.mean(np.log(np.where(labels == 1, p, 1 - p)))
    entropy_of = lambda x: -x * np.log(x) - (1 - x) * np.log(1 - x)  # noqa: E731
    wins = (p[:, None] > p) + 0.5 * (p[:, None] == p)
    area = wins[np.ix_(labels == 1, labels == 0)].mean()
    expected = logloss / entropy_of(1 / 3)
    if of_a_kind:
        chances = p[:, None] * (1 - p)
        np.fill_diagonal(chances, 0)
        area += 1 - (wins * chances).sum() / chances.sum()
        expected = logloss / entropy_of(p).mean()
    assert found["logloss"].value == pytest.approx(expected)
    assert found["auc"].value == pytest.approx(area)
    assert found["auc"].error == pytest.approx(0, abs=1e-7)  # every step has the same
    assert found["calibration"].value == pytest.approx(p.sum() / labels.sum())


def test_too_few_labels_give_no_measure():
    quality = WindowQuality(of_a_kind=False)
    for _ in range(19):
        quality.add(np.linspace(-1, 1, 9), np.arange(9) == 4)
    assert quality.result() == {}

    quality.add(np.linspace(-1, 1, 9), np.arange(9) == 4)
    assert set(quality.result()) == set(MEASURES)


def test_another_choice_of_samples_of_the_skipped_kind_changes_nothing():
    guard, stream = QualityGuard(FEW), Stream()

    for index in range(8):
        for step in range(50):
            logits, labels, _ = stream.step()
            # The kind: samples with high predictions, then with low ones, and so on.
            is_stale = logits > -0.5 if index % 2 else logits < -1.5
            guard.add(100 * index + step, logits, labels, is_stale)

    assert guard.decisions == []
