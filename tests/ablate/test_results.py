import json
import shutil
from functools import partial

import pytest

from recsys.ablate.run import ablate
from recsys.cli import main
from recsys.errors import AlreadyExists, ConfigError
from recsys.report.ablation_table import format_ablation
from recsys.train.trainer import train
from tests.ablate.test_run import TWO_VARIATIONS

TEXT = f"[ablate]\nseeds = [0]\nbaseline = 'sgd'\n{TWO_VARIATIONS}"


@pytest.fixture
def run_here(run_here, tmp_path):
    """As of all these tests, but the results are kept in a file."""
    return partial(run_here, results=tmp_path / "kept" / "results.json")


def kept(tmp_path):
    return json.loads((tmp_path / "kept" / "results.json").read_text())


def change(tmp_path, edit):
    """Edit the file of results."""
    record = kept(tmp_path)
    edit(record)
    (tmp_path / "kept" / "results.json").write_text(json.dumps(record))


def test_cells_of_the_file_are_not_run_again_when_their_folder_is_gone(
    ablation, run_here, tmp_path
):
    first, ran_first = run_here(ablation(TEXT))
    shutil.rmtree(tmp_path / "out")

    again, ran_again = run_here(ablation(TEXT.replace("[0]", "[0, 1]")))
    fully, ran_fully = run_here(ablation(TEXT.replace("[0]", "[0, 1]")), folder="other")

    assert ran_first == ["sgd-seed0", "adagrad-seed0"]
    assert ran_again == ["sgd-seed1", "adagrad-seed1"]
    assert ran_fully == []
    assert again["status"] == fully["status"] == "finished"
    assert fully["rows"] == again["rows"]
    assert fully["differences"] == again["differences"]
    for row in first["rows"]:
        (same,) = [
            each
            for each in again["rows"]
            if (each["variation"], each["metric"]) == (row["variation"], row["metric"])
        ]
        assert same["values"][0] == row["values"][0]
    page = (tmp_path / "other" / "report.html").read_text()
    assert "or the folders of the cells are gone" in page  # in place of the curves


def test_the_file_is_small_and_has_what_tables_need(ablation, run_here, tmp_path):
    record, _ = run_here(ablation(TEXT))

    text = (tmp_path / "kept" / "results.json").read_text()
    found = json.loads(text)
    assert {key: found[key] for key in ("status", "config", "num_cells")} == json.loads(
        json.dumps({key: record[key] for key in ("status", "config", "num_cells")})
    )
    assert found["other_cells"] == []
    lines = [line for line in text.splitlines() if '"seconds_to_target_auc"' in line]
    assert len(lines) == 2
    assert max(map(len, lines)) < 5_000
    for small, whole in zip(found["cells"], record["cells"], strict=True):
        assert {key: small[key] for key in small if key != "run"} == {
            key: whole[key] for key in whole if key != "run"
        }
        for key in ("status", "config", "environment", "metrics", "throughput"):
            assert small["run"][key] == json.loads(json.dumps(whole["run"][key]))
        assert small["run"]["data"]["fingerprint"] == whole["run"]["data"]["fingerprint"]
        assert "predicted" not in small["run"]["stalls"]


def test_that_a_cell_stopped_early_is_known_when_its_folder_is_gone(ablation, run_here, tmp_path):
    config = ablation(
        "eval.every_steps = 1\nearly_stopping.patience = 1\nearly_stopping.min_delta = 0.9\n"
        "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'"
    )
    record, _ = run_here(config)
    num_samples = record["cells"][0]["run"]["throughput"]["num_samples"]

    _, ran = run_here(config, folder="other")

    assert ran == []
    told = f"1 of 1 cells stopped early, after {num_samples:,} samples."
    for folder in ("out", "other"):
        for file in ("table.md", "report.html"):
            assert told in (tmp_path / folder / file).read_text(), (folder, file)


@pytest.mark.parametrize("fails_at", ["adagrad-seed0", "sgd-seed1"])
def test_a_finished_cell_is_in_the_file_when_a_later_one_fails(
    ablation, run_here, tmp_path, fails_at
):
    def fail(config, run_dir, *, show_progress):
        if run_dir.name == fails_at:
            raise ConfigError("no")
        train(config, run_dir, show_progress=show_progress)

    with pytest.raises(ConfigError, match=f"cell {fails_at}: no"):
        run_here(ablation(TEXT.replace("[0]", "[0, 1]")), run_cell=fail)

    assert kept(tmp_path)["status"] == "unfinished"
    expected = ["sgd-seed0", "adagrad-seed0"]
    names = [cell["name"] for cell in kept(tmp_path)["cells"]]
    assert names == expected[: 1 if fails_at == "adagrad-seed0" else 2]


