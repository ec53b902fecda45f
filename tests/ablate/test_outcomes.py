"""Finished cells: which are taken as they are, and what their record and table say."""

import json
import shutil
from statistics import mean, stdev

import pytest

from recsys._support.jit import ParallelKernel
from recsys.ablate.config import load_ablation
from recsys.ablate.run import seconds_to_auc
from recsys.datasets.criteo.prepare import prepare_criteo_kaggle
from recsys.errors import AlreadyExists, ConfigError
from recsys.report.ablation_table import format_ablation
from recsys.train.trainer import train
from tests.ablate.test_run import TWO_VARIATIONS

# Of an ablation without tiers and without skipping.
TABULATED = ("auc", "logloss", "validation_auc", "normalized_entropy", "calibration", "train_time")
TABULATED += ("throughput", "num_trained", "num_seen", "fast_memory", "time_to_target_auc")


def test_a_finished_cell_with_another_configuration_is_refused_by_name(
    ablation, run_here, tmp_path
):
    run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))
    changed = TWO_VARIATIONS.replace("0.05", "0.06")

    with pytest.raises(AlreadyExists) as caught:
        run_here(ablation(f"[ablate]\nseeds = [0]\n{changed}"))

    folder = tmp_path / "out" / "cells" / "adagrad-seed0"
    assert str(caught.value) == (
        "cell adagrad-seed0 was run with another configuration: optimizer.lr is 0.06 now and was "
        f"0.05 then; remove {folder} to run it again, or choose another folder with --run"
    )


