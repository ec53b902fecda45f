"""A run that was stopped and continued is the uninterrupted run, to the last bit."""

import gc
import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import ScheduleConfig
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.errors import (
    AlreadyExists,
    CheckpointError,
    ColdTierError,
    ConfigError,
    TrainingDiverged,
)
from recsys.pipeline.stalls import stage_seconds
from recsys.train.build import build_model, choose_plan, open_source
from recsys.train.checkpoint import load_checkpoint, newest
from recsys.train.checkpoint.contents import TableArrays
from recsys.train.progress import Progress
from recsys.train.resume import resumed_config
from recsys.train.run_checkpoints import RunCheckpoints
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train

TIMES = ("train_seconds", "samples_per_second")
# 15 steps an epoch; a report every step, so each checkpoint is between two reports or at one.
SETTINGS = (
    "synthetic.table_sizes=[900, 700, 1, 800]",
    "batch_size=128",
    "epochs=2",
    "optimizer.name=adagrad",
    "checkpoint.every_steps=4",
    "checkpoint.every_seconds=0",
    "num_threads=1",
)
TIERED = ("budget=24KiB", "batch_size=64")


class Killed(BaseException):
    """As a kill: no code of the run expects it."""


@pytest.fixture
def stop_at(monkeypatch):
    """Stops runs after these steps, each in turn; a signal, or `Killed` for None."""

    def plan(*stops):
        add, left = Progress.add, list(stops)

        def add_and_stop(progress, *step):
            add(progress, *step)
            if left and progress.num_steps == left[0][0]:
                what = left.pop(0)[1]
                if what is None:
                    raise Killed
                signal.raise_signal(what)

        monkeypatch.setattr(Progress, "add", add_and_stop)

    return plan


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Flushing takes most of the time of short runs; no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run(config, folder, **options):
    return train(config, folder, show_progress=False, **options)


def run_and_resume(config, folder, stops, stop_at, *changed):
    """Until it is finished, with one of the other configurations after each stop, if there are."""
    stop_at(*stops)
    configs = [config, *changed] if changed else [config] * (1 + len(stops))
    for number, each in enumerate(configs):
        try:
            record = run(each, folder, resume=number > 0)
        except Killed:
            continue
    assert record["status"] == "finished"
    return record


