"""Where the time went: booked to stages, and told in a table."""

import json
import time

import numba
import pytest

from recsys.embeddings import SGD
from recsys.pipeline import TrainPipeline
from recsys.pipeline.stalls import STAGES, StageClock, describe_stalls, stage_seconds
from tests.pipeline import small
from tests.unit.transfers import before_transfers


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
    for stage, seconds, seconds_of_rows in (
        ("forward", 5, 2.5),
        ("update", 3, 1),
        ("evaluate", 1, 1),
    ):
        now[0] += seconds
        waited[0] += seconds_of_rows
        clock.mark(stage)

    assert stages_of(clock) == {"forward": 2.5, "prefetch_wait": 3.5, "update": 2, "evaluate": 1}
    assert clock.train_seconds == 8
    resumed = StageClock()
    resumed.load_state_dict(json.loads(json.dumps(clock.state_dict())))
    assert resumed.seconds == clock.seconds
    resumed.start()
    now[0] += 6
    resumed.mark("update")
    assert resumed.train_seconds == 14
    stalls = describe_stalls(resumed)
    assert stage_seconds(stalls) == dict.fromkeys(STAGES, 0.0) | stages_of(resumed)
    assert stalls["binding"] == "update"


def test_what_a_fetch_takes_is_booked_to_the_wait_for_rows_and_nothing_else_is(now, monkeypatch):
    num_fetches = []

    def pause(_, fetches):
        if fetches:
            now[0] += 0.25
            num_fetches.append(1)

    model = small.Model(small.TABLES, SGD(lr=0.1), budget=9000)
    before_transfers(monkeypatch, pause)
    pipeline = TrainPipeline(model, small.dense_optimizer(model))
    small.run(pipeline, (small.make_batch(small.TABLES, seed) for seed in range(12)))

    assert stages_of(pipeline.clock) == {"prefetch_wait": 0.25 * len(num_fetches)}
    assert len(num_fetches) >= 12


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
