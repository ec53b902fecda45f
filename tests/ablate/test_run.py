"""Which cells are run, when, what is left of those that do not finish, and what is recorded."""

import json
import shutil
import signal
from statistics import fmean, stdev

import pytest

from recsys.errors import AlreadyExists, ConfigError
from recsys.report import format_ablation
from recsys.train.progress import Progress
from recsys.train.trainer import train

TWO_VARIATIONS = """
[[ablate.variations]]
name = "sgd"
[[ablate.variations]]
name = "adagrad"
optimizer.name = "adagrad"
optimizer.lr = 0.05
"""


def test_variations_take_turns_and_every_cell_is_a_run_of_its_own(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [5, 0]\n{TWO_VARIATIONS}", "early_stopping.patience=9")

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
        assert list(folder.glob("*.safetensors")) == []


def test_running_again_repeats_no_finished_cell_and_redoes_the_others(ablation, run_here, tmp_path):
    def kept():
        files = [cells / name / "run.json" for name in ("sgd-seed0", "adagrad-seed0")]
        return [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]

    cells = tmp_path / "out" / "cells"
    run_here(ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}"))
    older = json.loads((cells / "sgd-seed0" / "run.json").read_text())
    del older["config"]["row_dtype"]  # as if the key were new
    (cells / "sgd-seed0" / "run.json").write_text(json.dumps(older))
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


@pytest.mark.parametrize("change", ["", "other configuration", "no checkpoint"])
def test_a_cell_that_was_stopped_continues_from_its_checkpoint_if_it_can(
    ablation, run_here, tmp_path, monkeypatch, change
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
        assert run_here(config, train)[0]["status"] == "unfinished"
    if change == "other configuration":
        config = ablation(text, "checkpoint.every_steps=5")
    elif change == "no checkpoint":
        shutil.rmtree(cell / "checkpoints")
    if change == "other configuration":
        shutil.rmtree(tmp_path / "out" / "cells" / "sgd-seed0")

    record, _ = run_here(config, train)

    assert record["status"] == "finished"
    found, wanted = (each["cells"][1]["run"] for each in (record, expected))
    assert found["metrics"] == wanted["metrics"]
    assert found["resumed"] == ([] if change else [{"step": 6, "checkpoint": 2}])
    assert not (cell / "checkpoints").exists()


@pytest.mark.usefixtures("whole_pictures")
def test_the_table_and_the_page_are_there_behind_every_cell(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    found = []

    def look_and_train(config, run_dir, *, resume, show_progress):
        names = ("ablate.json", "report.html", "table.md", "table.csv")
        files = [tmp_path / "out" / name for name in names]
        texts = [file.read_text() if file.exists() else "" for file in files]
        found.append(["sgd" in text for text in texts])
        train(config, run_dir, show_progress=show_progress)

    run_here(config, look_and_train)

    assert found == [[False] * 4, [True] * 4]


@pytest.mark.usefixtures("whole_pictures")
def test_a_cell_that_diverges_is_an_outcome_and_the_others_go_on(ablation, run_here):
    config = ablation("[ablate]\nseeds = [0]\n[ablate.grid]\noptimizer.lr = [1e30, 0.1]")

    record, ran = run_here(config)
    again, ran_again = run_here(config)

    assert (len(ran), ran_again) == (2, [])
    assert [cell["run"]["status"] for cell in record["cells"]] == ["diverged", "finished"]
    assert record["status"] == again["status"] == "finished"
    quality = [row for row in record["rows"] if row["metric"] == "auc"]
    assert [(row["num_runs"], row["mean"] is None) for row in quality] == [(0, True), (1, False)]


@pytest.mark.usefixtures("whole_pictures")
def test_ctrl_c_keeps_what_was_measured_and_running_again_does_the_rest(ablation, run_here):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")

    def interrupted_at_the_second(config, run_dir, *, resume, show_progress):
        if run_dir.name == "adagrad-seed0":
            raise KeyboardInterrupt
        return train(config, run_dir, show_progress=show_progress)

    record, _ = run_here(config, interrupted_at_the_second)
    rest, ran = run_here(config)

    assert record["status"] == "unfinished"
    assert [cell["name"] for cell in record["cells"]] == ["sgd-seed0"]
    assert "unfinished: 1 of 2 cells" in format_ablation(record)
    assert ran == ["adagrad-seed0"]
    assert rest["status"] == "finished"


def test_a_cell_that_fails_leaves_what_was_measured(ablation, run_here, tmp_path):
    config = ablation(
        'embeddings = "torch"\n[ablate]\nseeds = [0]\n'
        "[ablate.grid]\noptimizer.name = ['sgd', 'rowwise_adagrad']"
    )

    with pytest.raises(ConfigError, match="torch"):
        run_here(config)

    record = json.loads((tmp_path / "out" / "ablate.json").read_text())
    assert record["status"] == "unfinished"
    assert [cell["name"] for cell in record["cells"]] == ["optimizer.name=sgd-seed0"]


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer.lr", "0.06"), ("synthetic.seed", "1")], ids=["keys", "data"]
)
def test_a_finished_cell_with_other_keys_or_other_data_is_refused_by_name(
    ablation, run_here, key, value
):
    text = "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'"
    run_here(ablation(text))

    with pytest.raises(AlreadyExists, match=f"cell base-seed0 .* other values of .*{key}"):
        run_here(ablation(text, f"{key}={value}"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(throughput=[]),
        lambda record: record["metrics"].update(test=[0.7]),
        lambda record: record["metrics"]["test"].update(auc="good"),
        lambda record: record.update(tiers=["host"]),
    ],
)
def test_a_damaged_cell_is_named(ablation, run_here, tmp_path, damage):
    config = ablation("[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'")
    run_here(config)
    file = tmp_path / "out" / "cells" / "base-seed0" / "run.json"
    record = json.loads(file.read_text())
    damage(record)
    file.write_text(json.dumps(record))

    with pytest.raises(ConfigError, match=r"cell base-seed0: .* is damaged"):
        run_here(config)


def test_numbers_of_the_table_are_those_of_the_cells(ablation, run_here, tmp_path):
    config = ablation(
        f"[ablate]\nseeds = [0, 1]\ntarget_auc = 0.3\neval_every_samples = 256\n{TWO_VARIATIONS}"
    )

    record, _ = run_here(config)

    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    for variation in ("sgd", "adagrad"):
        expected = {"auc": [], "seconds_to_target_auc": []}
        for seed in (0, 1):
            folder = tmp_path / "out" / "cells" / f"{variation}-seed{seed}"
            history = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
            evaluated = [entry for entry in history if entry.get("test")]
            expected["auc"].append(evaluated[-1]["test"]["auc"])
            reached = [entry for entry in evaluated if entry["test"]["auc"] >= 0.3]
            expected["seconds_to_target_auc"].append(reached[0]["train_seconds"])
        for metric, values in expected.items():
            row = rows[variation, metric]
            assert row["values"] == values
            assert (row["mean"], row["std"]) == (fmean(values), stdev(values))
            assert (row["min"], row["max"]) == (min(values), max(values))
            assert (row["num_runs"], row["num_cells"]) == (2, 2)
    assert format_ablation(record) + "\n" == (tmp_path / "out" / "table.md").read_text()


def test_cells_of_other_commits_are_told_apart(ablation, run_here, tmp_path):
    config = ablation(f"[ablate]\nseeds = [0]\n{TWO_VARIATIONS}")
    run_here(config)
    file = tmp_path / "out" / "cells" / "sgd-seed0" / "run.json"
    record = json.loads(file.read_text())
    record["environment"]["commit"] = "older"
    file.write_text(json.dumps(record))

    record, _ = run_here(config)

    assert record["environment"]["commit"][0] == "older"
    assert "Cells were run with different commit: older, " in format_ablation(record)
