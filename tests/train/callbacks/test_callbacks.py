"""When the methods of callbacks are called, and what their errors do."""

import json
import sys

import pytest

from recsys.errors import CallbackFailed
from recsys.train import Callback
from tests.commands import recsys, refused
from tests.train.resumed_runs import Killed, record_of, run


class Notes(Callback):
    """Notes every call, with what it was given."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, run_dir, record):
        self.calls.append(("start", record["throughput"]["num_samples"]))

    def on_report(self, report):
        self.calls.append(("report", dict(report)))

    def on_validation_end(self, evaluation):
        self.calls.append(("evaluation", dict(evaluation)))

    def on_fit_end(self, record):
        self.calls.append(("end", record["status"]))

    def of(self, *names):
        return [what for name, what in self.calls if name in names]


class Fails(Callback):
    """Raises in one of its methods."""

    def __init__(self, method):
        def fail(*_):
            raise KeyError("nothing of that name")

        setattr(self, method, fail)


def test_a_callback_is_told_of_every_line_of_the_history(small_config, tmp_path):
    notes, folder = Notes(), tmp_path / "run"

    run(small_config("eval.every_steps=4"), folder, callbacks=[notes])

    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert notes.of("report", "evaluation") == history[:-1]
    assert [each["step"] for each in notes.of("evaluation")] == [4, 8, 12]
    assert (notes.calls[0], notes.calls[-1]) == (("start", 0), ("end", "finished"))


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
        run(config, tmp_path / "run", callbacks=[Notes(), Counts()])

    resumed, new = Counts(), Counts()
    new.is_resumed = True
    run(config, tmp_path / "run", callbacks=[resumed, new], resume=True)

    assert resumed.calls[:2] == [("load", {"num_reports": 4}), ("start", 512)]
    assert new.calls[0] == ("start", 512)  # the second of its class, which the checkpoint lacks


@pytest.mark.parametrize(
    ("method", "status"),
    [
        ("on_train_start", "failed"),
        ("on_report", "failed"),
        ("on_validation_end", "failed"),
        ("on_fit_end", "finished"),
    ],
)
def test_an_error_names_the_callback_and_ends_the_others(small_config, tmp_path, method, status):
    notes, settings = Notes(), ["checkpoint.every_steps=4", "eval.every_steps=4"]

    with pytest.raises(CallbackFailed, match=f"Fails: {method} .*KeyError.*callbacks.py") as failed:
        run(small_config(*settings), tmp_path / "run", callbacks=[Fails(method), notes])

    assert isinstance(failed.value.__cause__, KeyError)
    assert record_of(tmp_path / "run")["status"] == status
    assert notes.of("end") == ([] if method == "on_train_start" else [status])


def test_an_error_at_the_end_does_not_hide_the_one_that_ended_the_run(small_config, tmp_path):
    callbacks = Fails("on_fit_end"), Fails("on_report")

    with (
        pytest.raises(CallbackFailed, match="Fails 2: on_report"),
        pytest.warns(UserWarning, match="Fails: on_fit_end"),
    ):
        run(small_config(), tmp_path / "run", callbacks=callbacks)


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
    command = ["train", "synthetic:criteo-kaggle", *small_settings, "--run", "run", "--set"]

    for name in ("Other", "Needs"):
        assert name in refused(*command, f'callbacks=["own_callback:{name}"]')
        assert not (tmp_path / "run").exists()
    recsys(*command, 'callbacks=["own_callback:Writes"]')
    assert (tmp_path / "run" / "told").read_text() == "own_callback:Writes"


def test_a_callback_may_change_the_current_folder(small_config, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moves(Callback):
        def on_train_start(self, run_dir, record):
            monkeypatch.chdir(tmp_path / "other")

    settings = "budget=4KiB", "cold_tier=file", "checkpoint.every_steps=4", "batch_size=8"
    run(small_config(*settings), "run", callbacks=[Moves()])

    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not list((tmp_path / "other").iterdir())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "run"]
