"""What a run trains, measures, evaluates and leaves; how it ends when something goes wrong."""

import json
import signal
from itertools import pairwise

import pytest
import torch
from safetensors import SafetensorError

from recsys.errors import AlreadyExists, ConfigError, TrainingDiverged
from tests.train.resumed_runs import (
    before_each,
    evaluated,
    history,
    load_model,
    record_of,
    require_equal,
    run,
)

NOT_TRAINING = ("binding", "compile_seconds", "evaluate_seconds")
TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"
SMALL_BATCHES = (TABLES, "budget=24KiB", "batch_size=32")
METRICS = {
    *("auc", "auc_standard_error", "logloss", "normalized_entropy", "num_positives"),
    *("calibration", "accuracy", "num_samples"),
}


@pytest.mark.usefixtures("whole_pictures")
@pytest.mark.parametrize("provider", ["recsys", "torch"])
def test_a_run_leaves_its_whole_record(small_config, tmp_path, provider):
    config = small_config(f"embeddings={provider}", "epochs=2", "seed=3")

    record = run(config, tmp_path / "run")

    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"config.toml", "history.jsonl", "run.json", "model.safetensors"}
    saved = record_of(tmp_path / "run")
    assert saved == json.loads(json.dumps(record))
    assert (saved["status"], saved["config"]["seed"]) == ("finished", 3)
    assert {"cpu", "gpu", "torch", "commit", "dirty"} <= set(saved["environment"])
    assert saved["data"]["name"] == "synthetic:criteo-kaggle"
    assert set(saved["metrics"]["test"]) == set(saved["metrics"]["validation"]) == METRICS
    assert saved["metrics"]["test"]["num_samples"] == 150
    assert saved["metrics"] == evaluated(tmp_path / "run")
    throughput, stalls = saved["throughput"], saved["stalls"]
    assert (throughput["num_samples"], throughput["num_steps"]) == (2 * 1800, 2 * 15)
    seconds = [value for key, value in stalls.items() if key not in NOT_TRAINING]
    assert sum(seconds) == pytest.approx(throughput["train_seconds"])
    assert min(stalls[f"{stage}_seconds"] for stage in ("forward", "backward", "evaluate")) > 0
    assert throughput["samples_per_second"] == pytest.approx(3600 / throughput["train_seconds"])
    assert saved["peak_memory_bytes"] > 2**20


@pytest.mark.slow(but=("file",))
@pytest.mark.parametrize("cold_tier", ["host", "file"])
def test_a_tier_and_a_schedule_change_no_number_and_are_recorded(small_config, tmp_path, cold_tier):
    schedules = ("schedule=sequential", "schedule.lookahead.depth=4", "schedule=lookahead")
    tiered = (*SMALL_BATCHES, f"cold_tier={cold_tier}")
    records = [run(small_config(TABLES, "batch_size=32"), tmp_path / "0")]
    records += [
        run(small_config(*tiered, schedule), tmp_path / str(number))
        for number, schedule in enumerate(schedules, 1)
    ]

    resident, *others = records
    assert [each["schedule"].get("depth") for each in records] == [None, None, 4, 2]
    assert resident["tiers"] is None
    for number, record in enumerate(others, 1):
        assert record["metrics"] == resident["metrics"]
        require_equal(load_model(tmp_path / str(number)), load_model(tmp_path / "0"))
        found = record["tiers"]
        assert (found["cold_tier"], found["num_rows"]) == (cold_tier, 2401)
        assert found["hot_bytes"] <= 24 * 1024
        assert 0 < found["unique_hit_rate"] < found["lookup_hit_rate"] < 1
        assert min(found["fetched_bytes"], found["written_back_bytes"]) > 0
    assert {each.name for each in tmp_path.iterdir()} == {"0", "1", "2", "3"}


