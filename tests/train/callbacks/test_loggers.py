"""What callbacks write to packages that log: TensorBoard itself, and stand-ins for the others."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from recsys.cli import main
from recsys.errors import CallbackFailed, MissingDependency
from recsys.train import Callback, MLflow, TensorBoard, WeightsAndBiases, train

SETTINGS = ("checkpoint.every_steps=4", "eval.every_steps=5", "num_threads=1")


class Killed(BaseException):
    """As a kill, but the checkpoint that is being written is completed."""


class Kills(Callback):
    """Ends the run after a report."""

    def __init__(self, step):
        self.step = step

    def on_report(self, report):
        if report["step"] == self.step:
            raise Killed


def run(config, folder, *callbacks, **options):
    return train(config, folder, callbacks=callbacks, show_progress=False, **options)


def kill_and_resume(config, folder, make, step=7):
    """Ends after this step; continues after step 4, from a checkpoint, with another object."""
    with pytest.raises(Killed):
        run(config, folder, make(), Kills(step))
    return run(config, folder, make(), resume=True)


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def expected(folder, key, split=None):
    """The history's values by samples seen, but for the line at the end of the run."""
    lines = [each if split is None else each.get(split, {}) for each in history(folder)[:-1]]
    return {
        line["num_samples"]: of_line[key]
        for line, of_line in zip(history(folder), lines, strict=False)
        if key in of_line
    }


def events(folder):
    """What TensorBoard shows: values by samples seen, by tag."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder))
    found.Reload()
    shown = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    for of_tag in shown.values():
        assert len({each.step for each in of_tag}) == len(of_tag)  # none is shown twice
    return {tag: {each.step: each.value for each in of_tag} for tag, of_tag in shown.items()}


@pytest.fixture
def mlflow(monkeypatch):
    """A stand-in for MLflow that keeps what it is given, by run."""
    module, active = ModuleType("mlflow"), []
    module.runs = {}

    def start_run(run_id=None, run_name=None, **options):
        if active:
            raise RuntimeError("another run is active")
        if run_id is None:
            run_id = f"run-{len(module.runs)}"
            kept = {"name": run_name, "options": options}
            module.runs[run_id] = SimpleNamespace(params={}, metrics=[], statuses=[], **kept)
        active.append(module.runs[run_id])
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(params):
        active[-1].params.update(params)

    def log_metrics(values, step):
        active[-1].metrics.append((step, values))

    def end_run(status):
        active.pop().statuses.append(status)

    for function in (start_run, log_params, log_metrics, end_run):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


class WandbRun:
    """A stand-in for a run of Weights & Biases."""

    def __init__(self, options, new_id):
        self.options, self.id = options, options.get("id", new_id)
        self.logged, self.exits = [], []

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exits.append(exit_code)


def raises(*_, **__):
    raise OSError("the server is down")


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for Weights & Biases that keeps its runs."""
    module = ModuleType("wandb")
    module.runs = []

    def init(**options):
        module.runs.append(WandbRun(options, f"run-{len(module.runs)}"))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def by_step(logged, key):
    """The values of one key, by samples seen."""
    return {step: values[key] for step, values in logged if key in values}


def test_tensorboard_shows_the_history_over_the_samples_seen(small_config, tmp_path):
    pytest.importorskip("tensorboard")

    record = run(small_config(*SETTINGS), tmp_path / "run", TensorBoard())

    shown = events(tmp_path / "run" / "tensorboard")
    for tag, key in (("train/loss", "train_loss"), ("train/auc", "train_auc")):
        assert shown[tag] == pytest.approx(expected(tmp_path / "run", key))
    rates = expected(tmp_path / "run", "samples_per_second")
    assert shown["samples_per_second"] == pytest.approx(rates)
    at_end = record["metrics"]["validation"]["auc"]
    aucs = expected(tmp_path / "run", "auc", "validation") | {1800: at_end}
    assert len(aucs) == 3
    assert shown["validation/auc"] == pytest.approx(aucs)
    assert shown["test/logloss"] == pytest.approx({1800: record["metrics"]["test"]["logloss"]})
    assert "validation/num_samples" not in shown


@pytest.mark.parametrize("step", [7, 3])  # after the first checkpoint, and before it
def test_tensorboard_shows_each_step_of_a_resumed_run_once(small_config, tmp_path, step):
    pytest.importorskip("tensorboard")

    record = kill_and_resume(
        small_config(*SETTINGS), tmp_path / "run", lambda: TensorBoard(tmp_path / "logs"), step
    )

    assert len(record["resumed"]) == (step == 7)
    shown = events(tmp_path / "logs")
    assert shown["train/loss"] == pytest.approx(expected(tmp_path / "run", "train_loss"))
    assert sorted(shown["validation/auc"]) == [640, 1280, 1800]