def test_cells_that_the_ablation_no_longer_has_stay_in_the_file(ablation, run_here, tmp_path):
    run_here(ablation(TEXT.replace("[0]", "[0, 1]")))
    before = {cell["name"]: cell for cell in kept(tmp_path)["cells"]}
    only_sgd = "[ablate]\nseeds = [1, 2]\n[[ablate.variations]]\nname = 'sgd'\n"

    record, ran = run_here(ablation(only_sgd), folder="second")
    found = kept(tmp_path)
    _, ran_at_last = run_here(ablation(TEXT.replace("[0]", "[0, 1]")), folder="third")

    assert ran == ["sgd-seed2"]
    assert [cell["name"] for cell in record["cells"]] == ["sgd-seed1", "sgd-seed2"]
    assert [cell["name"] for cell in found["cells"]] == ["sgd-seed1", "sgd-seed2"]
    others = {cell["name"]: cell for cell in found["other_cells"]}
    assert others == {name: before[name] for name in before if name != "sgd-seed1"}
    assert ran_at_last == []
    assert [cell["name"] for cell in kept(tmp_path)["other_cells"]] == ["sgd-seed2"]


def test_a_recorded_cell_of_another_commit_is_kept_and_named(ablation, run_here, tmp_path, capsys):
    run_here(ablation(TEXT))

    def make_older(record):
        record["cells"][0]["run"]["environment"] |= {"commit": "older", "dirty": False}

    change(tmp_path, make_older)

    record, ran = run_here(ablation(TEXT), folder="second")

    assert ran == []
    assert kept(tmp_path)["cells"][0]["run"]["environment"]["commit"] == "older"
    assert "commit older ran sgd-seed0" in format_ablation(record)
    assert "not all run with the same commit, but with ['older', " in capsys.readouterr().err


def test_a_recorded_cell_with_another_configuration_is_refused_by_name(
    ablation, run_here, tmp_path
):
    run_here(ablation(TEXT))
    before = (tmp_path / "kept" / "results.json").read_bytes()

    with pytest.raises(AlreadyExists) as caught:
        run_here(ablation(TEXT.replace("0.05", "0.06")), folder="second")

    file = tmp_path / "kept" / "results.json"
    assert str(caught.value) == (
        "cell adagrad-seed0 was run with another configuration: optimizer.lr is 0.06 now and was "
        f"0.05 then; take it out of {file} to run it again, or name another file with --results"
    )
    assert file.read_bytes() == before


def test_a_recorded_cell_on_other_data_is_refused_by_name(ablation, run_here, tmp_path):
    run_here(ablation(TEXT))

    def change_data(record):
        record["cells"][1]["run"]["data"]["fingerprint"] = "other"

    change(tmp_path, change_data)

    with pytest.raises(AlreadyExists, match=r"adagrad-seed0 was run with other data: fingerprint"):
        run_here(ablation(TEXT), folder="second")


def test_a_cell_of_the_folder_comes_before_that_of_the_file(ablation, run_here, tmp_path):
    record, _ = run_here(ablation(TEXT))

    def change_auc(found):
        found["cells"][0]["run"]["metrics"]["test"]["auc"] = 0.123

    change(tmp_path, change_auc)

    again, ran = run_here(ablation(TEXT))

    assert ran == []
    expected = record["cells"][0]["run"]["metrics"]["test"]["auc"]
    assert again["cells"][0]["run"]["metrics"]["test"]["auc"] == expected
    assert kept(tmp_path)["cells"][0]["run"]["metrics"]["test"]["auc"] == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("target_auc = 0.6", "recorded with ablate.target_auc None, and it is 0.6 now"),
        ("late_share = 0.5", "recorded with ablate.late_share None, and it is 0.5 now"),
    ],
)
def test_a_file_that_lacks_what_the_ablation_measures_is_refused(ablation, run_here, keys, message):
    run_here(ablation(TEXT))

    with pytest.raises(AlreadyExists, match=message):
        run_here(ablation(TEXT.replace("seeds", f"{keys}\nseeds")), folder="second")


