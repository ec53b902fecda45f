import json
import shutil
import signal
from statistics import mean, stdev

import pytest
import torch

from recsys.ablate.config import load_ablation
from recsys.ablate.run import ablate, seconds_to_auc
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.errors import AlreadyExists, ConfigError, StoreError
from recsys.report.ablation_table import format_ablation
from recsys.train.loop.progress import Progress
from recsys.train.trainer import train

TWO_VARIATIONS = """
[[ablate.variations]]
name = "sgd"
[[ablate.variations]]
name = "adagrad"
optimizer.name = "adagrad"
optimizer.lr = 0.05
"""
# Of an ablation without tiers and without skipping.
TABULATED = ("auc", "logloss", "normalized_entropy", "calibration", "train_time", "throughput")
TABULATED += ("num_trained", "num_seen", "fast_memory", "time_to_target_auc")


@pytest.fixture
def run_here(tmp_path):
    """Runs an ablation with its cells in this process; gives its record and the cells it ran."""

    def run(config, run_cell=train):
        ran = []

        def count_and_run(config, run_dir, **options):
            ran.append(run_dir.name)
            return run_cell(config, run_dir, **options)

        record = ablate(config, tmp_path / "out", show_progress=False, run_cell=count_and_run)
        return record, ran

    return run


def test_variations_take_turns_and_every_cell_is_a_run_of_its_own(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [5, 0]\n{TWO_VARIATIONS}")

    record, ran = run_here(config)

    assert ran == ["sgd-seed5", "adagrad-seed5", "sgd-seed0", "adagrad-seed0"]
    assert record["status"] == "finished"
    assert json.loads((tmp_path / "out" / "ablate.json").read_text()) == json.loads(
        json.dumps(record)
    )
    for cell in record["cells"]:
        folder = tmp_path / "out" / "cells" / cell["name"]
        assert json.loads((folder / "run.json").read_text()) == json.loads(json.dumps(cell["run"]))
        assert cell["run"]["config"]["seed"] == cell["seed"]
        assert cell["run"]["config"]["optimizer"]["name"] == cell["variation"]
        assert not (folder / "model.safetensors").exists()


def test_running_again_repeats_no_finished_cell_and_redoes_the_others(
    ablation, run_here, tmp_path, capsys
):
    def kept():
        files = [cells / name / "run.json" for name in ("sgd-seed0", "adagrad-seed0")]
        return [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]

    cells = tmp_path / "out" / "cells"
    run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))
    before = kept()
    half_written, interrupted = cells / "sgd-seed1", cells / "adagrad-seed1"
    half_written.mkdir()
    (half_written / "history.jsonl").write_text('{"step": 1')
    interrupted.mkdir()
    record = (cells / "adagrad-seed0" / "run.json").read_text()
    (interrupted / "run.json").write_text(record.replace('"finished"', '"interrupted"'))

    record, ran = run_here(ablation(f"[ablate]\nseeds = [0, 1]\n{TWO_VARIATIONS}"))
    again, ran_again = run_here(ablation(f"[ablate]\nseeds = [0, 1]\n{TWO_VARIATIONS}"))

    assert ran == ["sgd-seed1", "adagrad-seed1"]
    assert ran_again == []
    assert kept() == before
    assert again["cells"] == json.loads(json.dumps(record["cells"]))
    said = capsys.readouterr().err
    for folder in (half_written, interrupted):
        assert f"{folder} was not finished: it is removed and run again" in said


@pytest.mark.parametrize("change", ["", "other configuration", "damaged", "no checkpoint"])
def test_a_cell_that_was_stopped_continues_from_its_checkpoint_if_it_can(
    ablation, run_here, tmp_path, capsys, monkeypatch, change
):
    text = f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"
    config = ablation(text, "checkpoint.every_steps=4")
    expected, _ = run_here(config)
    cell = tmp_path / "out" / "cells" / "adagrad-seed0"
    shutil.rmtree(cell)
    add = Progress.add

    def add_and_stop(progress, *step):
        add(progress, *step)
        if progress.num_steps == 6:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", add_and_stop)
        assert run_here(config)[0]["status"] == "unfinished"
    if change == "other configuration":
        config = ablation(text, "checkpoint.every_steps=5")
    elif change == "damaged":
        next(cell.glob("checkpoints/full-*/*.safetensors")).write_bytes(b"")
    elif change == "no checkpoint":
        shutil.rmtree(cell / "checkpoints")
    if change == "other configuration":
        shutil.rmtree(tmp_path / "out" / "cells" / "sgd-seed0")

    record, _ = run_here(config)

    assert record["status"] == "finished"
    found, wanted = (each["cells"][1]["run"] for each in (record, expected))
    assert found["metrics"] == wanted["metrics"]
    assert found["resumed"] == ([] if change else [{"step": 6, "checkpoint": 2}])
    said = capsys.readouterr().err
    assert ("it continues from its checkpoint" in said) == (change in ("", "damaged"))
    assert (f"{cell} was not finished: it is removed and run again" in said) == bool(change)
    assert not (cell / "checkpoints").exists()


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