def history(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def last_state(config, folder):
    """The optimizers' state and the run's, in the last checkpoint."""
    config = replace(config, cold_tier="host", cold_path="")
    source = open_source(config)
    model, optimizers = build_model(config, source, choose_plan(config, source))
    state = load_checkpoint(folder / "checkpoints", model=model.model, optimizers=optimizers)
    return [optimizer.state_dict() for optimizer in optimizers], state


def require_same(found, expected, place=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            require_same(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            require_same(found[number], value, f"{place}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), place
    else:
        assert found == expected, place


def require_same_run(config, found, expected, *, has_checkpoints=True):
    require_same(load_file(found / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert history(found) == history(expected)
    if not has_checkpoints:
        return
    (optimizers, state), (expected_optimizers, expected_state) = (
        last_state(config, folder) for folder in (found, expected)
    )
    require_same(optimizers, expected_optimizers)
    for each in (state, expected_state):
        each["progress"].pop("reported_seconds")
    require_same(state["loader"], expected_state["loader"])
    require_same(state["progress"], expected_state["progress"])


CASES = {
    "resident": (),
    "sequential": (*TIERED, "schedule.name=sequential"),
    "lookahead": (*TIERED, "schedule.depth=4"),
    "file": (*TIERED, "cold_tier=file"),
    "rates": ("lr_schedule.warmup_steps=9", "lr_schedule.decay=cosine", "eval.every_steps=5"),
    "adam": (*TIERED, "optimizer.name=adam", "optimizer.lr=0.01"),
    "rowwise": (*TIERED, "optimizer.name=rowwise_adagrad"),
    "permuted": ("schedule.permute_within_batch=true", "seed=3"),
    "torch": ("embeddings=torch",),
    "auto": (*TIERED, "batch_size=32", "schedule.name=auto"),
    "fae": ("schedule.name=fae", "budget=20KiB", "batch_size=64", "schedule.rate=20"),
    "fae at a fixed rate": (
        *("schedule.name=fae", "budget=20KiB", "batch_size=64"),
        "schedule.adaptive=false",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(small_config, tmp_path, stop_at, case):
    config = small_config(*SETTINGS, *CASES[case])
    num_steps = run(config, tmp_path / "whole")["throughput"]["num_steps"]

    stops = [(7, None), (13, signal.SIGINT), (num_steps // 2 + 6, None), (num_steps - 1, None)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")
    assert [each["step"] for each in record["resumed"]] == [
        4,
        13,
        (num_steps // 2 + 6) // 4 * 4,
        (num_steps - 1) // 4 * 4,
    ]


CHANGES = {
    "another budget": (TIERED, ("budget=32KiB",)),
    "no budget": (TIERED, ("budget=",)),
    "a budget": (("batch_size=64",), ("budget=24KiB",)),
    "rows in files": (TIERED, ("cold_tier=file",)),
    "rows in memory": ((*TIERED, "cold_tier=file"), ("cold_tier=host",)),
    "another schedule": (TIERED, ("schedule.name=sequential",)),
    "another depth": (TIERED, ("schedule.depth=4",)),
    "checkpoints by time": (TIERED, ("checkpoint.every_seconds=0.02", "checkpoint.every_steps=0")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_rows_lie_and_when_they_are_fetched_may_change(
    small_config, tmp_path, stop_at, change
):
    before, changed = CHANGES[change]
    config = small_config(*SETTINGS, *before)
    other = small_config(*SETTINGS, *before, *changed)
    run(config, tmp_path / "whole")

    stops = [(13, signal.SIGTERM), (40, None)]
    run_and_resume(config, tmp_path / "run", stops, stop_at, other, config)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("every", ["every_steps=3", "every_seconds=0.01", "every_seconds=0"])
@pytest.mark.parametrize("case", ["resident", "lookahead"])
def test_checkpoints_change_no_number_of_a_run(small_config, tmp_path, case, every):
    config = small_config(*SETTINGS, *CASES[case], "checkpoint.every_steps=0")
    with_checkpoints = small_config(*SETTINGS, *CASES[case], f"checkpoint.{every}")

    run(config, tmp_path / "without")
    record = run(with_checkpoints, tmp_path / "with")

    assert not (tmp_path / "without" / "checkpoints").exists()
    assert record["checkpoints"]["num_saved"] >= 2
    require_same_run(config, tmp_path / "with", tmp_path / "without", has_checkpoints=False)


def test_rows_that_are_copied_slowly_are_those_of_the_checkpoint(
    small_config, tmp_path, stop_at, monkeypatch
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    add_range = TableArrays.add_range

    def add_slowly(arrays, builder):
        time.sleep(0.05)  # longer than a step
        yield from add_range(arrays, builder)

    monkeypatch.setattr(TableArrays, "add_range", add_slowly)
    run_and_resume(config, tmp_path / "run", [(7, None)], stop_at)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_run_that_hotline_splits_continues_within_rounding(small_config, tmp_path, stop_at):
    settings = (*TIERED, "schedule.name=hotline", "schedule.learning_share=0.1")
    config = small_config(*SETTINGS, *settings)
    whole = run(config, tmp_path / "whole")

    stops = [(13, signal.SIGINT), (40, None)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at)

    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for key, found in load_file(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(found, expected[key], rtol=1e-3, atol=1e-4)
    lines, expected_lines = history(tmp_path / "run"), history(tmp_path / "whole")
    assert [each["step"] for each in lines] == [each["step"] for each in expected_lines]
    assert record["schedule"]["learning_steps"] == whole["schedule"]["learning_steps"]
    assert record["schedule"]["num_promoted"] >= whole["schedule"]["num_promoted"] / 2
    assert 0 < record["schedule"]["split_step_share"] <= 1


def test_the_record_of_a_resumed_run_covers_the_whole_run(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS, *TIERED)
    whole = run(config, tmp_path / "whole")

    record = run_and_resume(config, tmp_path / "run", [(13, signal.SIGINT)], stop_at)

    assert record["resumed"] == [{"step": 13, "checkpoint": 4}]
    assert whole["resumed"] == []
    assert record["checkpoints"]["num_saved"] > 0
    assert record["throughput"]["num_samples"] == whole["throughput"]["num_samples"] == 3600
    stages = stage_seconds(record["stalls"])
    del stages["evaluate"]
    assert sum(stages.values()) == pytest.approx(record["throughput"]["train_seconds"])
    assert stages["checkpoint"] > 0
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["train_seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert record["tiers"]["lookup_hit_rate"] == pytest.approx(
        whole["tiers"]["lookup_hit_rate"], abs=0.05
    )
    assert record["tiers"]["fetched_bytes"] >= whole["tiers"]["fetched_bytes"]


def test_a_finished_run_continues_with_more_epochs(small_config, tmp_path, capsys):
    config = small_config(*SETTINGS, *TIERED)
    run(config, tmp_path / "whole")
    run(replace(config, epochs=1), tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()

    again = run(replace(config, epochs=1), tmp_path / "run", resume=True)

    assert again == json.loads(before)
    assert "is finished; to train more, set epochs above 1" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    record = run(config, tmp_path / "run", resume=True)
    assert record["resumed"] == [{"step": 29, "checkpoint": 8}]
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
    small_config, tmp_path, stop_at, capsys
):
    config = small_config(*SETTINGS, "checkpoint.every_steps=20")
    run(config, tmp_path / "whole")

    run_and_resume(config, tmp_path / "run", [(13, None)], stop_at)

    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} has no complete checkpoint: training starts from the" in said
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_new_folder_may_be_resumed(small_config, tmp_path, capsys):
    record = run(small_config(*SETTINGS), tmp_path / "run", resume=True)

    assert record["status"] == "finished"
    assert "is new: training starts from the first sample" in capsys.readouterr().err


def test_the_model_of_a_finished_run_without_checkpoints_is_kept(small_config, tmp_path):
    config = small_config(*SETTINGS, "checkpoint.every_steps=0", "epochs=1")
    run(config, tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()

    with pytest.raises(AlreadyExists, match="is finished and has no checkpoint to continue from"):
        run(replace(config, epochs=2), tmp_path / "run", resume=True)

    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_run_told_to_writes_no_checkpoint_at_ctrl_c(small_config, tmp_path, stop_at, capfd):
    stop_at((5, signal.SIGINT))

    record = run(small_config(*SETTINGS, "checkpoint.every_steps=0"), tmp_path / "run")

    assert record["status"] == "interrupted"
    assert record["checkpoints"] is None
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "ending after this step; press Ctrl-C" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch_size=64", "batch_size 64: it was trained with 128"),
        ("seed=1", "seed 1: it was trained with 0"),
        ("optimizer.lr=0.2", "optimizer.lr 0.2: it was trained with 0.1"),
        ("model.over_arch=[4, 1]", r"model.over_arch \(4, 1\): it was trained with \(8, 1\)"),
        ("lr_schedule.warmup_steps=3", "lr_schedule.warmup_steps 3: it was trained with 0"),
        ("schedule.permute_within_batch=true", "schedule.permute_within_batch True: it was"),
        ("synthetic.seed=2", "synthetic.seed 2: it was trained with 0"),
        ("epochs=1", "epochs 1: it was trained with 2; epochs may only become more"),
        ("schedule.name=fae", "schedule.name 'fae': it was trained with ''"),
    ],
)
def test_what_decides_the_numbers_of_a_run_may_not_change(
    small_config, tmp_path, stop_at, setting, message
):
    stop_at((5, None))
    with pytest.raises(Killed):
        run(small_config(*SETTINGS), tmp_path / "run")

    with pytest.raises(ConfigError, match=f"run cannot continue with {message}"):
        run(small_config(*SETTINGS, setting), tmp_path / "run", resume=True)


def test_the_budget_of_faes_schedule_may_not_change(small_config, tmp_path, stop_at):
    settings = (*SETTINGS, *CASES["fae"])
    stop_at((5, None))
    with pytest.raises(Killed):
        run(small_config(*settings), tmp_path / "run")

    with pytest.raises(
        ConfigError, match=r"with budget '24KiB': .* '20KiB' and schedule.name 'fae'"
    ):
        run(small_config(*settings, "budget=24KiB"), tmp_path / "run", resume=True)


def test_data_may_move_but_not_change(small_config, raw_line, tmp_path, stop_at):
    def prepare(name, num_lines):
        lines = (raw_line(str(line % 3 // 2), [str(line % 5)] * 13) for line in range(num_lines))
        (tmp_path / "raw.txt").write_text("\n".join(lines))
        prepare_criteo_kaggle([tmp_path / "raw.txt"], tmp_path / name, show_progress=False)

    prepare("store", 700)
    prepare("other", 701)
    config = small_config("batch_size=64", "checkpoint.every_steps=2", f"data={tmp_path / 'store'}")
    stop_at((5, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    (tmp_path / "store").rename(tmp_path / "moved")

    with pytest.raises(ConfigError, match="was trained on other data: the fingerprint was"):
        run(replace(config, data=str(tmp_path / "other")), tmp_path / "run", resume=True)
    record = run(replace(config, data=str(tmp_path / "moved")), tmp_path / "run", resume=True)

    assert record["resumed"] == [{"step": 4, "checkpoint": 2}]


def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_used(
    small_config, tmp_path, stop_at
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    stop_at((13, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    block = next((tmp_path / "run" / "checkpoints" / "delta-00000003").iterdir())
    content = bytearray(block.read_bytes())
    content[-1] ^= 1
    block.write_bytes(content)
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}

    with pytest.raises(CheckpointError, match=r"checkpoint 3: .*checkpoint 2 is whole"):
        run(config, tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in files} == files
    record = run(config, tmp_path / "run", resume=True, checkpoint=2)

    assert record["resumed"] == [{"step": 8, "checkpoint": 2}]
    require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("is_crashed", [True, False])
def test_rows_in_files_that_a_run_left_are_replaced(small_config, tmp_path, stop_at, is_crashed):
    rows = tmp_path / "rows"
    config = small_config(*SETTINGS, *TIERED, "cold_tier=file", f"cold_path={rows}")
    run(config, tmp_path / "whole")
    shutil.rmtree(rows)
    stop_at((13, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    gc.collect()  # a process that was killed has no files open
    if is_crashed:
        manifest = json.loads((rows / "arrays.json").read_text())
        (rows / "arrays.json").write_text(json.dumps(manifest | {"is_dirty": True}))
    else:
        (rows / "arrays.json").unlink()

    run(config, tmp_path / "run", resume=True)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("name", ["notes.txt", "t_cat_7.weight.bin", "folder"])
def test_other_files_among_the_rows_are_not_deleted(small_config, tmp_path, stop_at, name):
    rows = tmp_path / "rows"
    config = small_config(*SETTINGS, *TIERED, "cold_tier=file", f"cold_path={rows}")
    stop_at((5, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    if name == "folder":
        (rows / name).mkdir()
    else:
        (rows / name).write_text("mine")
    before = sorted(rows.iterdir())

    with pytest.raises(ColdTierError, match=f"{name} is not a file of the tables of this run"):
        run(config, tmp_path / "run", resume=True)

    assert sorted(rows.iterdir()) == before


def test_the_folder_of_rows_that_a_kill_left_is_removed(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS, *TIERED, "cold_tier=file")
    stop_at((5, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    (tmp_path / "run.cold").mkdir()
    (tmp_path / "run.cold" / "arrays.json").write_text("half")

    assert run(config, tmp_path / "run", resume=True)["status"] == "finished"

    assert not (tmp_path / "run.cold").exists()


def test_one_process_at_a_time_trains_in_a_folder(small_config, tmp_path, monkeypatch):
    config = small_config(*SETTINGS)
    found = []
    add = Progress.add

    def add_and_resume(progress, *step):
        add(progress, *step)
        if progress.num_steps == 2:
            with pytest.raises(ConfigError, match="another `recsys train` is at work in") as caught:
                run(config, tmp_path / "run", resume=True)
            found.append(caught)

    monkeypatch.setattr(Progress, "add", add_and_resume)
    run(config, tmp_path / "run")

    assert len(found) == 1


def test_a_second_ctrl_c_while_a_checkpoint_is_written_ends_at_once(
    small_config, tmp_path, stop_at, monkeypatch
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")
    wait = RunCheckpoints.wait

    def interrupt_and_wait(checkpoints):
        signal.raise_signal(signal.SIGINT)
        wait(checkpoints)

    stop_at((13, signal.SIGINT))
    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "wait", interrupt_and_wait)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"

    run(config, tmp_path / "run", resume=True)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


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

    with pytest.raises(TrainingDiverged, match="by step 12 the loss is not finite"):
        run(config, tmp_path / "run")

    assert newest(tmp_path / "run" / "checkpoints") == 2


def test_history_that_a_power_failure_has_shortened_is_warned_of(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS)
    stop_at((13, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    file = tmp_path / "run" / "history.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:9])

    with pytest.warns(UserWarning, match="the curves of the run have a gap"):
        run(config, tmp_path / "run", resume=True)

    assert file.read_bytes().splitlines(keepends=True)[:3] == lines[:3]
    assert json.loads(file.read_bytes().splitlines()[3])["step"] == 13


def test_the_stored_configuration_is_the_base_and_settings_change_it(small_config, tmp_path):
    config = small_config("budget=1MiB", "cold_tier=file", "cold_path=rows", "schedule.depth=4")
    RunFolder.create(tmp_path / "run", config)
    (tmp_path / "more.toml").write_text("[checkpoint]\nevery_steps = 7\n")

    def resumed(*settings, data=None, file=None):
        return resumed_config(tmp_path / "run", file, settings, data)

    assert resumed() == config
    assert resumed(file=tmp_path / "more.toml").checkpoint.every_steps == 7
    assert resumed("schedule.name=sequential").schedule == ScheduleConfig(name="sequential")
    assert resumed("cold_tier=host") == replace(config, cold_tier="host", cold_path="")
    assert resumed("epochs=3", data="elsewhere") == replace(config, epochs=3, data="elsewhere")
    with pytest.raises(ConfigError, match=r"budjet; did you mean budget\?"):
        resumed("budjet=1MiB")
    with pytest.raises(ConfigError, match="has no run to continue; name the data to start one"):
        resumed_config(tmp_path / "new", None, (), None)