@pytest.mark.parametrize("keys", ["target_auc = 0.3\neval_every_samples = 256", "late_share = 0.5"])
def test_what_histories_told_is_kept_without_them(ablation, run_here, tmp_path, keys):
    config = ablation(TEXT.replace("seeds", f"{keys}\nseeds"))
    record, _ = run_here(config)
    shutil.rmtree(tmp_path / "out")

    again, ran = run_here(config)

    assert ran == []
    assert again["rows"] == record["rows"]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda record: record.update(cells=3), "cell 1: it is not a JSON object"),
        (lambda record: record["cells"][0].pop("name"), "cell 1: it has no name, or no variation"),
        (lambda record: record["cells"][1].pop("run"), "cell 2: adagrad-seed0 has no seed, or no"),
        (
            lambda record: record["cells"][1].pop("eval_every_samples"),
            "cell 2: adagrad-seed0 has no eval_every_samples that is a number or null",
        ),
        (
            lambda record: record["cells"][1].update(seconds_to_target_auc="3"),
            "cell 2: adagrad-seed0 has no seconds_to_target_auc that is a number or null",
        ),
        (
            lambda record: record["cells"][0].update(late=0.7),
            "cell 1: sgd-seed0 has late quality that is neither a JSON object nor null",
        ),
        (
            lambda record: record["cells"][0]["run"].update(metrics={"test": None}),
            "cell 1: the run of sgd-seed0: it has no metrics.validation",
        ),
        (
            lambda record: record["cells"][0]["run"]["data"].pop("fingerprint"),
            "cell 1: the run of sgd-seed0: it has no data.fingerprint",
        ),
        (lambda record: record.pop("config"), "it has no config"),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(ablation, run_here, tmp_path, edit, fault):
    run_here(ablation(TEXT))
    change(tmp_path, edit)
    file = tmp_path / "kept" / "results.json"
    before = file.read_bytes()

    with pytest.raises(ConfigError) as caught:
        run_here(ablation(TEXT), folder="second")

    assert str(caught.value).startswith(f"{file} is damaged: {fault}")
    assert str(caught.value).endswith("restore the file, or name another with --results")
    assert file.read_bytes() == before
    assert not (tmp_path / "second").exists()


def test_the_file_may_not_be_the_record_of_the_folder(ablation, tmp_path):
    with pytest.raises(ConfigError, match="must name a file of its own"):
        ablate(ablation(TEXT), tmp_path / "out", results=tmp_path / "out" / "ablate.json")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_run(ablation, tmp_path):
    (tmp_path / "folder").mkdir()

    with pytest.raises(ConfigError, match="is a folder; name a file to be written"):
        ablate(ablation(TEXT), tmp_path / "out", results=tmp_path / "folder")


def test_one_ablation_at_a_time_has_the_file(ablation, run_here, train_once, tmp_path):
    refused = []

    def run_cell(config, run_dir, **options):
        with pytest.raises(ConfigError) as found:
            run_here(ablation(TEXT), folder="other")
        refused.append(str(found.value))
        return train_once(config, run_dir, **options)

    _, ran = run_here(ablation(TEXT), run_cell)
    _, ran_later = run_here(ablation(TEXT), folder="other")

    file = tmp_path / "kept" / "results.json"
    assert refused == 2 * [
        f"another `recsys ablate` is at work with {file}; wait for it to end, or name another file "
        "with --results"
    ]
    assert (len(ran), ran_later) == (2, [])
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_command_line_keeps_results(small_settings, tmp_path, capsys, monkeypatch):
    # Of an ablation that a user starts, each cell is a process, which takes seconds to start.
    monkeypatch.setattr("recsys.ablate.run.ablate", partial(ablate, run_cell=train))
    one = "[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'one'\n"
    (tmp_path / "ablation.toml").write_text(one)
    file = tmp_path / "results.json"
    command = ["ablate", str(tmp_path / "ablation.toml"), *small_settings]
    command += ["--set", "num_threads=1", "--results", str(file), "--run"]

    first = main([*command, str(tmp_path / "out")])
    before = json.loads(file.read_text())["cells"]
    again = main([*command, str(tmp_path / "other")])

    assert (first, again) == (0, 0)
    assert f"saved in {file}: the finished cells" in capsys.readouterr().out
    assert json.loads(file.read_text())["cells"] == before
    assert list((tmp_path / "other" / "cells").iterdir()) == []
