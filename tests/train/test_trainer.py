import json
import signal
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from recsys.errors import AlreadyExists, ConfigError, TrainingDiverged
from recsys.pipeline.stalls import STAGES, stage_seconds
from recsys.train.build import autocast, build_model, open_source
from recsys.train.evaluate import evaluate_run, evaluate_split, with_ranking
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train

PROVIDERS = ["recsys", "torch"]


def run(config, folder):
    return train(config, folder, show_progress=False)


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("whole_pictures")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_run_leaves_its_whole_record(small_config, tmp_path, provider):
    config = small_config(f"embeddings={provider}", "epochs=2", "seed=3")

    record = run(config, tmp_path / "run")

    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        "config.toml",
        "history.jsonl",
        "run.json",
        "model.safetensors",
    }
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert saved == json.loads(json.dumps(record))
    assert saved["status"] == "finished"
    assert saved["config"]["seed"] == 3
    assert {"cpu", "gpu", "torch", "commit", "dirty"} <= set(saved["environment"])
    assert saved["data"]["name"] == "synthetic:criteo-kaggle"
    for split in ("test", "validation"):
        assert set(saved["metrics"][split]) == {
            "auc",
            "auc_standard_error",
            "logloss",
            "normalized_entropy",
            "num_positives",
            "calibration",
            "accuracy",
            "num_samples",
        }
    assert saved["metrics"]["test"]["num_samples"] == 150
    assert saved["throughput"]["num_samples"] == 2 * 1800
    assert saved["throughput"]["num_steps"] == 2 * 15
    assert saved["peak_memory_bytes"] > 2**20


def test_a_run_on_a_budget_is_the_resident_run_and_tells_of_its_tiers(small_config, tmp_path):
    tables = "synthetic.table_sizes=[900, 700, 1, 800]"
    resident = run(small_config(tables), tmp_path / "resident")

    tiered = run(small_config(tables, "budget=20KiB", "schedule=lookahead"), tmp_path / "tiered")

    assert resident["tiers"] is None
    assert tiered["metrics"] == resident["metrics"]
    with (
        safe_open(tmp_path / "resident" / "model.safetensors", "pt") as expected,
        safe_open(tmp_path / "tiered" / "model.safetensors", "pt") as found,
    ):
        for key in expected.keys():  # noqa: SIM118  # no mapping
            assert torch.equal(found.get_tensor(key), expected.get_tensor(key))
    told = tiered["tiers"]
    assert told["cold_tier"] == "host"
    assert told["hot_bytes"] <= 20 * 1024
    assert 0 < told["unique_hit_rate"] < told["lookup_hit_rate"] < 1
    assert min(told["fetched_bytes"], told["written_back_bytes"]) > 0
    assert told["num_slots"] < told["num_rows"] == 2401
    assert tiered["stalls"]["prefetch_wait_seconds"] > 0
    assert resident["schedule"] == {"name": "sequential"}
    assert tiered["schedule"]["name"] == "lookahead"
    assert tiered["schedule"]["depth"] == 2
    assert 0 < tiered["schedule"]["mean_depth"] <= 2


def test_hotline_splits_mini_batches_and_tells_of_it(small_config, tmp_path):
    settings = ["synthetic.table_sizes=[900, 700, 1, 800]", "budget=24KiB", "batch_size=32"]
    plain, split, permuted = (
        run(small_config(*settings, *schedule), tmp_path / str(number))
        for number, schedule in enumerate(
            [
                ["schedule=sequential"],
                ["schedule=hotline", "schedule.hotline.learning_share=0.1"],
                ["schedule=sequential", "permutation_seed=1"],
            ]
        )
    )

    told = split["schedule"]
    assert told["name"] == "hotline"
    assert told["learning_steps"] >= 1
    assert 0 < told["split_step_share"] <= 1
    assert 0 < told["popular_sample_share"] < 1
    assert told["num_promoted"] > 0
    for other in (split, permuted):
        assert other["metrics"] != plain["metrics"]
        found, expected = (each["metrics"]["test"]["logloss"] for each in (other, plain))
        assert found == pytest.approx(expected, rel=1e-4)


