"""Where the time went: booked to stages, told in a table, kept as a timeline."""

import json
import time

import pytest
import torch

from recsys.embeddings.optimizer import SGD
from recsys.embeddings.tiers.transfers import MoveSeconds
from recsys.errors import ConfigError
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from recsys.pipeline.stalls import (
    STAGES,
    Moved,
    StageClock,
    describe_stalls,
    format_stalls,
    stage_seconds,
    stage_title,
)
from recsys.pipeline.suggestions import Suggestion
from recsys.pipeline.timeline import Timeline


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
    clock.watch(lambda: Moved(waited[0], waited[0]))  # some of it is from before
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
    clock.watch(lambda: Moved(waited[0], waited[0]))
    now[0] += 5
    waited[0] += MoveSeconds(write_back=2)
    clock.mark("checkpoint")

    assert stages_of(clock) == {"checkpoint": 5}
    assert clock.train_seconds == 5


def test_a_resumed_clock_continues_with_the_seconds_of_the_saved_one(now):
    def train(clock, waited, busy, num_steps):
        moved = [Moved()]
        clock.watch(lambda: moved[0])
        clock.start()
        for _ in range(num_steps):
            for stage in ("load", "forward", "update"):
                now[0] += 3
                found = MoveSeconds(fetch=waited)
                moved[0] = Moved(moved[0].busy + MoveSeconds(fetch=busy), moved[0].exposed + found)
                clock.mark(stage)

    whole, first, resumed = StageClock(), StageClock(), StageClock()
    for clock in (whole, first):
        train(clock, 0.5, 1, 3)
    train(whole, 1, 4, 2)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    train(resumed, 1, 4, 2)

    assert resumed.seconds == whole.seconds
    assert resumed.train_seconds == whole.train_seconds > 0
    assert resumed.saved_without(0.5) == pytest.approx(whole.saved_without(0.5))
    assert 0 < resumed.saved_without(0.2) < resumed.saved_without(0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": {}},
        {"seconds": dict.fromkeys(STAGES[2:], 1.0)},
        {"seconds": dict.fromkeys(STAGES, -1.0)},
        {"seconds": [0.0] * len(STAGES)},
        {"waited": [0.0]},
        {"busy": ["0"] * 65},
        {"more": 1},
    ],
)
def test_a_malformed_state_of_a_clock_is_refused(change):
    clock = StageClock()

    with pytest.raises(ConfigError, match="clock state: "):
        clock.load_state_dict(clock.state_dict() | change)


def test_a_state_from_before_skipping_was_measured_loads():
    clock, state = StageClock(), StageClock().state_dict()
    del state["seconds"]["skip"]

    clock.load_state_dict(state)

    assert clock.seconds["skip"] == 0


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
    tiers.residency.times.fetched(0.0, 50.0)

    assert pipeline._tables.moved().busy.fetch > 50


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
    assert sum(each.times.busy.total for each in residencies) >= spent["forward"]


def test_a_record_has_every_stage_the_one_that_binds_and_the_suggestions_by_what_they_save(now):
    clock = StageClock()
    for stage, seconds in (("load", 4), ("forward", 10), ("evaluate", 90), ("update", 6)):
        now[0] += seconds
        clock.mark(stage)
    suggestions = [
        Suggestion("prefetch", 4, 1.0, is_upper_bound=True),
        None,
        Suggestion("budget", 2**20, 5.0, is_upper_bound=False),
    ]

    stalls = describe_stalls(clock, suggestions)

    assert stage_seconds(stalls) == dict.fromkeys(STAGES, 0.0) | {
        "load": 4,
        "forward": 10,
        "evaluate": 90,
        "update": 6,
    }
    assert stalls["binding"] == "forward"
    budget, prefetch = stalls["predicted"]
    assert budget == {
        "key": "budget",
        "value": 2**20,
        "saved_seconds": 5.0,
        "saved_share": 0.25,
        "speedup": pytest.approx(4 / 3),
        "is_upper_bound": False,
    }
    assert prefetch["key"] == "prefetch"


def test_without_a_step_nothing_binds(now):
    stalls = describe_stalls(StageClock(), [Suggestion("prefetch", 4, 0.0, is_upper_bound=True)])

    assert stalls["binding"] is None
    assert stalls["predicted"] == []
    assert format_stalls(stalls) == "no step was made"


