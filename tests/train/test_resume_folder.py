"""What a run to resume is found with: its folder, configuration, data, rows, signals."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import EarlyStoppingConfig, Keys, ScheduleConfig, replace
from recsys.datasets.criteo import prepare_criteo_kaggle
from recsys.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigError,
    StoreError,
    TrainingDiverged,
)
from recsys.train.checkpoint import Checkpoints, newest
from recsys.train.checkpoint.format import read_blocks, read_manifest, read_piece
from recsys.train.progress import Progress
from recsys.train.resume import resumed_config
from recsys.train.run_folder import RunFolder
from tests.train.resumed_runs import (
    CASES,
    SETTINGS,
    TIERED,
    Killed,
    require_same,
    require_same_run,
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


def test_a_finished_run_continues_with_more_epochs(small_config, tmp_path):
    config = small_config(*SETTINGS, *TIERED)
    run(config, tmp_path / "whole")
    run(replace(config, epochs=1), tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()

    again = run(replace(config, epochs=1), tmp_path / "run", resume=True)

    assert again == json.loads(before)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    record = run(config, tmp_path / "run", resume=True)
    assert record["resumed"] == [{"step": 15, "checkpoint": 4}]
    require_same(
        load_file(tmp_path / "run" / "model.safetensors"),
        load_file(tmp_path / "whole" / "model.safetensors"),
    )


def test_a_run_killed_in_its_last_evaluation_ends_with_it(
    small_config, tmp_path, stop_at, monkeypatch
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_model", kill)
        with pytest.raises(Killed):
            run(config, tmp_path / "run")
    record = run(config, tmp_path / "run", resume=True)

    assert record["status"] == "finished"
    assert record["throughput"]["num_steps"] == 30
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_without_a_complete_checkpoint_a_run_starts_from_the_first_sample(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS, "checkpoint.every_steps=20")
    run(config, tmp_path / "whole")

    run_and_resume(config, tmp_path / "run", [(13, None)], stop_at)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_new_folder_may_be_resumed(small_config, tmp_path):
    record = run(small_config(*SETTINGS), tmp_path / "run", resume=True)

    assert record["status"] == "finished"


def test_the_model_of_a_finished_run_without_checkpoints_is_kept(small_config, tmp_path):
    config = small_config(*SETTINGS, "checkpoint.every_steps=0", "epochs=1")
    run(config, tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()

    with pytest.raises(AlreadyExists, match=r"checkpoint to continue from: none could be written"):
        run(replace(config, epochs=2), tmp_path / "run", resume=True)

    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_run_told_to_writes_no_checkpoint_at_ctrl_c(small_config, tmp_path, stop_at):
    stop_at((5, signal.SIGINT))

    record = run(small_config(*SETTINGS, "checkpoint.every_steps=0"), tmp_path / "run")

    assert record["status"] == "interrupted"
    assert record["checkpoints"] is None
    assert not (tmp_path / "run" / "checkpoints").exists()


FAE = CASES["fae"]


@pytest.mark.in_ci("batch_size=32", "epochs=1", "schedule=fae")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("batch_size=32",)),
        ((), ("seed=1",)),
        ((), ("optimizer.lr=0.2",)),
        ((), ("model.over_arch=[4, 1]",)),
        ((), ("lr_schedule.warmup_steps=3",)),
        ((), ("permutation_seed=1",)),
        ((), ("synthetic.seed=2",)),
        ((), ("epochs=1",)),
        ((), ("schedule=fae",)),
        ((), ("model.pooling.cat_1=mean",)),
        (("model.pooling.cat_1=mean",), ()),
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


@pytest.fixture
def prepare(raw_line, tmp_path):
    """Makes a store with a name, a number of samples, and of values of each table."""

    def prepare(name, num_lines, num_values=1):
        lines = (
            raw_line(str(line % 3 // 2), [str(line % 5)] * 13, [f"{line % num_values:08x}"] * 26)
            for line in range(num_lines)
        )
        (tmp_path / "raw.txt").write_text("\n".join(lines))
        prepare_criteo_kaggle([tmp_path / "raw.txt"], tmp_path / name, show_progress=False)

    return prepare


def test_data_may_move_but_not_change(small_config, prepare, tmp_path, kill_at):
    prepare("store", 700)
    prepare("other", 700, num_values=2)  # tables of another size
    config = small_config("batch_size=64", "checkpoint.every_steps=2", f"data={tmp_path / 'store'}")
    kill_at(5, config)
    (tmp_path / "run" / "run.json").unlink()  # as after a kill
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(StoreError, match="does not exist; go to the folder in which it was"):
        run(config, tmp_path / "run", resume=True)

    with pytest.raises(ConfigError, match="was trained on other data: the fingerprint was"):
        run(replace(config, data=str(tmp_path / "other")), tmp_path / "run", resume=True)
    record = run(replace(config, data=str(tmp_path / "moved")), tmp_path / "run", resume=True)

    assert record["resumed"] == [{"step": 4, "checkpoint": 2}]


@pytest.mark.parametrize("ends", ["finished", "interrupted"])
def test_a_run_that_ended_refuses_other_data(small_config, prepare, tmp_path, stop_at, ends):
    prepare("store", 700)
    prepare("other", 701)
    config = small_config("batch_size=64", "checkpoint.every_steps=2", f"data={tmp_path / 'store'}")
    if ends != "finished":
        stop_at((5, signal.SIGINT))
    run(config, tmp_path / "its run")
    before = (tmp_path / "its run" / "run.json").read_bytes()
    other = replace(config, data=str(tmp_path / "other"), epochs=2)

    with pytest.raises(ConfigError, match=r"was trained on other data: .* --set 'init_from=.*run'"):
        run(other, tmp_path / "its run", resume=True)

    assert (tmp_path / "its run" / "run.json").read_bytes() == before
    assert run(config, tmp_path / "its run", resume=True)["status"] == "finished"


def test_a_finished_run_continues_from_a_checkpoint_that_is_named(small_config, tmp_path):
    config = small_config(*SETTINGS)
    with pytest.raises(ConfigError, match="run is not a run"):
        run(config, tmp_path / "run", resume=True, checkpoint=7)
    run(config, tmp_path / "run")
    run(config, tmp_path / "whole")

    record = run(config, tmp_path / "run", resume=True, checkpoint=7)

    assert record["resumed"] == [{"step": 28, "checkpoint": 7}]
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_used(
    small_config, tmp_path, kill_at
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    kill_at(13, config)
    block = next((tmp_path / "run" / "checkpoints" / "delta-00000003").iterdir())
    content = bytearray(block.read_bytes())
    content[-1] ^= 1
    block.write_bytes(content)
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}

    with pytest.raises(CheckpointError, match=r"delta-00000003/.*load checkpoint 2 "):
        run(config, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in files} == files
    record = run(config, tmp_path / "run", resume=True, checkpoint=2)

    assert record["resumed"] == [{"step": 8, "checkpoint": 2}]
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_state_that_lacks_an_entry_is_named(small_config, tmp_path, kill_at, monkeypatch):
    config = small_config(*SETTINGS)
    monkeypatch.setattr(
        "recsys.train.callbacks.RunCallbacks.state_dict", lambda _: {"stopped": None}
    )
    kill_at(13, config)

    with pytest.raises(CheckpointError, match=r"of checkpoint 3 .*KeyError: 'epochs'"):
        run(config, tmp_path / "run", resume=True)


def test_a_killed_run_with_rows_in_files_has_them_from_its_checkpoint(
    small_config, tmp_path, kill_at
):
    rows = tmp_path / "rows"
    config = small_config(*SETTINGS, *TIERED, "cold_tier=file", f"cold_path={rows}")
    run(config, tmp_path / "whole")
    kill_at(13, config)

    run(config, tmp_path / "run", resume=True)

    assert not list(rows.iterdir())
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_run_in_the_current_folder_may_have_rows_in_files(small_config, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")

    assert run(small_config(*TIERED, "cold_tier=file"), ".")["status"] == "finished"

    assert Path("model.safetensors").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_second_ctrl_c_while_a_checkpoint_is_written_ends_at_once(
    small_config, tmp_path, stop_at, monkeypatch
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    wait = Checkpoints.wait

    def interrupt_and_wait(checkpoints, **options):
        if checkpoints.newest == 3:
            signal.raise_signal(signal.SIGINT)
        return wait(checkpoints, **options)

    stop_at((13, signal.SIGINT))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "wait", interrupt_and_wait)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"

    run(config, tmp_path / "run", resume=True)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_the_first_checkpoint_of_a_resumed_run_has_only_updated_rows(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS, *TIERED)
    stop_at((6, signal.SIGINT), (7, signal.SIGINT))
    run(config, tmp_path / "run")
    run(config, tmp_path / "run", resume=True)

    folder = tmp_path / "run" / "checkpoints"
    last = read_piece(folder, list(read_manifest(folder).pieces)[-1])
    rows = sum(len(block.rows) for block in read_blocks(folder, last))
    assert 0 < rows <= 4 * 64  # one mini-batch


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

    assert record["status"] == "interrupted"
    assert record["throughput"]["num_steps"] == 5
    assert newest(tmp_path / "run" / "checkpoints") == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_not_finite_gets_no_checkpoint(small_config, tmp_path, monkeypatch):
    add = Progress.add

    def add_nan(progress, loss, *more):
        add(progress, loss * (torch.nan if progress.num_steps == 11 else 1), *more)

    monkeypatch.setattr(Progress, "add", add_nan)
    config = small_config(*SETTINGS, "batch_size=4")  # nine steps a report

    with pytest.raises(TrainingDiverged, match=r"after step 12: the mean loss .* is nan"):
        run(config, tmp_path / "run")

    assert newest(tmp_path / "run" / "checkpoints") == 2


def test_ctrl_c_while_a_failed_run_ends_leaves_its_record(small_config, tmp_path, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    def fail(*_args, **_kwargs):
        raise OSError("the data cannot be read")

    monkeypatch.setattr("recsys.train.trainer.evaluate_split", fail)
    monkeypatch.setattr(Checkpoints, "close", interrupt)

    with pytest.raises(KeyboardInterrupt):
        run(small_config(*SETTINGS), tmp_path / "run")

    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_the_stored_configuration_is_the_base_and_settings_change_it(small_config, tmp_path):
    config = small_config(
        "budget=1MiB", "cold_tier=file", "cold_path=rows", "schedule.lookahead.depth=4"
    )
    RunFolder.create(tmp_path / "run", config)
    (tmp_path / "more.toml").write_text("[checkpoint]\nevery_steps = 7\n")

    def resumed(*settings, data=None, file=None):
        return resumed_config(tmp_path / "run", file, settings, data)

    assert resumed() == config
    assert resumed(file=tmp_path / "more.toml").checkpoint.every_steps == 7
    assert resumed("schedule=sequential").schedule == ScheduleConfig(sequential=Keys())
    assert resumed("cold_tier=host") == replace(config, cold_tier="host", cold_path="")
    assert resumed("epochs=3", data="elsewhere") == replace(config, epochs=3, data="elsewhere")
    stopping = ("patience=2", "metric=logloss", "min_delta=0.5")
    config = small_config(*(f"early_stopping.{each}" for each in stopping))
    RunFolder.create(tmp_path / "stops", config)
    off = resumed_config(tmp_path / "stops", None, ["early_stopping.patience=0"], None)
    assert off.early_stopping == EarlyStoppingConfig()
    (tmp_path / "more.toml").write_text("checkpoint.every_steps = -1\n")
    with pytest.raises(ConfigError, match=r"more\.toml: checkpoint\.every_steps must be greater"):
        resumed("epochs=3", file=tmp_path / "more.toml")
    with pytest.raises(ConfigError, match="has no run to continue; name the data to start one"):
        resumed_config(tmp_path / "new", None, (), None)
