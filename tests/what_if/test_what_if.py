"""`recsys what-if`: from the folder of a run to predictions, and what it refuses."""

import json
import shutil

import pytest

from recsys.cli import main
from recsys.config import load_config
from recsys.errors import ConfigError
from recsys.pipeline import TrainPipeline
from recsys.train.parts.build import open_source
from recsys.train.trainer import train
from recsys.what_if import predict, steps
from recsys.what_if.changes import MeasuredRun, change_of, change_to, depth_of
from recsys.what_if.costs import LineOfCosts, TransferCosts
from recsys.what_if.predict import WhatIf

TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_settings):
    """A run in two tiers, and others that differ from it."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [*small_settings[1::2], TABLES, "num_threads=1", "save_model=false"]
    others = {
        "tiered": ["budget=20KiB"],
        "larger": ["budget=30KiB", "schedule.depth=1"],
        "sequential": ["budget=20KiB", "schedule.name=sequential"],
        "resident": [],
        "other": ["budget=20KiB", "optimizer.lr=0.05"],
    }
    for name, changes in others.items():
        train(load_config(None, [*settings, *changes]), folder / name, show_progress=False)
    return folder


@pytest.fixture
def changed(runs, tmp_path):
    """Copies a run, with another record or configuration."""

    def change(*path, value, key=""):
        folder = tmp_path / "changed"
        shutil.copytree(runs / "tiered", folder)
        record = json.loads((folder / "run.json").read_text())
        if path:
            inner = record
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = value
            (folder / "run.json").write_text(json.dumps(record))
        if key:
            config = (folder / "config.toml").read_text()
            assert key in config
            (folder / "config.toml").write_text(config.replace(key, value))
        return folder

    return change


def run_cli(*arguments):
    return main(["what-if", *map(str, arguments)])


def test_the_table_holds_usual_changes_and_the_json_the_same(runs, tmp_path, capsys):
    status = run_cli(runs / "tiered", "--json", tmp_path / "found.json")

    told, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    changes = [each["change"] for each in found["predictions"]] + list(found["refused"])
    assert status == 0
    assert set(changes) == {
        "budget=10KiB",
        "budget=40KiB",
        "schedule.depth=1",
        "schedule.depth=4",
        "schedule.name=sequential",
        "cold_tier=file",
        "batch_size=64",
        "batch_size=256",
    }
    assert all(change in told for change in changes)
    of = {each["change"]: each for each in found["predictions"]}
    assert "the row map of" in found["refused"]["budget=10KiB"] or "needs" in told
    assert any("probe just now" in note for note in of["cold_tier=file"]["notes"])
    assert any("of a probe just now" in note for note in of["batch_size=64"]["notes"])
    assert of["schedule.name=sequential"]["notes"] == []
    assert of["schedule.name=sequential"]["predicted"]["exposed_seconds_per_1000_steps"] > 0
    more = of["budget=40KiB"]["predicted"]
    assert more["lookup_hit_rate"] > found["measured"]["lookup_hit_rate"]
    assert more["hot_bytes"] <= 40 * 2**10


def test_one_change_may_be_of_several_keys(runs, capsys):
    status = run_cli(runs / "tiered", "--set", "budget=64KiB", "--set", "schedule.depth=4")

    assert status == 0
    assert "budget=64KiB, schedule.depth=4" in capsys.readouterr().out


def test_predictions_stand_beside_what_other_runs_measured(runs, tmp_path, capsys):
    others = [runs / "larger", runs / "sequential", runs / "resident"]

    status = run_cli(runs / "tiered", "--beside", *others, "--json", tmp_path / "found.json")

    found = json.loads((tmp_path / "found.json").read_text())["predictions"]
    assert status == 0
    assert [each["change"] for each in found] == [
        "budget=30KiB, schedule.depth=1",
        "schedule.name=sequential",
        "budget=none",
    ]
    for each, other in zip(found, others, strict=True):
        record = json.loads((other / "run.json").read_text())
        rate = record["throughput"]["samples_per_second"]
        assert each["measured"]["samples_per_second"] == rate
        assert each["error"] == pytest.approx(each["predicted"]["samples_per_second"] / rate - 1)
        assert each["predicted"]["lookup_hit_rate"] == each["measured"]["lookup_hit_rate"]
        if record["tiers"] is not None:
            assert each["predicted"]["hot_bytes"] == record["tiers"]["hot_bytes"]
    assert "error" in capsys.readouterr().out


def test_a_run_with_every_row_resident_predicts_tiers_from_a_probe(runs):
    what_if = WhatIf(MeasuredRun.open(runs / "resident"))

    half, quarter, *_ = what_if.usual_changes()
    found = what_if.predict(half)

    assert (half.label, quarter.label) == ("budget=19KiB", "budget=10KiB")
    assert found.hot_bytes <= 19 * 2**10
    assert "moved no rows of cold_tier 'host'" in found.notes[0]


def test_the_run_itself_is_predicted_as_measured(runs, tmp_path, monkeypatch):
    """With times that are given: those of so short a run differ from its probe's by chance."""
    shutil.copytree(runs / "sequential", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["throughput"] |= {"train_seconds": 0.06, "samples_per_second": 1800 / 0.06}
    record["stalls"] |= {"prefetch_wait_seconds": 6e-4, "write_back_wait_seconds": 2e-4}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    line = LineOfCosts(1e-5, 1e-8)
    monkeypatch.setattr(predict, "probe", lambda *_, **__: TransferCosts(line, line))
    replay = predict.Replay.run
    monkeypatch.setattr(
        predict.Replay, "run", lambda *each: replay(*each)._replace(claim_seconds=1e-5)
    )
    run = MeasuredRun.open(tmp_path / "run")

    found = WhatIf(run).predict(change_of(run, [f"budget={run.config.budget}"]))

    assert found.samples_per_second == pytest.approx(run.samples_per_second, rel=0.01)
    assert found.exposed_seconds == pytest.approx(
        1000 * run.waited_seconds / run.num_steps, rel=0.01
    )


@pytest.mark.parametrize("batch_size", [64, 256])
def test_another_batch_size_computes_by_the_ratio_of_the_probe(runs, monkeypatch, batch_size):
    run = MeasuredRun.open(runs / "resident")
    asked = []

    def ratio(config, source, size):
        asked.append((config, size))
        return 1.25

    monkeypatch.setattr(predict, "step_ratio", ratio)

    found = WhatIf(run, most_steps=5).predict(change_of(run, [f"batch_size={batch_size}"]))

    assert asked == [(run.config, batch_size)]
    assert found.speedup == pytest.approx(batch_size / 128 / 1.25)
    assert found.samples_per_second == pytest.approx(found.speedup * run.samples_per_second)


@pytest.mark.parametrize(("batch_size", "bound"), [(64, "at most"), (256, "at least")])
def test_large_tables_are_not_built_and_give_a_bound(runs, monkeypatch, batch_size, bound):
    run = MeasuredRun.open(runs / "resident")
    monkeypatch.setattr(steps, "_MOST_BYTES", 1000)

    found = WhatIf(run, most_steps=5).predict(change_of(run, [f"batch_size={batch_size}"]))

    assert found.samples_per_second == pytest.approx(run.samples_per_second)
    assert f"computes {bound} as fast as predicted" in found.notes[0]


def test_a_probe_makes_steps_of_both_sizes(small_config, monkeypatch):
    config, sizes = small_config("num_threads=1"), []
    progress = TrainPipeline.progress

    def noted(self, iterator):
        loss, output = progress(self, iterator)
        sizes.append(len(output[1]))
        return loss, output

    monkeypatch.setattr(TrainPipeline, "progress", noted)

    ratio = steps.step_ratio(config, open_source(config), 32)

    assert ratio > 0
    assert sizes[:4] == [128, 32, 128, 32]


@pytest.mark.in_ci("changes2")
@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"budget": "20KiB"}, True),
        ({"budget": ""}, False),
        ({"budget": "20KiB", "skip.policy": "random_drop"}, False),
        ({"budget": "20KiB", "schedule.name": "hotline"}, False),
        ({"budget": "8MiB", "model.name": "din"}, False),
    ],
)
def test_training_names_the_command_at_the_end_of_a_run_that_it_reads(
    small_settings, tmp_path, capsys, changes, is_told
):
    run = tmp_path / "run"
    data, settings = "synthetic:criteo-kaggle", [*small_settings, "--set", TABLES]
    if "model.name" in changes:
        data, settings = "synthetic:taobao", ["--set", "synthetic.num_samples=2000"]
    settings += [part for each in changes.items() for part in ("--set", "=".join(each))]

    status = main(["train", data, "--run", str(run), *settings])

    line = f"recsys what-if {run} predicts other budgets, depths and tiers"
    assert status == 0
    assert (line in capsys.readouterr().out) == is_told
    if changes["budget"]:
        assert (run_cli(run) == 0) == is_told


