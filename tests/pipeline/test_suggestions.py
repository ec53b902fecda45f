"""What other settings would save, beside what they do save once they are set."""

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings.optimizer import Adagrad
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from recsys.pipeline.stalls import Moved, StageClock
from recsys.pipeline.suggestions import Suggestion, of_load, of_schedule

SIZES = [6000, 4000]
FETCH, WRITE_BACK, COMPUTE = 1e-4, 2e-4, 0.03  # seconds: of a row, of a row, of a mini-batch


@pytest.fixture
def now(monkeypatch):
    """The time of every clock, which passes when told so."""
    found = [100.0]
    for place in (
        "pipeline.stalls.time",
        "embeddings.tiers.transfers",
        "embeddings.tiers.residency",
    ):
        monkeypatch.setattr(f"recsys.{place}.perf_counter", lambda: found[0])
    return found


class TimedStore:
    """A cold store that takes so much time for each row."""

    def __init__(self, store, now):
        self._store, self._now = store, now

    def fetch(self, hot, rows, slots):
        self._now[0] += FETCH * len(rows)
        self._store.fetch(hot, rows, slots)

    def write_back(self, hot, rows, slots):
        self._now[0] += WRITE_BACK * len(rows)
        self._store.write_back(hot, rows, slots)


def skewed_batches(small, num_steps, exponent):
    """Ids whose popularity follows a power law."""
    rng = np.random.default_rng(0)
    batch_of = small.make_batch(small.make_tables(SIZES, [4, 4]), 0)
    tables = []
    for size in SIZES:
        share = np.cumsum(1 / np.arange(1, size + 1) ** exponent)
        order = rng.permutation(size)
        tables.append(order[np.searchsorted(share / share[-1], rng.random((num_steps, 60)))])
    for step in range(num_steps):
        values = torch.tensor(np.stack([ids[step] for ids in tables]))
        features = JaggedIds.from_one_hot(["t_0", "t_1"], values)
        yield type(batch_of)(features, torch.zeros(60))


def train(small, now, budget, exponent, num_steps=250, *, has_forecast=True):
    """A finished run; its rows and its computing take the time that they are said to."""
    tables = small.make_tables(SIZES, [4, 4])
    model = small.Model(tables, Adagrad(lr=0.1), budget=budget)
    for tiers in model.embeddings.tiers():
        tiers.residency._cold = TimedStore(tiers.residency._cold, now)

    def compute(*_):
        now[0] += COMPUTE

    model.layer.register_forward_hook(compute)
    pipeline = TrainPipeline(model, None, schedule=Sequential())
    if has_forecast:
        pipeline.forecast_budget()
    small.run(pipeline, skewed_batches(small, num_steps, exponent))
    return pipeline


@pytest.mark.in_ci("100000-1.0")
@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("budget", [75_000, 100_000])
def test_what_twice_the_budget_saves_is_forecast_within_15_percent(small, now, budget, exponent):
    pipeline = train(small, now, budget, exponent)
    before = pipeline.clock

    predicted, _ = pipeline.suggestions()
    after = train(small, now, predicted.value, exponent).clock

    assert predicted.key == "budget"
    assert 2 * budget - 200 < predicted.value <= 2 * budget
    saved = before.train_seconds - after.train_seconds
    assert saved > 0.05 * before.train_seconds
    assert predicted.saved_seconds == pytest.approx(saved, rel=0.15)
    assert after.seconds["forward"] == pytest.approx(before.seconds["forward"])


def test_a_budget_in_which_every_row_fits_saves_all_waiting(small, now):
    pipeline = train(small, now, 200_000, 1.0, num_steps=60)

    predicted, _ = pipeline.suggestions()

    assert pipeline.clock.waited_seconds > 0
    assert predicted.saved_seconds == pipeline.clock.waited_seconds


def test_without_a_forecast_no_budget_is_suggested_and_no_claim_does_work_for_it(small, now):
    pipeline = train(small, now, 75_000, 1.0, num_steps=20, has_forecast=False)

    assert pipeline.suggestions()[0] is None
    assert all(tiers.hot.forecast is None for tiers in pipeline._tables.tiers())


@pytest.fixture
def clock(now):
    """A clock, and `step`: seconds of a step, as `load`, `compute`, `waited` and `busy`."""

    found, moved = StageClock(), [Moved()]
    found.watch(lambda: moved[0])
    seconds = type(moved[0].busy)

    def step(load=0.0, compute=0.0, waited=0.0, busy=0.0):
        found.begin_step()
        now[0] += load
        found.mark("load")
        now[0] += compute + waited
        moved[0] = Moved(moved[0].busy + seconds(busy), moved[0].exposed + seconds(waited))
        found.mark("forward")

    found.step = step
    return found


def test_without_a_share_of_the_transfers_as_much_less_is_waited_for_as_there_was(clock):
    for _ in range(10):
        clock.step(compute=4, waited=6, busy=10)  # 3 of 10 less: 3 of 6
    for _ in range(10):
        clock.step(compute=9, waited=1, busy=10)  # the 1 is gone
    clock.step(compute=5, busy=5)

    assert clock.saved_without(0.3) == pytest.approx(10 * 3 + 10 * 1)
    assert clock.saved_without(0.0) == 0
    assert clock.saved_without(1.0) == pytest.approx(clock.waited_seconds) == 70


def test_reading_ahead_hides_no_more_than_there_is_to_hide_it_behind(clock):
    clock.step(load=8, compute=2)
    assert of_load(clock, 2) == Suggestion("prefetch", 4, 2, is_upper_bound=True)

    clock.step(load=1, compute=29)
    assert of_load(clock, 2).saved_seconds == 9


class Tiered:
    """Tiers of which only the time of transfers counts."""

    def __init__(self, busy):
        self.residency = self.times = self
        self.busy = type(Moved().busy)(busy)


@pytest.mark.parametrize(
    ("schedule", "mean_depth", "key", "value"),
    [(Sequential(), 0, "schedule.name", "lookahead"), (LookAhead(3), 2.9, "schedule.depth", 6)],
)
def test_looking_ahead_hides_no_more_than_there_is_to_hide_it_behind(
    clock, schedule, mean_depth, key, value
):
    clock.step(compute=4, waited=6, busy=6)

    found = of_schedule(clock, [Tiered(6), Tiered(1)], schedule, mean_depth)

    assert found == Suggestion(key, value, 4, is_upper_bound=True)
    clock.step(compute=20)
    assert of_schedule(clock, [Tiered(6)], schedule, mean_depth).saved_seconds == 6


def test_where_slots_are_too_few_to_look_ahead_farther_that_is_not_suggested(clock):
    clock.step(compute=4, waited=6, busy=6)

    assert of_schedule(clock, [Tiered(6)], LookAhead(4), 2.5) is None
    assert of_schedule(clock, [], LookAhead(4), 4) is None