def test_the_table_has_every_stage_of_training_and_what_would_loosen_the_largest(now):
    clock = StageClock()
    clock.seconds |= dict.fromkeys(STAGES, 1.0) | {"prefetch_wait": 14.0, "evaluate": 100.0}
    suggestions = [
        Suggestion("prefetch", 4, 0.1, is_upper_bound=True),
        Suggestion("schedule.depth", 4, 11.0, is_upper_bound=True),
        Suggestion("budget", 512 * 2**20, 6.82, is_upper_bound=False),
    ]

    lines = format_stalls(describe_stalls(clock, suggestions)).splitlines()

    titles = [stage_title(stage) for stage in STAGES if stage != "evaluate"]
    assert [line[:20].strip() for line in lines[1 : 1 + len(titles)]] == titles
    assert lines[3].split() == ["prefetch", "wait", "14.00", "63.6%"]
    assert lines[1 + len(titles) :] == [
        "prefetch wait takes the most time; to shorten it, use a larger budget, or look more "
        "mini-batches ahead (schedule.depth)",
        "schedule.depth=4 would save at most 50% of the time (2.00 times the speed)",
        "a budget of 512 MiB would save 31% of the time (1.45 times the speed)",
    ]
    clock.seconds |= {"backward": 90.0, "skip": 0.0}
    table = format_stalls(describe_stalls(clock, []))
    assert table.endswith("compute faster: neither data nor rows are the bottleneck")
    assert "skip" not in table
    table = format_stalls(describe_stalls(clock, []), is_alone=False)
    assert table.endswith("it includes the exchange with the other processes")


def test_a_picture_of_a_timeline_shows_ten_steps_after_the_first():
    timeline = Timeline()
    for step in range(14):
        timeline.add("steps", "load", step, step + 0.25)
        timeline.add("steps", "wait", step + 0.3, step + 0.4)
        timeline.add("steps", "forward", step + 0.25, step + 1)
        timeline.add("rows, group 0", "move", step + 0.5, step + 0.75)

    shown = timeline.shown(10)

    assert list(shown) == ["steps", "waiting", "rows, group 0"]
    assert shown["steps"][0] == ("load", 0.0, 0.25)
    assert shown["steps"][-1] == ("forward", 9.25, 10.0)
    assert shown["waiting"][0] == ("wait", pytest.approx(0.3), pytest.approx(0.4))
    assert [name for name, _, _ in shown["rows, group 0"]] == ["move"] * 10


def test_a_step_that_loads_and_skips_several_times_is_one_step(now):
    timeline, clock, moved = Timeline(), StageClock(), [Moved()]
    clock.watch(lambda: moved[0])
    clock.timeline = timeline
    for _ in range(14):
        clock.begin_step()
        for stage, waited in [
            *[("load", 0.0), ("skip", 0.0)] * 3,
            ("forward", 1.0),
            ("other", 0.0),
        ]:
            now[0] += 1 + waited
            seconds = MoveSeconds(fetch=waited)
            moved[0] = Moved(moved[0].busy + MoveSeconds(fetch=0.5), moved[0].exposed + seconds)
            clock.mark(stage)

    shown = timeline.shown(10)["steps"]

    assert [name for name, _, _ in shown].count("forward") == 10
    assert shown[0][:2] == ("load", 0)
    # Of each step, 4 s of transfers and 1 s of waiting: half of the transfers would hide it.
    assert clock.saved_without(0.125) == pytest.approx(14 * 0.125 * 4)


def test_of_a_timeline_of_one_step_that_one_is_shown():
    timeline = Timeline()
    assert timeline.shown(10) == {}
    timeline.add("steps", "load", 5, 6)
    timeline.add("steps", "forward", 6, 7)

    assert timeline.shown(10) == {"steps": [("load", 0, 1), ("forward", 1, 2)]}


def test_a_timeline_has_the_stages_of_steps_and_rows_on_their_way(small, tmp_path):
    batches = [small.make_batch(small.tables, seed) for seed in range(6)]
    model = small.Model(small.tables, SGD(lr=0.1), budget=12_000)
    dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    pipeline, timeline = TrainPipeline(model, dense, schedule=LookAhead(2)), Timeline()
    iterator = iter(batches)

    pipeline.record(timeline)
    for _ in range(4):
        pipeline.progress(iterator)
    pipeline.record(None)
    small.run(pipeline, iterator)
    timeline.write(tmp_path / "timeline.json")

    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert set(tracks.values()) == {"steps", "rows, group 0", "rows, group 1"}
    spans = [(tracks[each["tid"]], each) for each in events if each["ph"] == "X"]
    names = [each["name"] for track, each in spans if track == "steps"]
    assert [names.count(stage) for stage in ("load", "forward", "backward", "update")] == [4] * 4
    assert {each["name"] for track, each in spans if track != "steps"} == {"move"}
    assert min(each["ts"] for _, each in spans) == 0
    for track in tracks.values():  # one after the other; waiting is inside of a stage
        ends = 0.0
        own = [each for its, each in spans if its == track and each["name"] != "wait"]
        for each in sorted(own, key=lambda span: span["ts"]):
            assert each["ts"] >= ends - 0.01
            ends = each["ts"] + each["dur"]
