"""What a run to resume is found with: its folder, configuration, data, rows, signals."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from recsys.config import replace, to_toml
from recsys.datasets import prepare_criteo_kaggle
from recsys.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigError,
    StoreError,
    TrainingDiverged,
)
from tests.commands import recsys, refused
from tests.train.checkpoint.trainings import listed, newest
from tests.train.resumed_runs import (
    CASES,
    SETTINGS,
    TIERED,
    Killed,
    before_each,
    kill,
    load_model,
    record_of,
    require_equal,
    require_same_run,
    rows_of,
    run,
    run_and_resume,
)


@pytest.fixture
def kill_at(tmp_path, stop_at):
    """Trains a run in `run` that is killed after that step."""

    def run_until(step, config):
        stop_at((step, None))
        with pytest.raises(Killed):
            run(config, tmp_path / "run")

    return run_until


def test_a_finished_run_continues_with_more_epochs_or_from_a_checkpoint_that_is_named(
    small_config, tmp_path
):
    config, folder = small_config(*SETTINGS, *TIERED), tmp_path / "run"
    with pytest.raises(ConfigError, match="not a run"):
        run(config, folder, resume=True, checkpoint=7)
    run(config, tmp_path / "whole")
    folder.mkdir()
    (folder / "config.toml.partial").touch()  # as after a kill
    record = run(replace(config, epochs=1), folder, resume=True)  # a new folder may be resumed
    before = (folder / "run.json").read_bytes()

    assert run(replace(config, epochs=1), folder, resume=True)["metrics"] == record["metrics"]
    assert (folder / "run.json").read_bytes() == before
    more = run(config, folder, resume=True)
    number = listed(folder / "checkpoints")[1]
    again = run(config, folder, resume=True, checkpoint=number)

    assert more["resumed"] == [{"step": 15, "checkpoint": 4}]
    assert again["resumed"] == [*more["resumed"], {"step": 28, "checkpoint": number}]
    require_equal(load_model(folder), load_model(tmp_path / "whole"))


def test_a_run_killed_in_its_last_evaluation_ends_with_it(small_config, tmp_path, monkeypatch):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")

    with monkeypatch.context() as patch:
        before_each(patch, "recsys.train.evaluate:with_ranking", kill)
        with pytest.raises(Killed):
            run(config, tmp_path / "run")
    record = run(config, tmp_path / "run", resume=True)

    assert (record["status"], record["throughput"]["num_steps"]) == ("finished", 30)
    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_without_a_complete_checkpoint_a_run_starts_from_the_first_sample(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS, "checkpoint.every_steps=20")
    run(config, tmp_path / "whole")

    run_and_resume(config, tmp_path / "run", [(13, None)], stop_at)

    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_without_checkpoints_ctrl_c_writes_none_and_a_finished_run_is_not_continued(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS, "checkpoint.every_steps=0")
    stop_at((5, signal.SIGINT))
    record = run(config, tmp_path / "stopped")
    assert (record["status"], record["checkpoints"]) == ("interrupted", None)
    assert not (tmp_path / "stopped" / "checkpoints").exists()

    run(config, tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(AlreadyExists, match="no checkpoint"):
        run(replace(config, epochs=3), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


FAE = CASES["fae"]


@pytest.mark.slow(but=("batch_size=32", "epochs=1", "schedule=fae", "model.pooling.cat_1=mean"))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("batch_size=32",)),
        ((), ("seed=1",)),
        ((), ("model.over_arch=[4, 1]",)),
        ((), ("synthetic.seed=2",)),
        ((), ("epochs=1",)),
        ((), ("schedule=fae",)),
        ((), ("model.pooling.cat_1=mean",)),
        (("model.pooling.cat_1=mean",), ()),
        (("skip.random_drop.share=0.4",), ("skip.random_drop.share=0.3",)),
        (FAE, (*FAE, "budget=24KiB")),
        (FAE, (*FAE, "eval.max_samples=9")),  # of the loss that sets the rate
    ],
    ids=lambda settings: settings[-1] if settings else "nothing",
)
def test_what_decides_the_numbers_of_a_run_may_not_change(
    small_config, tmp_path, kill_at, before, after
):
    kill_at(5, small_config(*SETTINGS, *before))

    key = (after or before)[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=f"run cannot continue with {key} "):
        run(small_config(*SETTINGS, *after), tmp_path / "run", resume=True)


@pytest.mark.parametrize("ends", ["killed", "interrupted", "finished"])
def test_data_may_move_but_not_change(small_config, raw_line, tmp_path, stop_at, ends):
    for name, num_values in (("store", 1), ("other", 2)):  # tables of another size
        raw = "\n".join(
            raw_line(str(line % 3 // 2), categories=[f"{line % num_values:08x}"] * 26)
            for line in range(700)
        )
        (tmp_path / "raw.txt").write_text(raw)
        prepare_criteo_kaggle([tmp_path / "raw.txt"], tmp_path / name, show_progress=False)
    config = small_config("batch_size=64", "checkpoint.every_steps=2", f"data={tmp_path / 'store'}")
    stops = {"killed": [(5, None)], "interrupted": [(5, signal.SIGINT)], "finished": []}
    stop_at(*stops[ends])
    with contextlib.suppress(Killed):
        run(config, tmp_path / "run")
    if ends == "killed":
        (tmp_path / "run" / "run.json").unlink()
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    (tmp_path / "store").rename(tmp_path / "moved")

    with pytest.raises(StoreError, match="does not exist"):
        run(replace(config, epochs=2), tmp_path / "run", resume=True)
    other = replace(config, data=str(tmp_path / "other"), epochs=2)
    with pytest.raises(ConfigError, match="other data"):
        run(other, tmp_path / "run", resume=True)

    assert {path: path.read_bytes() for path in files} == files
    moved = replace(config, data=str(tmp_path / "moved"))
    assert run(moved, tmp_path / "run", resume=True)["status"] == "finished"


@pytest.mark.parametrize("name", ["block-00000.safetensors", "state.pt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_used(
    small_config, tmp_path, kill_at, name
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    kill_at(13, config)
    file = tmp_path / "run" / "checkpoints" / "delta-00000003" / name
    file.write_bytes(file.read_bytes()[:-1])
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}

    with pytest.raises(CheckpointError, match=r"delta-00000003/.*load checkpoint 2 "):
        run(config, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in files} == files
    record = run(config, tmp_path / "run", resume=True, checkpoint=2)

    assert record["resumed"] == [{"step": 8, "checkpoint": 2}]
    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are listed on Linux alone")
@pytest.mark.parametrize("is_named", [False, True])
def test_rows_in_files_are_those_of_the_checkpoint_and_are_closed_and_deleted(
    small_config, tmp_path, kill_at, is_named
):
    rows = tmp_path / "rows"
    named = [f"cold_path={rows}"] if is_named else []
    config = small_config(*SETTINGS, *TIERED, "cold_tier=file", *named)
    run(config, tmp_path / "whole")
    kill_at(13, config)

    run(config, tmp_path / "run", resume=True)

    require_same_run(tmp_path / "run", tmp_path / "whole")
    assert not list(tmp_path.rglob("rows/*"))
    files = [each for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)]
    places = [str(each.readlink()) for each in files]
    places += Path("/proc/self/maps").read_text().splitlines()
    assert not [place for place in places if str(tmp_path) in place]
    end = time.monotonic() + 10  # a thread of an executor ends soon after the executor is deleted
    while found := [each for each in threading.enumerate() if each.name.startswith("recsys-")]:
        assert time.monotonic() < end, found
        time.sleep(0.01)


def test_a_run_in_the_current_folder_may_have_rows_in_files(small_config, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")

    assert run(small_config(*TIERED, "cold_tier=file"), ".")["status"] == "finished"

    assert Path("model.safetensors").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_second_ctrl_c_while_a_checkpoint_is_written_ends_at_once(
    small_config, tmp_path, stop_at, monkeypatch
):
    def interrupt(checkpoints, **_):
        if checkpoints.newest == 3:
            signal.raise_signal(signal.SIGINT)

    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    stop_at((13, signal.SIGINT))
    with monkeypatch.context() as patch:
        before_each(patch, "recsys:Checkpoints.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "run")
    assert record_of(tmp_path / "run")["status"] == "interrupted"

    run(config, tmp_path / "run", resume=True)

    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_first_checkpoint_of_a_resumed_run_has_only_updated_rows(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS, *TIERED)
    stop_at((6, signal.SIGINT), (7, signal.SIGINT))
    run(config, tmp_path / "run")
    run(config, tmp_path / "run", resume=True)

    folder = tmp_path / "run" / "checkpoints"
    rows = rows_of(folder, [f"delta-{newest(folder):08}"])
    weights = [found for name, found in rows.items() if "/" not in name]
    assert 0 < sum(map(len, weights)) <= 4 * 64  # one mini-batch


def test_an_ignored_signal_stays_ignored(small_config, tmp_path, stop_at):
    stop_at((5, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(small_config(*SETTINGS), tmp_path / "run")["status"] == "finished"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_several_sigterms_end_a_run_as_one_does(small_config, tmp_path, stop_at):
    stop_at((5, signal.SIGTERM), (5, signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)

    record = run(small_config(*SETTINGS), tmp_path / "run")

    assert (record["status"], record["throughput"]["num_steps"]) == ("interrupted", 5)
    assert listed(tmp_path / "run" / "checkpoints") == [2, 1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_not_finite_gets_no_checkpoint(small_config, tmp_path, monkeypatch):
    def spoil(progress, loss, *_):
        loss.mul_(torch.nan if progress.num_steps == 11 else 1)

    before_each(monkeypatch, "recsys.train.progress:Progress.add", spoil)
    config = small_config(*SETTINGS, "batch_size=4")  # nine steps a report

    with pytest.raises(TrainingDiverged, match="after step 12"):
        run(config, tmp_path / "run")

    assert newest(tmp_path / "run" / "checkpoints") == 2


def test_settings_change_the_stored_configuration(small_config, tmp_path, kill_at):
    stopping = ("patience=2", "metric=logloss", "min_delta=0.5")
    stopping = [f"early_stopping.{each}" for each in stopping]
    rows = (*TIERED, "cold_tier=file", "schedule.lookahead.depth=4")
    config = small_config(*SETTINGS, *rows, *stopping, cold_path=str(tmp_path / "rows"))
    kill_at(5, config)
    (tmp_path / "more.toml").write_text("[checkpoint]\nevery_steps = 7\n")
    (tmp_path / "bad.toml").write_text("checkpoint.every_steps = -1\n")
    resume = ("train", "--resume", "--run", tmp_path / "run")

    assert "bad.toml: checkpoint.every_steps" in refused(*resume, "--config", tmp_path / "bad.toml")
    assert "data=other is set" in refused(*resume, config.data, "--set", "data=other")
    changed = ("schedule=sequential", "cold_tier=host", "early_stopping.patience=0")
    sets = [part for setting in changed for part in ("--set", setting)]
    recsys(*resume, "--config", tmp_path / "more.toml", *sets)

    found = record_of(tmp_path / "run")["config"]
    assert found["checkpoint"]["every_steps"] == 7
    assert (found["cold_tier"], found["cold_path"], found["epochs"]) == ("host", "", 2)
    assert found["schedule"] == "sequential"
    assert found["early_stopping"]["patience"] == 0
    assert "--resume" in refused("train", "--resume", "--run", tmp_path / "new")
    (tmp_path / "whole.toml").write_text(to_toml(small_config()))
    recsys("train", "--resume", "--run", tmp_path / "new", "--config", tmp_path / "whole.toml")


@pytest.mark.parametrize("moment", ["write_config", "append_history"])
def test_one_process_at_a_time_trains_in_a_folder(small_config, tmp_path, monkeypatch, moment):
    found = []

    def start_other(*_):
        if not found:
            found.append(None)
            resume = moment == "append_history"
            with pytest.raises(ConfigError, match="another `recsys train` is at work"):
                run(small_config(*SETTINGS, "seed=5"), tmp_path / "run", resume=resume)

    before_each(monkeypatch, f"recsys.train.run_folder:RunFolder.{moment}", start_other)
    record = run(small_config(*SETTINGS), tmp_path / "run")

    assert found
    assert (record["status"], record["config"]["seed"]) == ("finished", 0)