def test_hotline_splits_mini_batches_and_records_it(small_config, tmp_path):
    plain = run(small_config(*SMALL_BATCHES, "schedule=sequential"), tmp_path / "plain")
    learning = "schedule.hotline.learning_share=0.1"
    split = run(small_config(*SMALL_BATCHES, learning), tmp_path / "split")

    found = split["schedule"]
    assert (found["name"], found["learning_steps"] >= 1) == ("hotline", True)
    assert 0 < found["split_step_share"] <= 1
    assert 0 < found["popular_sample_share"] < 1
    assert found["num_promoted"] > 0
    assert split["metrics"] != plain["metrics"]
    ours, theirs = (each["metrics"]["test"]["logloss"] for each in (split, plain))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_auto_measures_and_chooses_a_schedule(small_config, tmp_path):
    settings = (TABLES, "budget=24KiB", "batch_size=4", "synthetic.num_samples=1200")
    plain = run(small_config(*settings, "schedule=sequential"), tmp_path / "plain")
    auto = run(small_config(*settings, "schedule=auto"), tmp_path / "auto")

    measured, chosen = auto["schedule"]["measured"], auto["schedule"]["chosen"]
    assert [each["name"] for each in measured] == ["sequential", "lookahead", "lookahead"]
    assert all(each["step_ms"] > 0 for each in measured)
    assert chosen["name"] in ("sequential", "lookahead")
    assert auto["metrics"] == plain["metrics"]


@pytest.mark.parametrize(
    ("settings", "steps", "num_judged"),
    [
        (("eval.every_steps=4",), [4, 8, 12], 150),
        (
            ("batch_size=8", "eval.every_steps=7", "eval.max_samples=20", "eval.batch_size=16"),
            [*range(7, 225, 7)],
            20,
        ),
        (("batch_size=600", "epochs=2"), [1, 2, 3, 4, 5], 150),
    ],
)
def test_a_history_covers_every_step_once_and_evaluates_when_asked_to(
    small_config, tmp_path, settings, steps, num_judged
):
    record = run(small_config(*settings), tmp_path / "run")

    lines, last = history(tmp_path / "run"), record["throughput"]["num_steps"]
    judged = [line for line in lines if "validation" in line]
    assert [line["step"] for line in judged] == [*steps, last]
    assert {line["validation"]["num_samples"] for line in judged[:-1]} == {num_judged}
    assert set(lines[-1]) >= {"validation", "test", "step"}
    ends = [line["step"] for line in lines if "train_loss" in line]
    assert (ends[-1], len(ends)) == (last, min(last, 100))
    assert {end - start for start, end in pairwise([0, *ends])} <= ({1} if last <= 100 else {2, 3})


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_is_evaluated_ten_times_an_epoch_by_default(small_config, tmp_path, epochs):
    run(small_config("batch_size=40", f"epochs={epochs}", "eval.split=test"), tmp_path / "run")

    steps = [line["step"] for line in history(tmp_path / "run") if "test" in line]
    assert len(steps) == 10 * epochs
    assert {end - start for start, end in pairwise([0, *steps])} == {4, 5}
    assert steps[-1] == 45 * epochs


@pytest.mark.slow(but=("recsys",))
@pytest.mark.parametrize("provider", ["recsys", "torch"])
def test_a_rate_that_has_fallen_to_nothing_moves_nothing(small_config, tmp_path, provider):
    settings = [f"embeddings={provider}", "lr_schedule.decay=linear", "lr_schedule.decay_steps=4"]
    records = [
        run(small_config(*settings, f"epochs={epochs}"), tmp_path / str(epochs))
        for epochs in (1, 2)
    ]

    # After step 4 of 15 no rate is left, so a second epoch changes no prediction.
    assert records[0]["metrics"] == records[1]["metrics"]


