"""Where the time went: booked to stages, told in a table, kept as a timeline."""

import json

import pytest
import torch

from recsys.embeddings.optimizer import SGD
from recsys.pipeline import LookAhead, TrainPipeline
from recsys.pipeline.stalls import STAGES, StageClock, format_stalls
from recsys.pipeline.timeline import Timeline


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time passes when told so: `clock.now`."""
    now = [100.0]
    monkeypatch.setattr("recsys.pipeline.stalls.time.perf_counter", lambda: now[0])
    found = StageClock()
    found.now = now
    return found


def test_waiting_for_rows_is_no_part_of_the_forward_it_was_in(clock):
    clock.now[0] += 5
    clock.mark("forward", 2)
    clock.now[0] += 1
    clock.mark("evaluate")

    assert {stage: spent for stage, spent in clock.seconds.items() if spent} == {
        "forward": 3,
        "fetch": 2,
        "evaluate": 1,
    }
    assert clock.train_seconds == 5


def test_the_table_has_every_stage_of_training_and_what_would_loosen_the_largest():
    seconds = dict.fromkeys(STAGES, 1.0) | {"fetch": 15.0, "evaluate": 100.0}

    lines = format_stalls(seconds).splitlines()

    told = [line.split()[0] for line in lines[1:-1]]
    assert told == [stage for stage in STAGES if stage != "evaluate"]
    assert lines[2].split() == ["fetch", "15.00", "75.0%"]
    assert lines[-1] == (
        "most is fetch; less of it by a larger budget, or more mini-batches looked ahead to "
        "(schedule.depth)"
    )
    assert "faster computing" in format_stalls(seconds | {"backward": 90.0})
    assert format_stalls(dict.fromkeys(STAGES, 0.0)) == "no step was made"


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