def test_a_finished_cell_whose_data_was_made_anew_is_refused_by_name(
    ablation, run_here, raw_line, tmp_path
):
    def prepare(num_lines):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        lines = (raw_line(str(line % 3 // 2), [str(line % 5)] * 13) for line in range(num_lines))
        (tmp_path / "raw.txt").write_text("\n".join(lines))
        prepare_criteo_kaggle([tmp_path / "raw.txt"], tmp_path / "store", show_progress=False)

    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", f"data={tmp_path / 'store'}")
    prepare(200)
    run_here(config)

    _, ran_again = run_here(config)
    prepare(201)
    with pytest.raises(AlreadyExists) as caught:
        run_here(config)

    assert ran_again == []
    message = str(caught.value)
    assert "cell sgd-seed0 was run with other data: " in message
    assert " now and was " in message
    assert f"remove {tmp_path / 'out' / 'cells' / 'sgd-seed0'} to run it again" in message


def test_a_record_from_before_a_key_was_there_had_its_default(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    run_here(config)
    file = tmp_path / "out" / "cells" / "sgd-seed0" / "run.json"
    record = json.loads(file.read_text())
    del record["config"]["precision"], record["config"]["lr_schedule"]
    del record["config"]["embeddings"]
    del record["data"]["fingerprint"]
    file.write_text(json.dumps(record))

    again, ran = run_here(config)
    with pytest.raises(AlreadyExists, match="precision is 'bf16' now and was 'fp32' then"):
        run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", "precision=bf16"))

    assert ran == []
    assert {row["provider"] for row in again["rows"]} == {"recsys"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda record: {"status": "finished"}, "its config is not a JSON object"),
        (lambda record: record | {"status": None}, "it has no status"),
        (lambda record: record | {"data": None}, "its data is not a JSON object"),
        (lambda record: record | {"metrics": None}, "its metrics is not a JSON object"),
        (lambda record: record | {"metrics": {"test": None}}, "it has no metrics.validation"),
        (
            lambda record: record | {"metrics": {"test": 0.7, "validation": None}},
            "its metrics.test is neither a JSON object nor null",
        ),
        (lambda record: record | {"throughput": {}}, "it has no throughput.samples_per_second"),
        (lambda record: record | {"environment": []}, "its environment is not a JSON object"),
    ],
)
def test_a_record_that_lacks_something_is_named_with_what_it_lacks(
    ablation, run_here, tmp_path, change, fault
):
    config = ablation("[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'")
    run_here(config)
    folder = tmp_path / "out" / "cells" / "base-seed0"
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(change(record)))

    with pytest.raises(ConfigError) as caught:
        run_here(config)

    assert str(caught.value) == (
        f"{folder / 'run.json'} is damaged: {fault}; remove {folder} and train again"
    )


def test_a_record_with_a_key_that_is_no_more_is_refused_by_name(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    run_here(config)
    file = tmp_path / "out" / "cells" / "sgd-seed0" / "run.json"
    file.write_text(file.read_text().replace('"precision"', '"precise"'))

    with pytest.raises(AlreadyExists, match="refuses it: unknown key precise; did you mean"):
        run_here(config)


def test_every_case_can_be_read_as_pairs(ablation, run_here):
    grid = "model.dense_arch = [[8, 4], [4]]\nembeddings = ['torch']"

    record, _ = run_here(ablation(f"[ablate]\nseeds = [0]\n[ablate.grid]\n{grid}"))

    cases = [dict(pair.split("=") for pair in row["case"].split(",")) for row in record["rows"]]
    widths = [case["model.dense_arch"] for case in cases]
    assert list(dict.fromkeys(widths)) == ["[8;4]", "[4]"]
    assert all(case["embeddings"] == "torch" for case in cases)


def test_numbers_of_the_table_are_those_of_the_cells(ablation, run_here, tmp_path):
    config = ablation(
        f"[ablate]\nseeds = [0, 1]\ntarget_auc = 0.3\neval_every_samples = 256\n{TWO_VARIATIONS}"
    )

    record, _ = run_here(config)

    printed = format_ablation(record)
    assert [(row["variation"], row["metric"]) for row in record["rows"]] == [
        (variation, metric) for variation in ("sgd", "adagrad") for metric in TABULATED
    ]
    for row in record["rows"]:
        if row["metric"] not in ("auc", "logloss", "throughput", "time_to_target_auc"):
            continue
        expected = []
        for seed in (0, 1):
            folder = tmp_path / "out" / "cells" / f"{row['variation']}-seed{seed}"
            run = json.loads((folder / "run.json").read_text())
            history = (folder / "history.jsonl").read_text().splitlines()
            evaluated = [entry for entry in map(json.loads, history) if "test" in entry]
            reached = [entry for entry in evaluated if entry["test"]["auc"] >= 0.3]
            expected.append(
                {
                    "auc": run["metrics"]["test"]["auc"],
                    "logloss": run["metrics"]["test"]["logloss"],
                    "throughput": run["throughput"]["samples_per_second"],
                    "time_to_target_auc": reached[0]["train_seconds"] * 1e3,
                }[row["metric"]]
            )
        assert row["values"] == expected
        assert (row["mean"], row["std"]) == (mean(expected), stdev(expected))
        assert (row["min"], row["max"]) == (min(expected), max(expected))
        assert row["median"] == pytest.approx(mean(expected))
        assert (row["low"], row["high"]) == (None, None)  # of two runs there is no 95 % interval
        assert (row["num_runs"], row["num_cells"]) == (2, 2)
        if row["metric"] == "auc":
            line = next(line for line in printed.splitlines() if line.startswith(row["variation"]))
            assert line.split()[3:5] == [f"{mean(expected):.4f}", f"{stdev(expected):.4f}"]
    assert "Every mean is over 2 of 2 cells." in printed


@pytest.mark.usefixtures("whole_pictures")
def test_a_target_that_is_never_reached_is_null_and_counted(ablation, run_here):
    config = ablation(
        "[ablate]\nseeds = [0, 1]\ntarget_auc = 0.999\neval_every_samples = 256\n"
        "[[ablate.variations]]\nname = 'base'"
    )

    record, _ = run_here(config)

    assert [cell["seconds_to_target_auc"] for cell in record["cells"]] == [None, None]
    (times,) = (row for row in record["rows"] if row["metric"] == "time_to_target_auc")
    assert (times["mean"], times["median"], times["values"]) == (None, None, [None, None])
    assert (times["num_runs"], times["num_cells"]) == (0, 2)
    assert times.keys() == record["rows"][0].keys()
    printed = format_ablation(record)
    assert "No cell has a value of: seconds to test AUC 0.999." in printed


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_text(""),
        lambda file: file.write_text(file.read_text().rpartition('{"step"')[0]),
    ],
    ids=["gone", "empty", "without its last line"],
)
def test_a_finished_cell_without_its_history_does_not_count_as_short_of_the_target(
    ablation, run_here, tmp_path, damage
):
    config = ablation(
        "[ablate]\nseeds = [0]\ntarget_auc = 0.3\neval_every_samples = 256\n"
        "[[ablate.variations]]\nname = 'base'"
    )
    run_here(config)
    folder = tmp_path / "out" / "cells" / "base-seed0"
    damage(folder / "history.jsonl")

    with pytest.raises(ConfigError) as caught:
        run_here(config)

    message = str(caught.value)
    assert f"cell base-seed0 is finished, but {folder / 'history.jsonl'} is missing or" in message
    assert message.endswith(f"remove {folder} to run it again")


