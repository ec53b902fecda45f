"""Commands on runs that did not finish, or have no model, say so, and how to continue them."""

import json
import re
import signal
from pathlib import Path

import pytest

from recsys.cli import main
from recsys.config import load_config, replace
from recsys.errors import AlreadyExists
from recsys.report import format_run
from recsys.train.run_folder import RunFolder
from tests.train import resumed_runs
from tests.train.resumed_runs import SETTINGS, require_same_run, run

stop_at = resumed_runs.stop_at


@pytest.fixture
def stopped(small_config, tmp_path, stop_at):
    """Trains until Ctrl-C comes after 6 steps."""

    def make(*settings):
        stop_at((6, signal.SIGINT))
        run(small_config(*SETTINGS, *settings), tmp_path / "run")
        return str(tmp_path / "run")

    return make


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("evaluate {run}", 0),
        ("predict {run} nosuch --out {run}.parquet", 2),
        ("export {run} --to safetensors --out {run}.pt", 0),
    ],
)
def test_uses_of_the_model_of_an_interrupted_run_say_so(stopped, command, status):
    folder = stopped()

    with pytest.warns(UserWarning, match=f"{folder} is interrupted, .* --resume`"):
        assert main(command.format(run=folder).split()) == status


def test_metrics_of_an_earlier_step_than_the_model_are_said_to_be(stopped, capsys):
    said = "interrupted at step 6; metrics, if there are any, are those of the last evaluation"

    folder = stopped("eval.every_steps=4")
    main(["report", folder])

    assert re.search(said, (Path(folder) / "report.html").read_text())
    run(load_config(Path(folder) / "config.toml"), Path(folder), resume=True)
    record = RunFolder(Path(folder)).read_record()
    assert "last evaluation" not in format_run(record, Path(folder))
    assert main(["evaluate", folder]) == 0  # without a warning


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("eval.every_steps=3", "early_stopping.patience=2", "early_stopping.min_delta=0.9"),
    ],
    ids=["to its last step", "stopped early"],
)
def test_a_finished_run_that_saved_no_model_is_continued_to_save_it(
    small_config, tmp_path, capsys, settings
):
    config = small_config(*SETTINGS, *settings)
    expected = run(config, tmp_path / "expected")
    folder = tmp_path / "run"
    run(replace(config, save_model=False), folder)

    assert main(["evaluate", str(folder)]) == 2

    command = f"train --run {folder} --resume --set save_model=true"
    assert f"continue it by `recsys {command}`" in capsys.readouterr().err
    assert main(command.split()) == 0
    record = RunFolder(folder).read_record()
    assert (record["status"], record["metrics"]) == ("finished", expected["metrics"])
    assert record["throughput"]["num_steps"] == expected["throughput"]["num_steps"]
    require_same_run(folder, tmp_path / "expected")
    assert main(command.split()) == 0
    assert f"{folder} is finished" in capsys.readouterr().err


def test_a_finished_run_without_model_and_checkpoint_says_what_to_do(small_config, tmp_path):
    config = small_config(*SETTINGS, "checkpoint.every_steps=0", "save_model=false")
    record = run(config, tmp_path / "run")
    assert run(config, tmp_path / "run", resume=True) == json.loads(json.dumps(record))

    with pytest.raises(AlreadyExists, match=r"no checkpoint to continue from: .*choose another"):
        run(replace(config, save_model=True), tmp_path / "run", resume=True)