def test_auto_chooses_and_tells_what_a_later_run_needs_to_repeat_it(small_config, tmp_path):
    settings = ["synthetic.table_sizes=[900, 700, 1, 800]", "budget=24KiB", "batch_size=4"]
    settings += ["synthetic.num_samples=1200"]
    plain = run(small_config(*settings, "schedule=sequential"), tmp_path / "plain")
    auto = run(small_config(*settings, "schedule=auto"), tmp_path / "auto")

    told = auto["schedule"]
    assert told["name"] == "auto"
    assert [each["name"] for each in told["measured"]] == ["sequential", "lookahead", "lookahead"]
    assert all(each["step_ms"] > 0 for each in told["measured"])
    assert auto["metrics"] == plain["metrics"]
    chosen = told["chosen"]
    again = [f"schedule={chosen['name']}"]
    again += [f"schedule.lookahead.depth={chosen.get('depth')}"] * ("depth" in chosen)
    assert run(small_config(*settings, *again), tmp_path / "again")["metrics"] == plain["metrics"]


@pytest.mark.in_ci("file")
@pytest.mark.parametrize("cold_tier", ["host", "file"])
def test_a_schedule_changes_when_rows_come_and_no_number(small_config, tmp_path, cold_tier):
    settings = ["synthetic.table_sizes=[900, 700, 1, 800]", "budget=24KiB", "batch_size=32"]
    settings += ["eval.every_steps=5", f"cold_tier={cold_tier}"]
    records = [
        run(small_config(*settings, *schedule), tmp_path / str(number))
        for number, schedule in enumerate(
            [["schedule=sequential"], ["schedule.lookahead.depth=4"], ["schedule=lookahead"]]
        )
    ]

    assert [record["schedule"]["name"] for record in records] == [
        "sequential",
        "lookahead",
        "lookahead",
    ]
    assert [record["schedule"]["depth"] for record in records[1:]] == [4, 2]
    assert records[0]["metrics"] == records[1]["metrics"] == records[2]["metrics"]
    losses = [
        [entry["train_loss"] for entry in history(tmp_path / str(number)) if "train_loss" in entry]
        for number in range(3)
    ]
    assert losses[0] == losses[1] == losses[2]
    models = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3)]
    assert models[0] == models[1] == models[2]


def test_a_run_with_rows_in_files_is_the_resident_run_and_leaves_no_files(small_config, tmp_path):
    tables = "synthetic.table_sizes=[900, 700, 1, 800]"
    resident = run(small_config(tables), tmp_path / "resident")

    tiered = run(small_config(tables, "budget=20KiB", "cold_tier=file"), tmp_path / "tiered")

    assert tiered["metrics"] == resident["metrics"]
    assert tiered["tiers"]["cold_tier"] == "file"
    assert tiered["tiers"]["fetched_bytes"] > 0
    assert {each.name for each in tmp_path.iterdir()} == {"resident", "tiered"}


def test_stages_add_up_to_the_time_that_samples_per_second_is_made_of(small_config, tmp_path):
    record = run(small_config(), tmp_path / "run")

    stages = stage_seconds(record["stalls"])
    assert set(stages) == set(STAGES)
    assert stages["prefetch_wait"] == 0  # every row is resident
    assert min(stages[stage] for stage in ("load", "forward", "backward", "other")) > 0
    assert record["stalls"]["binding"] in STAGES
    del stages["evaluate"]
    throughput = record["throughput"]
    assert sum(stages.values()) == pytest.approx(throughput["train_seconds"])
    assert throughput["samples_per_second"] == pytest.approx(1800 / throughput["train_seconds"])


def test_history_covers_every_sample_once_and_evaluates_when_told(small_config, tmp_path):
    run(small_config("eval.every_steps=4"), tmp_path / "run")

    entries = history(tmp_path / "run")
    training = [entry for entry in entries if "train_loss" in entry]
    assert [entry["num_samples"] for entry in training] == [
        min(128 * step, 1800) for step in range(1, 16)
    ]
    assert [entry["step"] for entry in entries if "validation" in entry] == [4, 8, 12, 15]
    assert set(entries[-1]) >= {"validation", "test", "step"}


