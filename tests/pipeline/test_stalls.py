"""Where the time went: booked to stages, and told in a table."""

import json
import time

import numba
import pytest

from recsys.embeddings import SGD
from recsys.pipeline import Sequential, TrainPipeline
from recsys.pipeline.stalls import (
    STAGES,
    StageClock,
    describe_stalls,
    stage_seconds,
)


@pytest.fixture
def now(monkeypatch):
    """The time of every clock, which passes when told so."""
    found = [100.0]
    for place in ("pipeline.stalls.time", "embeddings.tiers.fetch"):
        monkeypatch.setattr(f"recsys.{place}.perf_counter", lambda: found[0])
    return found


def stages_of(clock):
    return {stage: spent for stage, spent in clock.seconds.items() if spent}


def test_waiting_for_rows_is_no_part_of_the_stage_it_was_in_but_of_an_evaluation(now):
    waited, clock = [100.0], StageClock()
    clock.watch(lambda: waited[0])  # some of it is from before
    now[0] += 5
    waited[0] += 2.5
    clock.mark("forward")
    now[0] += 3
    waited[0] += 1
    clock.mark("update")
    now[0] += 1
    waited[0] += 1
    clock.mark("evaluate")

    assert stages_of(clock) == {
        "forward": 2.5,
        "prefetch_wait": 3.5,
        "update": 2,
        "evaluate": 1,
    }
    assert clock.train_seconds == 8


def test_a_resumed_clock_continues_with_the_seconds_of_the_saved_one(now):
    def train(clock, waited, num_steps):
        total = [0.0]
        clock.watch(lambda: total[0])
        clock.start()
        for _ in range(num_steps):
            for stage in ("load", "forward", "update"):
                now[0] += 3
                total[0] += waited
                clock.mark(stage)

    whole, first, resumed = StageClock(), StageClock(), StageClock()
    for clock in (whole, first):
        train(clock, 0.5, 3)
    train(whole, 1, 2)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    train(resumed, 1, 2)

    assert resumed.seconds == whole.seconds
    assert resumed.train_seconds == whole.train_seconds > 0


def run_slowly(small, monkeypatch, schedule, pause):
    """A pipeline that has run; its rows are long on their way."""
    model = small.Model(small.tables, SGD(lr=0.1), budget=9000)
    small.watch_fetches(monkeypatch, pause)
    pipeline = TrainPipeline(model, small.dense_optimizer(model), schedule=schedule)
    batches = [small.make_batch(small.tables, seed) for seed in range(12)]
    small.run(pipeline, iter(batches))
    return pipeline


def test_what_a_fetch_takes_is_booked_to_the_wait_for_rows_and_nothing_else_is(
    small, now, monkeypatch
):
    num_fetches = []

    def pause():
        now[0] += 0.25
        num_fetches.append(1)

    pipeline = run_slowly(small, monkeypatch, Sequential(), pause)

    assert stages_of(pipeline.clock) == {"prefetch_wait": 0.25 * len(num_fetches)}
    assert len(num_fetches) >= 12


def test_a_record_has_every_stage_and_the_one_that_binds(now):
    clock = StageClock()
    for stage, seconds in (("load", 4), ("forward", 10), ("evaluate", 90), ("update", 6)):
        now[0] += seconds
        clock.mark(stage)

    stalls = describe_stalls(clock)

    assert stage_seconds(stalls) == dict.fromkeys(STAGES, 0.0) | {
        "load": 4,
        "forward": 10,
        "evaluate": 90,
        "update": 6,
    }
    assert stalls["binding"] == "forward"


def test_compiling_a_kernel_is_a_stage_of_its_own():
    clock = StageClock()
    kernel = numba.njit(lambda number: number + 1)

    time.sleep(0.01)
    kernel(1)
    clock.mark("forward")
    compiled = clock.seconds["compile"]
    kernel(2)
    clock.mark("forward")

    assert compiled > 0
    assert clock.seconds["compile"] == compiled
    assert clock.train_seconds == clock.seconds["forward"] > 0.01