def test_mlflow_gets_keys_as_parameters_and_the_history_as_metrics(small_config, tmp_path, mlflow):
    record = run(small_config(*SETTINGS), tmp_path / "run", MLflow(tags={"a": "b"}))

    (found,) = mlflow.runs.values()
    assert (found.name, found.options) == ("run", {"tags": {"a": "b"}})
    assert found.params["batch_size"] == 128
    assert found.params["optimizer.name"] == "sgd"
    losses = {
        step: values["train/loss"] for step, values in found.metrics if "train/loss" in values
    }
    assert losses == expected(tmp_path / "run", "train_loss")
    step, values = found.metrics[-1]
    assert step == 1800
    assert values["test/auc"] == record["metrics"]["test"]["auc"]
    assert found.statuses == ["FINISHED"]


def test_a_resumed_run_continues_its_run_of_mlflow(small_config, tmp_path, mlflow):
    kill_and_resume(small_config(*SETTINGS), tmp_path / "run", MLflow)

    (found,) = mlflow.runs.values()
    assert found.statuses == ["FAILED", "FINISHED"]
    steps = [step for step, values in found.metrics if "train/loss" in values]
    assert steps == [128 * number for number in [*range(1, 8), *range(5, 15)]] + [1800]


def test_weights_and_biases_gets_the_configuration_and_the_history(small_config, tmp_path, wandb):
    record = run(small_config(*SETTINGS), tmp_path / "run", WeightsAndBiases(project="clicks"))

    (found,) = wandb.runs
    assert found.options["project"] == "clicks"
    assert found.options["name"] == "run"
    assert found.options["config"] == record["config"]
    assert by_step(found.logged, "train/loss") == expected(tmp_path / "run", "train_loss")
    assert found.logged[-1][1]["test/auc"] == record["metrics"]["test"]["auc"]
    steps = [step for step, _ in found.logged]
    assert steps == sorted(steps)  # it drops a step that is lower than the last
    assert found.exits == [0]


def test_a_resumed_run_continues_its_run_of_weights_and_biases(small_config, tmp_path, wandb):
    kill_and_resume(small_config(*SETTINGS), tmp_path / "run", WeightsAndBiases)

    first, second = wandb.runs
    assert "id" not in first.options
    assert (second.options["id"], second.options["resume"]) == (first.id, "allow")
    assert (first.exits, second.exits) == ([1], [0])


def test_the_command_line_names_callbacks(small_settings, tmp_path, mlflow, wandb):
    pytest.importorskip("tensorboard")
    command = ["train", "synthetic:criteo-kaggle", *small_settings, "--run", str(tmp_path / "run")]

    assert main([*command, "--set", 'callbacks=["tensorboard", "mlflow", "wandb"]']) == 0

    assert events(tmp_path / "run" / "tensorboard")
    assert [each.statuses for each in mlflow.runs.values()] == [["FINISHED"]]
    assert [each.exits for each in wandb.runs] == [[0]]


def test_the_same_objects_log_another_run_apart(small_config, tmp_path, mlflow, wandb):
    callbacks = MLflow(), WeightsAndBiases()

    run(small_config(*SETTINGS), tmp_path / "one", *callbacks)
    run(small_config(*SETTINGS), tmp_path / "other", *callbacks)

    assert [each.name for each in mlflow.runs.values()] == ["one", "other"]
    assert ["id" in each.options for each in wandb.runs] == [False, False]


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("mlflow", "mlflow", "mlflow"),
        ("wandb", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named_before_data_are_read_or_a_folder_is_made(
    small_config, tmp_path, monkeypatch, name, module, package
):
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    monkeypatch.setattr("recsys.train.trainer.open_source", None)
    message = f"needs {package}, which is not installed .*; install it .pip install {package}."

    with pytest.raises(MissingDependency, match=message):
        run(small_config(f'callbacks=["{name}"]'), tmp_path / "run")

    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_mlflow_itself(small_config, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.joinpath("mlruns").as_uri())

    kill_and_resume(small_config(*SETTINGS), tmp_path / "run", MLflow)

    client = mlflow.MlflowClient()
    (found,) = client.search_runs(["0"])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optimizer.name"] == "sgd"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    expected_losses = expected(tmp_path / "run", "train_loss")
    assert {each.step: each.value for each in losses} == pytest.approx(expected_losses)


@pytest.mark.slow
def test_weights_and_biases_itself(small_config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")

    kill_and_resume(
        small_config(*SETTINGS), tmp_path / "run", lambda: WeightsAndBiases(mode="offline")
    )

    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # one id
    assert all(list(folder.glob("*.wandb")) for folder in folders)


@pytest.mark.parametrize(("make", "starts"), [(MLflow, "start_run"), (WeightsAndBiases, "init")])
def test_an_object_whose_run_could_not_continue_begins_another_one(
    small_config, tmp_path, mlflow, wandb, monkeypatch, make, starts
):
    config = small_config(*SETTINGS)
    with pytest.raises(Killed):
        run(config, tmp_path / "run", make(), Kills(7))
    same = make()
    with monkeypatch.context() as patch:
        patch.setattr(mlflow if make is MLflow else wandb, starts, raises)
        with pytest.raises(CallbackFailed, match="the server is down"):
            run(config, tmp_path / "run", same, resume=True)

    run(config, tmp_path / "other", same)

    assert len(mlflow.runs if make is MLflow else {each.id for each in wandb.runs}) == 2