def test_evaluations_do_not_cut_short_what_a_report_is_about(small_config, tmp_path):
    settings = ("batch_size=8", "eval.every_steps=7", "eval.max_samples=20")
    run(small_config(*settings), tmp_path / "run")

    entries = history(tmp_path / "run")
    ends = [entry["step"] for entry in entries if "train_loss" in entry]
    assert [entry["step"] for entry in entries if "validation" in entry] == [*range(7, 225, 7), 225]
    assert len(ends) == 100
    assert {end - start for start, end in pairwise([0, *ends])} == {2, 3}
    assert ends[-1] == 225


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_is_evaluated_ten_times_an_epoch_unless_told_otherwise(
    small_config, tmp_path, epochs
):
    run(small_config("batch_size=40", f"epochs={epochs}"), tmp_path / "run")

    evaluated = [entry["step"] for entry in history(tmp_path / "run") if "validation" in entry]
    assert len(evaluated) == 10 * epochs
    assert {end - start for start, end in pairwise([0, *evaluated])} == {4, 5}
    assert evaluated[-1] == 45 * epochs


@pytest.mark.usefixtures("whole_pictures")
def test_an_epoch_of_fewer_than_ten_steps_is_evaluated_behind_each(small_config, tmp_path):
    run(small_config("batch_size=600", "epochs=2"), tmp_path / "run")

    evaluated = [entry["step"] for entry in history(tmp_path / "run") if "validation" in entry]
    assert evaluated == [1, 2, 3, 4, 5, 6]


def test_evaluations_on_the_way_are_of_the_part_asked_for(small_config, tmp_path):
    settings = ("eval.every_steps=14", "num_threads=1")
    run(small_config(*settings, "eval.split=test"), tmp_path / "test")
    run(small_config(*settings, "eval.split=validation"), tmp_path / "validation")

    of_test, of_validation = (history(tmp_path / split) for split in ("test", "validation"))

    first, last = (entry for entry in of_test if "test" in entry)
    first_other, last_other = (entry for entry in of_validation if "validation" in entry)
    assert (first["step"], last["step"]) == (14, 15)
    assert [entry["step"] for entry in of_test if "validation" in entry] == [15]
    assert first["test"]["auc"] != first_other["validation"]["auc"]
    assert last["test"] == last_other["test"]


def test_a_run_told_to_saves_no_model(small_config, tmp_path):
    record = run(small_config("save_model=false"), tmp_path / "run")

    assert record["status"] == "finished"
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(small_config, tmp_path):
    def losses(name, seed):
        run(small_config(f"seed={seed}", "num_threads=1"), tmp_path / name)
        return [entry.get("train_loss") for entry in history(tmp_path / name)]

    first, again, other = losses("first", 0), losses("again", 0), losses("other", 1)

    assert first == again
    assert first != other


