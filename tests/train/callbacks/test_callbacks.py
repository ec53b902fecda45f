"""When the methods of callbacks are called, and what their errors do."""

import json
import subprocess
import sys

import pytest

from recsys.cli import main
from recsys.errors import CallbackFailed
from recsys.train import Callback, train


class Killed(BaseException):
    """As a kill, but the checkpoint that is being written is completed."""


class Notes(Callback):
    """Notes every call, with what it was given."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, run_dir, record):
        assert run_dir.is_dir()
        self.calls.append(("start", record["throughput"]["num_samples"]))

    def on_report(self, report):
        self.calls.append(("report", dict(report)))

    def on_validation_end(self, evaluation):
        self.calls.append(("evaluation", dict(evaluation)))

    def on_save_checkpoint(self, checkpoint):
        self.calls.append(("checkpoint", dict(checkpoint)))

    def on_fit_end(self, record):
        self.calls.append(("end", record["status"]))

    def of(self, name):
        return [what for each, what in self.calls if each == name]


class Fails(Callback):
    """Raises in one of its methods."""

    def __init__(self, method):
        def fail(*_):
            raise KeyError("nothing of that name")

        setattr(self, method, fail)


def run(config, folder, *callbacks, **options):
    return train(config, folder, callbacks=callbacks, show_progress=False, **options)


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_a_callback_is_told_of_every_line_of_the_history_but_the_last(small_config, tmp_path):
    notes = Notes()

    run(small_config("eval.every_steps=4"), tmp_path / "run", notes)

    told = [what for name, what in notes.calls if name in ("report", "evaluation")]
    assert told == history(tmp_path / "run")[:-1]
    assert len(notes.of("report")) == 15
    assert [each["step"] for each in notes.of("evaluation")] == [4, 8, 12]
    assert notes.calls[0] == ("start", 0)
    assert notes.calls[-1] == ("end", "finished")


def test_a_callback_is_told_of_each_checkpoint_once_it_can_be_read(small_config, tmp_path):
    folder = tmp_path / "run" / "checkpoints"

    class Reads(Notes):
        def on_save_checkpoint(self, checkpoint):
            assert (folder / f"{checkpoint['number']:08}.json").is_file()
            super().on_save_checkpoint(checkpoint)

    reads = Reads()
    run(small_config("checkpoint.every_steps=4"), tmp_path / "run", reads)

    found = reads.of("checkpoint")
    assert [each["number"] for each in found] == [1, 2, 3, 4]
    assert [each["step"] for each in found] == [4, 8, 12, 15]
    assert [each["num_samples"] for each in found] == [512, 1024, 1536, 1800]


def test_a_checkpoint_that_cannot_be_written_is_not_told_of(small_config, tmp_path, monkeypatch):
    from recsys.train.checkpoint import save

    commit = save.commit

    def fails(folder, manifest):
        if manifest.number == 2:
            raise OSError("no space")
        commit(folder, manifest)

    monkeypatch.setattr(save, "commit", fails)
    notes = Notes()

    with pytest.warns(UserWarning, match="could not be written"):
        run(small_config("checkpoint.every_steps=4"), tmp_path / "run", notes)

    assert [each["step"] for each in notes.of("checkpoint")] == [4, 12, 15]


def test_a_state_is_saved_and_given_back_before_the_run_continues(small_config, tmp_path):
    class Counts(Notes):
        num_reports, is_resumed = 0, False

        def on_report(self, report):
            self.num_reports += 1
            if report["step"] == 7 and not self.is_resumed:
                raise Killed

        def state_dict(self):
            return {"num_reports": self.num_reports}

        def load_state_dict(self, state):
            self.is_resumed = True
            self.calls.append(("load", dict(state)))

    config = small_config("checkpoint.every_steps=4")
    with pytest.raises(Killed):
        run(config, tmp_path / "run", Notes(), Counts())

    resumed, new = Counts(), Counts()
    new.is_resumed = True
    run(config, tmp_path / "run", resumed, new, resume=True)

    assert resumed.calls[:2] == [("load", {"num_reports": 4}), ("start", 512)]
    assert new.calls[0] == ("start", 512)  # the second of its class, which the checkpoint lacks


@pytest.mark.parametrize(
    "method", ["on_train_start", "on_report", "on_validation_end", "on_save_checkpoint"]
)
def test_an_error_ends_the_run_as_failed_and_names_the_callback(small_config, tmp_path, method):
    notes, settings = Notes(), ["checkpoint.every_steps=4", "eval.every_steps=4"]
    where = rf"callback Fails: {method} raised KeyError: 'nothing of that name' \(test_callbacks.py"

    with pytest.raises(CallbackFailed, match=where) as failed:
        run(small_config(*settings), tmp_path / "run", notes, Fails(method))

    assert isinstance(failed.value.__cause__, KeyError)
    assert record_of(tmp_path / "run")["status"] == "failed"
    assert notes.of("end") == ["failed"]


def test_an_error_at_the_end_leaves_the_run_finished_and_ends_the_other_callbacks(
    small_config, tmp_path
):
    notes = Notes()

    with pytest.raises(CallbackFailed, match="callback Fails: on_fit_end raised KeyError"):
        run(small_config(), tmp_path / "run", Fails("on_fit_end"), notes)

    assert record_of(tmp_path / "run")["status"] == "finished"
    assert notes.of("end") == ["finished"]


def test_an_error_at_the_end_does_not_hide_the_one_that_ended_the_run(small_config, tmp_path):
    callbacks = Fails("on_fit_end"), Fails("on_report")

    with (
        pytest.raises(CallbackFailed, match="callback Fails 2: on_report"),
        pytest.warns(UserWarning, match="callback Fails: on_fit_end"),
    ):
        run(small_config(), tmp_path / "run", *callbacks)


def test_an_error_that_the_caller_handles_is_not_that_of_the_run(small_config, tmp_path):
    try:
        {}["of the caller"]
    except KeyError:
        with pytest.raises(CallbackFailed, match="callback Fails: on_fit_end"):
            run(small_config(), tmp_path / "run", Fails("on_fit_end"))


def test_an_interrupt_at_the_end_comes_after_the_end_of_the_other_callbacks(small_config, tmp_path):
    class Interrupted(Callback):
        def on_fit_end(self, record):
            raise KeyboardInterrupt

    notes = Notes()

    with pytest.raises(KeyboardInterrupt):
        run(small_config(), tmp_path / "run", Fails("on_fit_end"), Interrupted(), notes)

    assert notes.of("end") == ["finished"]


def test_the_configuration_names_a_class_of_the_current_folder(
    small_settings, tmp_path, monkeypatch
):
    (tmp_path / "own_callback.py").write_text(
        "from recsys.train import Callback\n"
        "class Writes(Callback):\n"
        "    def on_train_start(self, run_dir, record):\n"
        "        (run_dir / 'told').write_text(record['config']['callbacks'][0])\n"
        "class Needs(Callback):\n"
        "    def __init__(self, argument):\n"
        "        pass\n"
        "Other = dict\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_callback", raising=False)
    command = ["train", "synthetic:criteo-kaggle", *small_settings, "--run", "run"]

    def ended(name):
        return main([*command, "--set", f'callbacks=["own_callback:{name}"]'])

    assert ended("Other") == ended("Needs") == 2
    assert not (tmp_path / "run").exists()
    assert ended("Writes") == 0
    assert (tmp_path / "run" / "told").read_text() == "own_callback:Writes"


@pytest.mark.outside_ci
def test_no_package_to_log_to_is_imported_unless_a_callback_asks_for_it():
    code = """
import sys
from recsys.train import Callback, EarlyStopping, MLflow, TensorBoard, WeightsAndBiases
assert "torch" not in sys.modules
import recsys.cli, recsys.train.trainer
print({"tensorboard", "mlflow", "wandb"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout == "set()\n"


def test_a_callback_may_change_the_current_folder(small_config, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moves(Callback):
        def on_train_start(self, run_dir, record):
            monkeypatch.chdir(tmp_path / "other")

    settings = "budget=4KiB", "cold_tier=file", "checkpoint.every_steps=4", "batch_size=8"
    run(small_config(*settings), "run", Moves())

    assert record_of(tmp_path / "run")["status"] == "finished"
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not list((tmp_path / "other").iterdir())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "run"]