def test_bf16_learns_as_fp32_does_and_evaluates_as_it_trained(small_config, tmp_path):
    settings = ["synthetic.num_samples=12000", "optimizer.lr=0.05", "eval.max_samples=500"]
    fp32 = run(small_config(*settings), tmp_path / "fp32")

    bf16 = run(small_config(*settings, "precision=bf16"), tmp_path / "bf16")

    losses = [record["metrics"]["test"]["logloss"] for record in (fp32, bf16)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert evaluated(tmp_path / "bf16") == bf16["metrics"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [(), ("budget=8KiB",)], ids=str)
@pytest.mark.filterwarnings("ignore:device 'cuda' of the run", "ignore:schedule=")
def test_training_on_a_gpu_evaluates_to_the_metrics_of_its_run(small_config, tmp_path, settings):
    record = run(small_config("device=cuda", *settings), tmp_path / "run")

    assert record["environment"]["gpu"] is not None
    for split, metrics in evaluated(tmp_path / "run").items():
        assert metrics["logloss"] == pytest.approx(record["metrics"][split]["logloss"], rel=1e-4)


def test_a_loss_that_is_no_number_stops_with_a_record(small_config, tmp_path):
    with pytest.raises(TrainingDiverged, match=r"lower optimizer\.lr"):
        run(small_config("optimizer.lr=1e30"), tmp_path / "run")

    record = record_of(tmp_path / "run")
    assert record["status"] == "diverged"
    assert record["metrics"] == {"test": None, "validation": None}
    assert record["throughput"]["num_steps"] >= 1


def test_a_run_that_diverges_at_the_last_evaluation_has_no_metrics_of_an_earlier_one(
    small_config, tmp_path, monkeypatch
):
    def diverge(*_):
        raise TrainingDiverged("logits are not finite")

    before_each(monkeypatch, "recsys.train.evaluate:with_ranking", diverge)

    with pytest.raises(TrainingDiverged):
        run(small_config("eval.every_steps=4"), tmp_path / "run")

    assert any("validation" in entry for entry in history(tmp_path / "run"))
    assert record_of(tmp_path / "run")["metrics"] == {"test": None, "validation": None}


FOLDER = "recsys.train.run_folder:RunFolder"


@pytest.mark.parametrize("moment", ["save_model", "append_history"])
def test_a_second_ctrl_c_keeps_what_was_measured(small_config, tmp_path, monkeypatch, moment):
    def interrupt_twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before_each(monkeypatch, f"{FOLDER}.{moment}", interrupt_twice)

    with pytest.raises(KeyboardInterrupt):
        run(small_config("eval.every_steps=4"), tmp_path / "run")

    record = record_of(tmp_path / "run")
    assert record["status"] == "interrupted"
    assert record["throughput"]["num_steps"] >= 1
    assert not list((tmp_path / "run").glob("*.partial"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:.* is interrupted")
@pytest.mark.parametrize(
    ("moment", "split", "status", "num_validated"),
    [
        (f"{FOLDER}.save_model", None, "finished", 150),  # after the last step
        ("recsys.train.evaluate:with_ranking", "test", "interrupted", 60),  # while it trained
        ("recsys.train.evaluate:with_ranking", "validation", "finished", 150),  # too late
    ],
)
def test_ctrl_c_after_the_last_step_costs_no_metrics_that_are_computed(
    small_config, tmp_path, monkeypatch, moment, split, status, num_validated
):
    def interrupt(*arguments):
        # Not in `recsys evaluate`, after the run.
        if not (tmp_path / "run" / "run.json").exists() and (split is None or split in arguments):
            signal.raise_signal(signal.SIGINT)

    before_each(monkeypatch, moment, interrupt)

    record = run(small_config("eval.max_samples=60"), tmp_path / "run")

    assert record["status"] == status
    assert record["metrics"]["test"] == evaluated(tmp_path / "run")["test"]
    assert record["metrics"]["validation"]["num_samples"] == num_validated
    ends = [entry for entry in history(tmp_path / "run") if "test" in entry]
    assert len(ends) == (status == "finished")


def test_a_model_that_cannot_be_written_leaves_no_half_of_it(small_config, tmp_path, monkeypatch):
    def fill_the_disk(state, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fill_the_disk)

    with pytest.raises(OSError, match="No space left"):
        run(small_config(), tmp_path / "run")

    assert record_of(tmp_path / "run")["status"] == "failed"
    assert not list((tmp_path / "run").glob("model*"))


def test_a_folder_that_cannot_hold_a_run_is_refused_and_not_touched(
    small_config, tmp_path, monkeypatch
):
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(AlreadyExists, match="--resume"):
        run(small_config(), tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        run(small_config(), tmp_path / "notes" / "run")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="no permission"):
        run(small_config(), tmp_path / "run")

    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
