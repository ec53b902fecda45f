"""Windows of the guard that are unlike others: of a collapsed model, or with steps that failed."""

import json

import numpy as np
import pytest
import torch

from recsys.pipeline.skip.guard import Guard, QualityGuard
from recsys.pipeline.skip.window_quality import WindowQuality

GUARD = Guard(every=60, steps=10)


class Stream:
    """Samples whose labels have the predicted probabilities; a third is of the skipped kind."""

    def __init__(self, guard):
        self._guard, self._random = guard, np.random.default_rng(0)

    def step(self, number, logit=None, *, size=512):
        logits = self._random.normal(-1, 1, size)
        labels = self._random.random(size) < 1 / (1 + np.exp(-logits))
        if logit is not None:
            logits[:] = logit
        is_stale = torch.arange(size) % 3 == 0
        return self._guard.add(number, torch.from_numpy(logits), torch.from_numpy(labels), is_stale)

    def window(self, index, logit=None, *, size=512):
        first = index * GUARD.every
        return [self.step(first + step, logit, size=size) for step in range(GUARD.steps)][-1]


@pytest.mark.filterwarnings("ignore:guard")
@pytest.mark.parametrize("logit", [-40.0, -1e4, -1e200, 40.0, 1e4, 1e200])
def test_a_model_that_collapses_stops_skipping(logit):
    guard = QualityGuard(GUARD)
    stream = Stream(guard)
    stream.window(0)
    stream.window(1)

    assert stream.window(2, logit)
    assert guard.decisions[-1]["action"] == "stopped"
    for index in range(3, 6):
        stream.window(index, logit)
    resumed = QualityGuard(GUARD)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.state_dict() == guard.state_dict()


@pytest.mark.filterwarnings("ignore:guard")
@pytest.mark.parametrize("logit", [-1e200, 1e200])
def test_a_model_that_recovers_from_a_collapse_is_judged_again(logit):
    guard = QualityGuard(Guard(every=60, steps=10, rate=1))
    stream = Stream(guard)
    for index in range(2):
        stream.window(index, logit)
    for index in range(2, 6):
        stream.window(index)

    assert 0.3 < guard.report()["estimates"]["all"]["calibration"] < 3
    assert stream.window(6, logit)


@pytest.mark.parametrize("of_a_kind", [False, True])
def test_no_sum_is_negative_or_infinite(of_a_kind):
    for logit in (*range(-800, 801, 7), *np.linspace(-40, 40, 81), 1e300, -1e300):
        window = WindowQuality(of_a_kind=of_a_kind)
        labels = np.arange(50) % 2
        for _ in range(12):
            window.add(np.full(50, float(logit)), labels.astype(float))
        assert all(np.isfinite(window.as_list()))
        assert min(window.as_list()) >= 0
        found = window.result()
        assert all(np.isfinite([*each]).all() for each in found.values())
        assert found["logloss"].value > 0
        assert found["calibration"].value > 0


def test_a_window_whose_last_step_failed_is_dropped():
    guard = QualityGuard(GUARD)
    stream = Stream(guard)
    for number in range(9):
        stream.step(number)
    resumed = QualityGuard(GUARD)
    resumed.load_state_dict(guard.state_dict())

    for each in (guard, resumed):
        stream = Stream(each)
        for number in range(60, 69):
            stream.step(number)
        assert each.num_windows == 0
        assert each.state_dict()["window"]["all"][0] == 9 * 512

        stream.step(69)
        assert each.num_windows == 1


@pytest.mark.filterwarnings("ignore:guard")
def test_a_pause_ends_by_itself_if_its_window_fails():
    guard = QualityGuard(Guard(every=60, steps=10, far=1e6))
    stream = Stream(guard)
    stream.window(0)
    stream.window(1, 5.0)
    assert guard.decisions[-1]["action"] == "lowered"

    stream.window(3)  # window 2 failed

    assert guard.state_dict()["num_calm"] == 1
    assert guard.factor_of(181) == 0.5


@pytest.mark.filterwarnings("ignore:guard")
def test_the_last_256_decisions_are_kept():
    guard = QualityGuard(Guard(every=60, steps=10, recovery=1, calm=1))
    stream = Stream(guard)
    factors = {}
    index = 0
    while guard.num_decisions < 300:
        is_bad = guard.num_windows and guard.report()["factor"] == 1
        stream.window(index, 5.0 if is_bad else None, size=128)
        number = index * 60 + 9
        factors[number + 32] = guard.report()["factor"]
        # Mini-batches up to the next window's last one are yet to be trained on.
        assert guard.factor_of(number + 31) == factors.get(number - 28, 1)
        assert guard.factor_of(number + 32) == factors[number + 32]
        index += 1

    assert len(guard.decisions) == 256
    assert guard.report()["num_decisions"] == 300
    resumed = QualityGuard(guard.guard)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.num_decisions == 300
    assert resumed.decisions == guard.decisions


@pytest.mark.filterwarnings("ignore:guard")
def test_reset_makes_a_guard_as_new():
    guard = QualityGuard(GUARD)
    stream = Stream(guard)
    for index, logit in enumerate([None, None, 5.0]):
        stream.window(index, logit)
    stream.step(180)
    assert guard.factor_of(180) == 0

    guard.reset()

    assert guard.state_dict() == QualityGuard(GUARD).state_dict()
    assert guard.factor_of(180) == 1