@pytest.mark.usefixtures("whole_pictures")
def test_the_table_and_the_page_are_there_behind_every_cell(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    found = []

    def look_and_train(config, run_dir, *, show_progress):
        names = ("ablate.json", "report.html", "table.md", "table.csv")
        files = [tmp_path / "out" / name for name in names]
        texts = [file.read_text() if file.exists() else "" for file in files]
        found.append(["sgd" in text for text in texts])
        train(config, run_dir, show_progress=show_progress)

    run_here(config, look_and_train)

    assert found == [[False] * 4, [True] * 4]


def test_every_case_can_be_read_as_pairs(ablation, run_here):
    grid = "synthetic.preference_changes = [[5, 10], []]\nembeddings = ['torch']"

    record, _ = run_here(ablation(f"[ablate]\nseeds = [0]\n[ablate.grid]\n{grid}"))

    cases = [dict(pair.split("=") for pair in row["case"].split(",")) for row in record["rows"]]
    changes = [case["synthetic.preference_changes"] for case in cases]
    assert list(dict.fromkeys(changes)) == ["[5;10]", "[]"]
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


@pytest.mark.usefixtures("whole_pictures")
def test_a_cell_that_diverges_is_an_outcome_and_the_others_go_on(ablation, run_here, capsys):
    config = ablation("[ablate]\nseeds = [0]\n[ablate.grid]\noptimizer.lr = [1e30, 0.1]")

    record, ran = run_here(config)
    again, ran_again = run_here(config)

    assert (len(ran), ran_again) == (2, [])
    assert [cell["run"]["status"] for cell in record["cells"]] == ["diverged", "finished"]
    assert record["status"] == again["status"] == "finished"
    quality = [row for row in record["rows"] if row["metric"] == "auc"]
    assert [(row["num_runs"], row["mean"] is None) for row in quality] == [(0, True), (1, False)]
    assert "cell optimizer.lr=1e+30-seed0 diverged" in capsys.readouterr().err


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


@pytest.mark.usefixtures("whole_pictures")
def test_ctrl_c_keeps_what_was_measured_and_running_again_does_the_rest(ablation, run_here):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")

    def interrupted_at_the_second(config, run_dir, *, show_progress):
        if run_dir.name == "adagrad-seed0":
            raise KeyboardInterrupt
        return train(config, run_dir, show_progress=show_progress)

    record, _ = run_here(config, interrupted_at_the_second)
    rest, ran = run_here(config)

    assert record["status"] == "unfinished"
    assert [cell["name"] for cell in record["cells"]] == ["sgd-seed0"]
    assert "1 of 2 cells were run; the same command runs the rest" in format_ablation(record)
    assert ran == ["adagrad-seed0"]
    assert rest["status"] == "finished"


def test_a_cell_that_fails_is_named_and_what_was_measured_is_kept(ablation, run_here, tmp_path):
    config = ablation(
        'embeddings = "torch"\n[ablate]\nseeds = [0]\n'
        "[ablate.grid]\noptimizer.name = ['sgd', 'rowwise_adagrad']"
    )

    with pytest.raises(ConfigError, match=r"cell optimizer\.name=rowwise_adagrad-seed0: .*torch"):
        run_here(config)

    record = json.loads((tmp_path / "out" / "ablate.json").read_text())
    assert record["status"] == "unfinished"
    assert [cell["name"] for cell in record["cells"]] == ["optimizer.name=sgd-seed0"]
    assert "optimizer.name=sgd-seed0" in (tmp_path / "out" / "report.html").read_text()


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
    small_settings, run_here, tmp_path, capsys
):
    file = tmp_path / "ablation.toml"
    file.write_text("[ablate]\nseeds = [0]\n[ablate.grid]\nnum_threads = [1, 2]")
    before = torch.get_num_threads()

    try:
        record, _ = run_here(load_ablation(file, small_settings[1::2]))
    finally:
        torch.set_num_threads(before)

    assert record["environment"]["num_threads"] == [1, 2]
    assert "num_threads" not in capsys.readouterr().err


def test_a_cell_that_is_no_longer_asked_for_is_left_alone(ablation, run_here, tmp_path, capsys):
    run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))

    record, _ = run_here(ablation("[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'sgd'"))

    assert [cell["name"] for cell in record["cells"]] == ["sgd-seed0"]
    assert (tmp_path / "out" / "cells" / "adagrad-seed0" / "run.json").is_file()
    assert "kept, but not part of this ablation: adagrad-seed0" in capsys.readouterr().err


def test_a_folder_with_something_else_in_it_is_not_touched(ablation, run_here, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")

    with pytest.raises(AlreadyExists, match="neither empty nor an ablation's folder"):
        run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_two_ablations_do_not_work_in_one_folder(ablation, run_here):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")

    with pytest.raises(ConfigError, match="another `recsys ablate` is at work in"):
        run_here(config, lambda *_, **__: run_here(config))


def test_data_that_is_not_there_is_found_out_before_anything_is_written(
    ablation, run_here, tmp_path
):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}", f"data={tmp_path / 'nowhere'}")

    with pytest.raises(StoreError, match="nowhere does not exist; prepare a store"):
        run_here(config)

    assert not (tmp_path / "out").exists()