@pytest.mark.outside_ci
def test_checkpoints_and_evaluations_do_not_change_the_counts(small_config, tmp_path):
    changes = ["checkpoint.every_steps=4", "eval.every_steps=3", "budget=20KiB", "epochs=2"]
    train(small_config(TABLES, *changes), tmp_path / "run", show_progress=False)

    run = MeasuredRun.open(tmp_path / "run")

    assert WhatIf(run).predict(change_of(run, ["budget=30KiB"])).hit_rate > 0.5


def test_few_steps_are_told(runs):
    run = MeasuredRun.open(runs / "tiered")

    found = WhatIf(run, most_steps=5).predict(change_of(run, ["budget=30KiB"]))

    assert "counts are those of the first 5 steps, and later ones may hit more often" in found.notes


def test_of_few_steps_the_run_itself_is_told_too_with_its_own_speed(runs, tmp_path, capsys):
    more = ["--set", "batch_size=64", "--json", tmp_path / "found.json"]

    assert run_cli(runs / "sequential", "--steps", 10, *more) == 0

    told = json.loads((tmp_path / "found.json").read_text())
    own, change = told["predictions"]
    assert (own["change"], own["speedup"]) == ("its first 10 steps", 1.0)
    assert own["predicted"]["lookup_hit_rate"] < told["measured"]["lookup_hit_rate"]
    assert "its first 10 steps" in capsys.readouterr().out
    assert "counts are those of the first 20 steps" in change["notes"][-1]  # the same samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.lr=0.3"], "optimizer.lr 0.1 becomes 0.3, which what-if cannot predict"),
        (["epochs=2"], "epochs 1 becomes 2, which what-if cannot predict"),
        (["precision=bf16"], "precision 'fp32' becomes 'bf16', which what-if cannot predict"),
        (["schedule.name=hotline"], "schedule.name must be one of 'sequential' and 'lookahead'"),
        (["schedule.name=auto"], "schedule.name must be one of 'sequential' and 'lookahead'"),
        (["budget=", "cold_tier=file"], "cold_tier 'file' needs a budget"),
        (["nosuch=1"], "unknown key nosuch"),
    ],
)
def test_other_changes_are_refused(runs, settings, message):
    with pytest.raises(ConfigError, match=message):
        change_of(MeasuredRun.open(runs / "tiered"), settings)


