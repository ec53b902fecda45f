"""Where the time went: booked to stages, and told in a table."""

import json
import time

import pytest
import torch

from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tiers.transfers import MoveSeconds
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from recsys.pipeline.stalls import (
    STAGES,
    StageClock,
    describe_stalls,
    format_stalls,
    stage_seconds,
    stage_title,
)


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


def stages_of(clock):
    return {stage: spent for stage, spent in clock.seconds.items() if spent}


def test_waiting_for_rows_is_no_part_of_the_stage_it_was_in_but_of_an_evaluation(now):
    waited, clock = [MoveSeconds(fetch=100.0)], StageClock()
    clock.watch(lambda: waited[0])  # some of it is from before
    now[0] += 5
    waited[0] += MoveSeconds(fetch=2, write_back=0.5)
    clock.mark("forward")
    now[0] += 3
    waited[0] += MoveSeconds(write_back=1)
    clock.mark("update")
    now[0] += 1
    waited[0] += MoveSeconds(fetch=1)
    clock.mark("evaluate")

    assert stages_of(clock) == {
        "forward": 2.5,
        "prefetch_wait": 2,
        "write_back_wait": 1.5,
        "update": 2,
        "evaluate": 1,
    }
    assert clock.train_seconds == 8


def test_waiting_for_rows_is_part_of_a_checkpoint(now):
    waited, clock = [MoveSeconds()], StageClock()
    clock.watch(lambda: waited[0])
    now[0] += 5
    waited[0] += MoveSeconds(write_back=2)
    clock.mark("checkpoint")

    assert stages_of(clock) == {"checkpoint": 5}
    assert clock.train_seconds == 5


def test_a_resumed_clock_continues_with_the_seconds_of_the_saved_one(now):
    def train(clock, waited, num_steps):
        total = [MoveSeconds()]
        clock.watch(lambda: total[0])
        clock.start()
        for _ in range(num_steps):
            for stage in ("load", "forward", "update"):
                now[0] += 3
                total[0] += MoveSeconds(fetch=waited)
                clock.mark(stage)

    whole, first, resumed = StageClock(), StageClock(), StageClock()
    for clock in (whole, first):
        train(clock, 0.5, 3)
    train(whole, 1, 2)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    train(resumed, 1, 2)

    assert resumed.seconds == whole.seconds
    assert resumed.train_seconds == whole.train_seconds > 0


class SlowStore:
    """A cold store that takes its time: `pause` is called before rows come, or go."""

    def __init__(self, store, pause):
        self._store, self._pause = store, pause

    def fetch(self, hot, rows, slots):
        self._pause("fetch", len(rows))
        self._store.fetch(hot, rows, slots)

    def write_back(self, hot, rows, slots):
        self._pause("write_back", len(rows))
        self._store.write_back(hot, rows, slots)


def slowed(small, schedule, pause):
    """A pipeline whose rows are long on their way."""
    model = small.Model(small.tables, SGD(lr=0.1), budget=8000)
    for tiers in model.embeddings.tiers():
        tiers.residency._cold = SlowStore(tiers.residency._cold, pause)
    dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    return TrainPipeline(model, dense, schedule=schedule)


def batches_of(small, num_steps=12):
    return [small.make_batch(small.tables, seed) for seed in range(num_steps)]


def test_what_a_slow_cold_store_takes_is_booked_to_the_wait_for_it_and_nothing_else_is(small, now):
    taken = {"fetch": 0.0, "write_back": 0.0}

    def pause(what, _):
        seconds = 0.25 if what == "fetch" else 0.5
        now[0] += seconds
        taken[what] += seconds

    pipeline = slowed(small, Sequential(), pause)

    small.run(pipeline, iter(batches_of(small)))

    assert min(taken.values()) > 1
    assert stages_of(pipeline.clock) == {
        "prefetch_wait": taken["fetch"],
        "write_back_wait": taken["write_back"],
    }


def test_slots_of_another_number_go_on_with_the_same_times(small, now):
    def pause(what, _):
        now[0] += 1.0

    pipeline = slowed(small, Sequential(), pause)
    small.run(pipeline, iter(batches_of(small, 3)))
    tiers = pipeline.detach().embeddings.tiers()[0]

    tiers.resize(tiers.hot.num_slots + 5)
    tiers.residency.times.exposed += MoveSeconds(fetch=50.0)

    assert pipeline._tables.waited().fetch > 50


def test_sleeping_in_the_cold_store_is_found_in_the_wait_for_rows(small):
    slept = [0.0]

    def pause(what, _):
        if what == "fetch":
            begin = time.perf_counter()
            time.sleep(0.02)
            slept[0] += time.perf_counter() - begin

    pipeline = slowed(small, Sequential(), pause)

    small.run(pipeline, iter(batches_of(small)))

    seconds = pipeline.clock.seconds
    assert seconds["prefetch_wait"] >= slept[0] > 0.02 * 12
    assert seconds["write_back_wait"] > 0


def test_rows_that_come_while_a_mini_batch_computes_are_not_waited_for(small, now):
    def pause(what, _):
        now[0] += 1.0

    pipeline = slowed(small, LookAhead(1), pause)
    residencies = [tiers.residency for tiers in pipeline.detach().embeddings.tiers()]

    def compute(*_):  # as long as it takes rows to come
        while any(residency.queue.last for residency in residencies):
            time.sleep(0.001)

    pipeline.detach().layer.register_forward_hook(compute)
    iterator = iter(batches_of(small))
    pipeline.progress(iterator)  # whose rows are waited for
    before = dict(pipeline.clock.seconds)

    small.run(pipeline, iterator)

    spent = {stage: pipeline.clock.seconds[stage] - before[stage] for stage in STAGES}
    assert spent["forward"] >= 10  # a fetch and more for each mini-batch ahead
    assert spent["prefetch_wait"] == spent["write_back_wait"] == 0


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


def test_without_a_step_nothing_binds(now):
    stalls = describe_stalls(StageClock())

    assert stalls["binding"] is None
    assert format_stalls(stalls) == "no step was made"


def test_the_table_has_every_stage_of_training():
    clock = StageClock()
    clock.seconds |= dict.fromkeys(STAGES, 1.0) | {"prefetch_wait": 14.0, "evaluate": 100.0}

    lines = format_stalls(describe_stalls(clock)).splitlines()

    titles = [stage_title(stage) for stage in STAGES if stage != "evaluate"]
    assert [line[:20].strip() for line in lines[1 : 1 + len(titles)]] == titles
    assert lines[3].split() == ["prefetch", "wait", "14.00", "63.6%"]


@pytest.mark.parametrize(
    ("seconds", "options", "name"),
    [
        ({"prefetch_wait": 14.0}, {}, "schedule.depth"),
        ({"backward": 90.0}, {}, "compute faster"),
        ({"backward": 90.0}, {"is_alone": False}, "other processes"),
        ({"backward": 90.0}, {"num_threads": 2, "share_without_core": 0.5}, "num_threads below 2"),
        ({"backward": 90.0}, {"num_threads": 1, "share_without_core": 0.5}, "other programs"),
        ({"backward": 90.0}, {"num_threads": 2, "share_without_core": 0.05}, "compute faster"),
    ],
)
def test_the_table_names_what_would_loosen_the_largest(seconds, options, name):
    clock = StageClock()
    clock.seconds |= dict.fromkeys(STAGES, 1.0) | seconds

    assert name in format_stalls(describe_stalls(clock), **options)