def test_all_providers_start_from_the_same_model_and_learn_alike(small_config, tmp_path):
    records = {
        provider: run(small_config(f"embeddings={provider}"), tmp_path / provider)
        for provider in PROVIDERS
    }

    losses = [record["metrics"]["test"]["logloss"] for record in records.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


@pytest.mark.parametrize("trained_with", PROVIDERS)
def test_a_saved_model_evaluates_to_the_metrics_of_its_run(small_config, tmp_path, trained_with):
    record = run(small_config(f"embeddings={trained_with}"), tmp_path / "run")

    found = evaluate_run(tmp_path / "run")

    assert {split: metrics.as_dict() for split, metrics in found.items()} == record["metrics"]


@pytest.mark.in_ci("recsys")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_rate_that_has_fallen_to_nothing_moves_nothing(small_config, tmp_path, provider):
    settings = [f"embeddings={provider}", "lr_schedule.decay=linear", "lr_schedule.decay_steps=4"]
    records = [
        run(small_config(*settings, f"epochs={epochs}"), tmp_path / str(epochs))
        for epochs in (1, 2)
    ]

    # Behind step 4 of 15 no rate is left, so a second epoch changes no prediction.
    assert records[0]["metrics"] == records[1]["metrics"]


@pytest.mark.in_ci("recsys")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bf16_learns_as_fp32_does_and_evaluates_as_it_trained(small_config, tmp_path, provider):
    settings = [f"embeddings={provider}", "synthetic.num_samples=12000", "optimizer.lr=0.05"]
    settings += ["eval.max_samples=500"]  # on the way
    fp32 = run(small_config(*settings), tmp_path / "fp32")

    bf16 = run(small_config(*settings, "precision=bf16"), tmp_path / "bf16")

    losses = [record["metrics"]["test"]["logloss"] for record in (fp32, bf16)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    found = evaluate_run(tmp_path / "bf16")["test"].as_dict()
    assert found == bf16["metrics"]["test"]


def test_bf16_ranks_samples_by_float32_logits(small_config):
    config = small_config("precision=bf16")
    source = open_source(config)
    model, _ = build_model(config, source)

    with autocast(config):
        _, (_, logits, _) = model(source.read(np.arange(500)))

    assert logits.dtype == torch.float32
    assert len(torch.unique(logits)) > 400


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [(), ("budget=8KiB",)], ids=str)
@pytest.mark.filterwarnings("ignore:device 'cuda' of the run", "ignore:schedule=")
def test_training_on_a_gpu_evaluates_to_the_metrics_of_its_run(small_config, tmp_path, settings):
    record = run(small_config("device=cuda", *settings), tmp_path / "run")

    found = evaluate_run(tmp_path / "run")

    assert record["environment"]["gpu"] is not None
    for split, metrics in found.items():
        assert metrics.logloss == pytest.approx(record["metrics"][split]["logloss"], rel=1e-4)


def test_the_model_file_has_the_keys_of_a_plain_dlrm(small_config, tmp_path):
    run(small_config(), tmp_path / "run")

    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        rows = file.get_slice("sparse_arch.embedding_bag_collection.embedding_bags.t_cat_3.weight")
        assert rows.get_shape() == [500, 4]
    assert "dense_arch.model._mlp.0._linear.weight" in keys
    assert "over_arch.model.1.bias" in keys


def test_evaluating_on_data_of_other_sizes_is_refused(small_config, tmp_path):
    run(small_config(), tmp_path / "run")
    config = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(config.replace("500", "501"))

    with pytest.raises(ConfigError, match=r"(?s)does not fit the model: .*t_cat_3"):
        evaluate_run(tmp_path / "run")


def test_evaluation_stops_behind_the_samples_asked_for(small_config):
    config = small_config()
    source = open_source(config)
    model, _ = build_model(config, source)

    part = evaluate_split(model, source, "train", batch_size=64, max_samples=100)
    whole = evaluate_split(model, source, "train", batch_size=64)
    in_one = evaluate_split(model, source, "train", batch_size=1800)

    assert (part.num_samples, whole.num_samples) == (100, 1800)
    assert whole.logloss == pytest.approx(in_one.logloss, rel=1e-6)
    assert model.training


@pytest.mark.usefixtures("whole_pictures")
def test_a_loss_that_is_no_number_stops_with_a_record(small_config, tmp_path):
    config = small_config("optimizer.lr=1e30")

    with pytest.raises(
        TrainingDiverged, match=r"(the loss is|logits are not).*; lower optimizer\.lr"
    ) as raised:
        run(config, tmp_path / "run")

    assert str(raised.value).count("; lower ") == 1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "diverged"
    assert record["metrics"] == {"test": None, "validation": None}
    assert record["throughput"]["num_steps"] >= 1


def test_a_run_that_diverges_at_the_last_evaluation_has_no_metrics_of_an_earlier_one(
    small_config, tmp_path, monkeypatch
):
    def diverge_at_the_end(*arguments, **parts):
        if arguments[4] is None:  # over everything
            raise TrainingDiverged("logits are not finite")
        return evaluate_split(*arguments, **parts)

    monkeypatch.setattr("recsys.train.trainer.evaluate_split", diverge_at_the_end)

    with pytest.raises(TrainingDiverged):
        run(small_config("eval.every_steps=4"), tmp_path / "run")

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert any("validation" in entry for entry in history(tmp_path / "run"))
    assert record["status"] == "diverged"
    assert record["metrics"] == {"test": None, "validation": None}


def test_the_clock_leaves_evaluations_out(small_config, tmp_path, monkeypatch):
    now = [0.0]

    def evaluate_for_an_hour(*arguments, **parts):
        now[0] += 3600
        return evaluate_split(*arguments, **parts)

    real_time = time.perf_counter
    monkeypatch.setattr("recsys.train.trainer.evaluate_split", evaluate_for_an_hour)
    monkeypatch.setattr("recsys.pipeline.stalls.time.perf_counter", lambda: real_time() + now[0])

    record = run(small_config("eval.every_steps=4"), tmp_path / "run")

    assert now[0] == 3600 * (3 + 2)
    assert record["stalls"]["evaluate_seconds"] >= now[0]
    assert record["throughput"]["train_seconds"] < 3600
    assert history(tmp_path / "run")[-1]["train_seconds"] < 3600


def test_no_training_data_is_loaded_while_the_clock_leaves_an_evaluation_out(
    small_config, tmp_path, monkeypatch
):
    source = open_source(small_config())
    begun, ended = [], []
    read = source.read

    def read_slowly(samples):
        is_training = samples[0] in source.splits["train"]
        if is_training:
            begun.append(samples[0])
            time.sleep(0.02)
        batch = read(samples)
        if is_training:
            ended.append(samples[0])
        return batch

    found = []

    def evaluate_and_look(*arguments, **parts):
        before = list(ended)
        metrics = evaluate_split(*arguments, **parts)
        time.sleep(0.02)
        found.append((before, list(begun)))
        return metrics

    monkeypatch.setattr(source, "read", read_slowly)
    monkeypatch.setattr("recsys.train.trainer.open_source", lambda _: source)
    monkeypatch.setattr("recsys.train.trainer.evaluate_split", evaluate_and_look)

    run(small_config("eval.every_steps=4", "prefetch=3"), tmp_path / "run")

    assert len(found) == 3 + 2
    for ended_before, begun_until_after in found:
        assert begun_until_after == ended_before


def test_a_run_that_fails_says_so_in_its_record(small_config, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(RunFolder, "save_model", fail)

    with pytest.raises(OSError, match="the disk is full"):
        run(small_config(), tmp_path / "run")

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert record["throughput"]["num_steps"] == 15


@pytest.mark.parametrize("moment", ["save_model", "write_history"])
@pytest.mark.usefixtures("whole_pictures")
def test_a_second_ctrl_c_keeps_what_was_measured(small_config, tmp_path, monkeypatch, moment):
    def interrupt_twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    method = {"save_model": "save_model", "write_history": "append_history"}[moment]
    monkeypatch.setattr(RunFolder, method, interrupt_twice)

    with pytest.raises(KeyboardInterrupt):
        run(small_config("eval.every_steps=4"), tmp_path / "run")

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["throughput"]["num_steps"] >= 1
    assert not list((tmp_path / "run").glob("*.partial"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_behind_the_last_step_costs_nothing(small_config, tmp_path, monkeypatch):
    save = RunFolder.save_model

    def interrupt_and_save(folder, model):
        signal.raise_signal(signal.SIGINT)
        save(folder, model)

    monkeypatch.setattr(RunFolder, "save_model", interrupt_and_save)

    record = run(small_config(), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["metrics"]["test"]["num_samples"] == 150


def test_ctrl_c_during_the_last_evaluation_ends_it_after_the_split(
    small_config, tmp_path, monkeypatch
):
    def interrupt_and_evaluate(*arguments, **parts):
        if arguments[4] is None:  # over everything
            signal.raise_signal(signal.SIGINT)
        return evaluate_split(*arguments, **parts)

    monkeypatch.setattr("recsys.train.trainer.evaluate_split", interrupt_and_evaluate)

    record = run(small_config("eval.max_samples=60"), tmp_path / "run")

    assert record["status"] == "interrupted"
    assert record["metrics"]["test"]["num_samples"] == 150
    assert record["metrics"]["validation"]["num_samples"] == 60  # while it trained
    assert not any("test" in entry for entry in history(tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert evaluate_run(tmp_path / "run")["test"].as_dict() == record["metrics"]["test"]


def test_ctrl_c_during_the_last_split_is_too_late_to_leave_anything_out(
    small_config, tmp_path, monkeypatch
):
    def interrupt_and_rank(found, model, source, split, config):
        if split == "validation":
            signal.raise_signal(signal.SIGINT)
        return with_ranking(found, model, source, split, config)

    monkeypatch.setattr("recsys.train.trainer.with_ranking", interrupt_and_rank)

    record = run(small_config("eval.max_samples=60"), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["metrics"]["validation"]["num_samples"] == 150


def test_a_second_ctrl_c_during_the_last_evaluation_keeps_the_metrics_until_then(
    small_config, tmp_path, monkeypatch
):
    def interrupt_twice(found, model, source, split, config):
        if split == "validation":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return with_ranking(found, model, source, split, config)

    monkeypatch.setattr("recsys.train.trainer.with_ranking", interrupt_twice)
    config = small_config("eval.max_samples=60")

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    found = evaluate_run(tmp_path / "run")
    assert record["status"] == "interrupted"
    assert record["metrics"]["test"] == found["test"].as_dict()
    assert record["metrics"]["validation"]["num_samples"] == 60  # while it trained


def test_a_model_that_cannot_be_written_leaves_no_half_of_it(small_config, tmp_path, monkeypatch):
    def fill_the_disk(state, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fill_the_disk)

    with pytest.raises(OSError, match=r"cannot be written: No space left.*; make room on"):
        run(small_config(), tmp_path / "run")

    assert not list((tmp_path / "run").glob("model*"))


def test_a_folder_with_something_in_it_is_not_touched(small_config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(AlreadyExists, match=r"is not empty; .* with --resume"):
        run(small_config(), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_tables_are_built(
    small_config, tmp_path, monkeypatch
):
    monkeypatch.setattr("recsys.train.trainer.build_model", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("mine")

    with pytest.raises(ConfigError, match=r"config\.toml cannot be written: .* is not a folder"):
        run(small_config(), tmp_path / "file" / "run")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"no permission to write to .*; choose another folder"):
        run(small_config(), tmp_path / "run")


def test_numbers_json_cannot_say_become_null(small_config, tmp_path):
    folder = RunFolder.create(tmp_path / "run", small_config())

    folder.append_history({"num_samples": 1, "a": [float("nan"), 1.0], "b": {"c": float("inf")}})

    assert folder.read_history() == [{"num_samples": 1, "a": [None, 1.0], "b": {"c": None}}]


def test_a_history_that_was_cut_off_lacks_its_last_line(small_config, tmp_path):
    folder = RunFolder.create(tmp_path / "run", small_config())
    for step in range(3):
        folder.append_history({"num_samples": step})
    whole = folder.history_file.read_text()

    folder.history_file.write_text(whole[:-4])
    assert folder.read_history() == [{"num_samples": 0}, {"num_samples": 1}]


def test_training_learns_what_synthetic_data_plants(small_config, tmp_path):
    config = small_config(
        "synthetic.num_samples=60000",
        "model.dense_arch=[16, 4]",
        "model.over_arch=[16, 1]",
        "optimizer.name=adagrad",
        "optimizer.lr=0.05",
        "eval.max_samples=500",
    )

    record = run(config, tmp_path / "run")

    assert record["metrics"]["test"]["auc"] > 0.68
    curve = [entry["train_loss"] for entry in history(tmp_path / "run") if "train_loss" in entry]
    assert np.mean(curve[-10:]) < np.mean(curve[:10])