def test_data_that_has_changed_is_refused(changed):
    run = MeasuredRun.open(changed("data", "fingerprint", value="another"))

    with pytest.raises(ConfigError, match="its data has changed since: the fingerprint of"):
        WhatIf(run)


@pytest.mark.parametrize(
    ("path", "value"), [(("data", "fingerprint"), "another"), (("environment", "num_threads"), 7)]
)
def test_runs_on_other_data_or_threads_are_not_compared(runs, changed, path, value):
    other = MeasuredRun.open(changed(*path, value=value))

    with pytest.raises(ConfigError, match=f"{'.'.join(path)} of its record is {value!r}"):
        change_to(MeasuredRun.open(runs / "tiered"), other)


def test_early_stopping_that_did_not_stop_is_no_difference(runs, changed):
    changing = "[early_stopping]\npatience = 0"
    other = MeasuredRun.open(changed(key=changing, value="[early_stopping]\npatience = 9"))

    assert change_to(MeasuredRun.open(runs / "tiered"), other).label == "the same"


@pytest.mark.outside_ci
def test_checkpoints_take_as_long_as_in_the_run(changed):
    plain = MeasuredRun.open(changed("status", value="finished"))
    speed = WhatIf(plain).predict(change_of(plain, ["schedule.depth=2"])).samples_per_second
    folder, record = plain.path, dict(plain.record)
    record["stalls"] = plain.record["stalls"] | {"checkpoint_seconds": 9.0}
    seconds = plain.record["throughput"]["train_seconds"] + 9.0
    record["throughput"] = plain.record["throughput"] | {
        "train_seconds": seconds,
        "samples_per_second": plain.num_samples / seconds,
    }
    (folder / "run.json").write_text(json.dumps(record))
    run = MeasuredRun.open(folder)

    found = WhatIf(run).predict(change_of(run, ["schedule.depth=2"]))

    seconds = run.num_samples / found.samples_per_second - run.num_samples / speed
    assert seconds == pytest.approx(9.0, rel=0.02)