def test_a_history_is_not_asked_for_where_there_is_no_target(ablation, run_here, tmp_path):
    config = ablation("[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'")
    run_here(config)
    (tmp_path / "out" / "cells" / "base-seed0" / "history.jsonl").unlink()

    record, ran = run_here(config)

    assert (record["status"], ran) == ("finished", [])


def test_the_first_evaluation_at_the_target_counts():
    def entry(seconds, **evaluated):
        return {"train_seconds": seconds, "num_samples": int(seconds * 10)} | {
            split: {"auc": auc} for split, auc in evaluated.items()
        }

    history = [
        entry(1.0, validation=0.9),
        entry(2.0),
        entry(3.0, test=None),
        entry(4.0, test=0.6999),
        entry(5.0, test=0.7),
        entry(6.0, test=0.6),
        entry(7.0, test=0.8, validation=0.8),
    ]

    assert seconds_to_auc(history, "test", 0.7) == (5.0, 50)
    assert seconds_to_auc(history, "test", 0.75) == (7.0, 70)
    assert seconds_to_auc(history, "test", 0.81) is None
    assert seconds_to_auc(history, "validation", 0.7) == (1.0, 10)


def test_what_a_cell_measured_before_it_diverged_is_in_no_row(ablation, run_here):
    config = ablation(
        "[ablate]\nseeds = [0, 1]\ntarget_auc = 0.01\neval_every_samples = 256\n"
        "[[ablate.variations]]\nname = 'base'"
    )

    def diverge_late_with_one_seed(config, run_dir, *, show_progress):
        train(config, run_dir, show_progress=show_progress)
        if config.seed == 1:
            file = run_dir / "run.json"
            file.write_text(file.read_text().replace('"finished"', '"diverged"'))

    record, _ = run_here(config, diverge_late_with_one_seed)

    assert record["cells"][1]["run"]["metrics"]["test"] is not None
    assert len(record["rows"]) == len(TABULATED)
    for row in record["rows"]:
        assert (row["num_runs"], row["num_cells"]) == (1, 2), row["metric"]
        assert row["values"] == [row["mean"], None]


def test_cells_of_other_commits_are_told_apart_in_the_record(
    ablation, run_here, tmp_path, monkeypatch, capsys
):
    run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))
    file = tmp_path / "out" / "cells" / "sgd-seed0" / "run.json"
    record = json.loads(file.read_text())
    record["environment"] |= {"commit": "older", "dirty": False}
    file.write_text(json.dumps(record))
    other = json.loads((tmp_path / "out" / "cells" / "adagrad-seed0" / "run.json").read_text())

    record, _ = run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))

    assert record["environment"]["commit"] == ["older", other["environment"]["commit"]]
    assert record["environment"]["torch"] == other["environment"]["torch"]
    assert "not all run with the same commit, but with ['older', " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("num_threads", 64), ("num_cores", 64), ("python", "3.0.0"), ("cpu", "Z80")]
)
def test_cells_that_ran_on_something_else_are_announced(
    ablation, run_here, tmp_path, capsys, key, value
):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    before, _ = run_here(config)
    here = before["environment"][key]
    file = tmp_path / "out" / "cells" / "sgd-seed0" / "run.json"
    record = json.loads(file.read_text())
    record["environment"][key] = value
    file.write_text(json.dumps(record))
    assert "were not all run with the same" not in capsys.readouterr().err

    run_here(config)

    said = capsys.readouterr().err
    assert f"not all run with the same {key}, but with {[value, here]}" in said


def test_numbers_of_threads_that_were_asked_for_are_not_announced(
    small_settings, run_here, tmp_path, capsys, monkeypatch
):
    # Numbers are the same on one thread, for which kernels are compiled already.
    monkeypatch.setattr(ParallelKernel, "__call__", ParallelKernel.alone)
    file = tmp_path / "ablation.toml"
    file.write_text("[ablate]\nseeds = [0]\n[ablate.grid]\nnum_threads = [1, 2]")

    record, _ = run_here(load_ablation(file, small_settings[1::2]))

    assert record["environment"]["num_threads"] == [1, 2]
    assert "num_threads" not in capsys.readouterr().err
