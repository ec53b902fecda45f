"""The guard on synthetic streams: logits of a model that is right, and labels drawn from them."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from recsys.embeddings.staleness.settings import LEAD
from recsys.pipeline import Guard
from recsys.pipeline.skip.guard import QualityGuard, _measures, _sums_of

FEW = Guard(every=100, steps=50)


@dataclass
class Stream:
    """Samples whose labels have the probabilities that the model predicts, unless harmed."""

    batch_size: int = 2048
    noise: float = 0.0  # standard deviation added to the logits
    spread: float = 1.2  # standard deviation of the logits: the smaller, the harder
    is_flipped: bool = False  # labels of a third of the samples
    logit: float | None = None  # every prediction of a model that has collapsed

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        size, random = self.batch_size, self._random
        logits = random.normal(-1.2, self.spread, size)
        labels = random.random(size) < 1 / (1 + np.exp(-logits))
        if self.is_flipped:
            labels ^= random.random(size) < 1 / 3
        logits += random.normal(0, self.noise, size)
        if self.logit is not None:
            logits[:] = self.logit
        return torch.from_numpy(logits), torch.from_numpy(labels)

    def window(self, guard: QualityGuard, index: int) -> bool:
        """Let a guard see window `index`; whether it decided something."""
        before = len(guard.decisions)
        for step in range(guard.guard.steps):
            assert len(guard.decisions) == before
            guard.add(index * guard.guard.every + step, *self.step())
        return len(guard.decisions) > before


pytestmark = pytest.mark.filterwarnings("ignore:guard")


def test_calm_streams_change_nothing():
    guard, stream = QualityGuard(FEW), Stream(128)

    assert not any(stream.window(guard, index) for index in range(40))
    assert guard.decisions == []
    assert guard.report()["num_windows"] == 40


@pytest.mark.parametrize("batch_size", [128, 2048])
def test_flipped_labels_stop_skipping_after_the_first_window(batch_size):
    guard, stream = QualityGuard(FEW), Stream(batch_size)
    for index in range(4):
        stream.window(guard, index)

    stream.is_flipped = True
    with pytest.warns(UserWarning, match=r"mini-batch 481 on, the run stops skipping: logloss"):
        assert stream.window(guard, 4)

    (decision,) = guard.decisions
    assert decision["step"] == 449
    assert (decision["action"], decision["factor"]) == ("stopped", 0.0)
    assert guard.factor_of(449 + LEAD - 1) == 1.0
    assert guard.factor_of(449 + LEAD) == 0.0
    stream.is_flipped = False
    assert not any(stream.window(guard, index) for index in range(5, 15))  # for good


def lower(guard, stream):
    """Windows 0 to 4, the last one with a mild harm."""
    for index in range(4):
        stream.window(guard, index)
    stream.noise = 0.55
    with pytest.warns(UserWarning, match=r"skips nothing until .* then 50% of the share"):
        assert stream.window(guard, 4)
    stream.noise = 0.0


def test_a_mild_harm_halves_the_share_after_a_pause_until_calm_windows_have_passed():
    guard, stream = QualityGuard(FEW), Stream()
    lower(guard, stream)

    assert guard.factor == 0.5
    found = [guard.factor_of(number) for number in (480, 481, 580, 581, 610)]
    assert found == [1.0, 0.0, 0.0, 0.5, 0.0]  # 610 is in a window
    assert [stream.window(guard, index) for index in (5, 6, 7, 8)] == [False, False, True, False]
    assert [each["factor"] for each in guard.decisions] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("noise", "action", "factor"), [(0.0, "stopped", 0.0), (0.55, "lowered", 0.5)]
)
def test_a_harm_that_comes_back_with_skipping_stops_it(noise, action, factor):
    guard, stream = QualityGuard(FEW), Stream()
    lower(guard, stream)

    stream.noise = noise
    stream.window(guard, 5)  # nothing was skipped before it: the estimate starts again here
    stream.noise = 0.55
    stream.window(guard, 6)

    assert guard.decisions[-1]["action"] == action
    assert guard.factor_of(10_080) == factor


@pytest.mark.parametrize("logit", [-40.0, -1e200, 40.0, 1e200])
def test_a_model_that_collapses_stops_skipping(logit):
    guard, stream = QualityGuard(FEW), Stream(512)
    stream.window(guard, 0)
    stream.window(guard, 1)
    stream.logit = logit

    assert stream.window(guard, 2)
    assert guard.decisions[-1]["action"] == "stopped"
    json.dumps(guard.report(), allow_nan=False)


def test_a_state_taken_inside_a_window_continues_equally():
    stream = Stream(512)
    steps = []
    for index in range(8):
        stream.noise = 0.7 * (index >= 4)
        steps += [(100 * index + step, *stream.step()) for step in range(50)]
    expected, killed = QualityGuard(FEW), QualityGuard(FEW)

    for step in steps:
        expected.add(*step)
    for step in steps[:230]:
        killed.add(*step)
    state = killed.state_dict()
    saved = json.dumps(state)
    resumed = QualityGuard(FEW)
    resumed.load_state_dict(json.loads(saved))
    for step in steps[230:]:
        resumed.add(*step)

    assert expected.decisions
    assert resumed.state_dict() == expected.state_dict()
    assert json.dumps(state) == saved  # it is a copy


def test_measures_follow_their_formulas_and_their_errors_are_those_of_many_draws():
    random = np.random.default_rng(3)
    found = []
    for _ in range(400):
        logits = random.normal(-1, 1, 4000)
        labels = (random.random(4000) < 1 / (1 + np.exp(-logits))).astype(float)
        found.append(_measures(_sums_of(logits, labels).tolist()))

    p, rate = 1 / (1 + np.exp(-logits)), labels.mean()
    logloss = -np.mean(np.log(np.where(labels == 1, p, 1 - p)))
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert np.exp(found[-1]["logloss"][0]) == pytest.approx(logloss / entropy)
    assert np.exp(found[-1]["calibration"][0]) == pytest.approx(p.mean() / rate)
    for measure in ("logloss", "calibration"):
        values, errors = np.array([each[measure] for each in found]).T
        assert errors.mean() == pytest.approx(values.std(), rel=0.15)  # 4 errors of 400 draws