def test_settings_without_effect_are_told(runs):
    run = MeasuredRun.open(runs / "resident")

    found = WhatIf(run).predict(change_of(run, ["budget=1GiB", "schedule.depth=8"]))

    assert found.notes == ("every row is resident, so depth and cold tier have no effect",)


@pytest.mark.outside_ci
def test_a_usual_change_that_cannot_be_probed_leaves_the_others(runs, monkeypatch, capsys):
    def probe(cold_tier, **options):
        if cold_tier == "file":
            raise OSError("the disk is full")
        return make_probe(cold_tier, **options)

    make_probe = predict.probe
    monkeypatch.setattr(predict, "probe", probe)

    assert run_cli(runs / "tiered") == 0
    told = capsys.readouterr().out
    assert "the disk is full" in told
    assert "schedule.depth=4" in told


def test_a_run_that_differs_in_more_is_refused(runs):
    run, other = (MeasuredRun.open(runs / name) for name in ("tiered", "other"))

    with pytest.raises(ConfigError, match=r"other: .*optimizer.lr 0.1 becomes 0.05"):
        change_to(run, other)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["transfers"], None, "no transfers.fetched_rows, which older versions lack; run it again"),
        (["stalls", "prefetch_wait_seconds"], None, "no stalls.prefetch_wait_seconds"),
        (["processes"], {"num_ranks": 2}, "several processes"),
        (["resumed"], [{}], "resumed"),
        (["stopped_early"], {"step": 5}, "stopped early"),
        (["status"], "interrupted", "its status is 'interrupted'"),
        (["throughput", "num_steps"], 0, "it made no step"),
        (["throughput", "num_steps"], 9, "it made 9 steps, .* train for at least 10"),
    ],
)
def test_records_that_do_not_tell_enough_are_refused(changed, path, value, message):
    with pytest.raises(ConfigError, match=message):
        MeasuredRun.open(changed(*path, value=value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ('device = "cpu"', 'device = "cuda"', "device is 'cuda'"),
        ('[skip]\npolicy = "none"', '[skip]\npolicy = "drop_input"', "skips by policy"),
        ('[schedule]\nname = ""', '[schedule]\nname = "hotline"', "schedule.name is 'hotline'"),
        ('plan = ""', 'plan = "hot.npz"', "pinned by plan"),
        ('embeddings = "recsys"', 'embeddings = "torch"', "embeddings"),
    ],
)
def test_runs_that_are_not_predicted_are_refused(changed, key, value, message):
    with pytest.raises(ConfigError, match=message):
        MeasuredRun.open(changed(key=key, value=value))


def test_counts_that_a_replay_does_not_repeat_are_an_error(changed):
    run = MeasuredRun.open(changed("transfers", "fetched_rows", value=3))

    with pytest.raises(ConfigError, match=r"fetched_rows 3, and a replay of its .* run it again"):
        WhatIf(run)


def test_a_model_that_does_not_pool_is_refused(small_config, tmp_path):
    sizes = "synthetic.table_sizes=[300, 500, 20]"
    config = small_config(sizes, "model.name=din", "save_model=false", data="synthetic:taobao")
    train(config, tmp_path / "run", show_progress=False)

    with pytest.raises(ConfigError, match="'din' chooses itself which rows of a history"):
        WhatIf(MeasuredRun.open(tmp_path / "run"))


def test_the_depth_of_a_schedule_is_that_of_training(small_config):
    depths = {"": 2, "schedule.name=sequential": 0, "schedule.depth=3": 3}

    assert {each: depth_of(small_config(*filter(None, [each]))) for each in depths} == depths
