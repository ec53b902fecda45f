"""What callbacks write to packages that log: TensorBoard itself, and stand-ins for the others."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from recsys.errors import MissingDependency
from recsys.train import MLflow, TensorBoard, WeightsAndBiases
from tests.train.resumed_runs import Killed, run

SETTINGS = ("checkpoint.every_steps=4", "eval.every_steps=5", "num_threads=1")


def kill_and_resume(config, folder, make, stop_at, step=7):
    """Ends after this step; continues after step 4, from a checkpoint, with another object."""
    stop_at((step, None))
    with pytest.raises(Killed):
        run(config, folder, callbacks=[make()])
    return run(config, folder, callbacks=[make()], resume=True)


def expected(folder, key, split=None):
    """The history's values by samples seen, but for the line at the end of the run."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    values = [(line["num_samples"], line.get(split, {}) if split else line) for line in lines[:-1]]
    return {num_samples: of_line[key] for num_samples, of_line in values if key in of_line}


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
        assert not active, "another run is active"
        if run_id is None:
            run_id = f"run-{len(module.runs)}"
            kept = {"name": run_name, "options": options}
            module.runs[run_id] = SimpleNamespace(logged=[], ends=[], **kept)
        active.append(module.runs[run_id])
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def end_run(status):
        active.pop().ends.append(status)

    def log_params(params):
        active[-1].params = params

    module.start_run, module.end_run, module.log_params = start_run, end_run, log_params
    module.log_metrics = lambda values, step: active[-1].logged.append((step, values))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for Weights & Biases that keeps its runs."""
    module = ModuleType("wandb")
    module.runs = []

    def init(**options):
        def finish(exit_code):
            found.ends.append(exit_code)

        new_id = options.get("id", f"run-{len(module.runs)}")
        found = SimpleNamespace(options=options, id=new_id, finish=finish, logged=[], ends=[])
        found.log = lambda values, step: found.logged.append((step, values))
        module.runs.append(found)
        return found

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def require_logged(logged, record, folder):
    """Require the history, over the samples seen, and then what was measured at the end."""
    losses = {step: values["train/loss"] for step, values in logged if "train/loss" in values}
    assert losses == expected(folder, "train_loss")
    step, values = logged[-1]
    assert (step, values["test/auc"]) == (1800, record["metrics"]["test"]["auc"])
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)


@pytest.mark.parametrize("step", [7, 3])  # after the first checkpoint, and before it
def test_tensorboard_shows_the_history_over_the_samples_seen(small_config, tmp_path, stop_at, step):
    pytest.importorskip("tensorboard")
    config, folder = small_config(*SETTINGS), tmp_path / "run"

    def make():
        return TensorBoard(tmp_path / "logs")

    record = kill_and_resume(config, folder, make, stop_at, step)

    shown = events(tmp_path / "logs")
    for tag, key in (
        ("train/loss", "train_loss"),
        ("train/auc", "train_auc"),
        ("samples_per_second", "samples_per_second"),
    ):
        assert shown[tag] == pytest.approx(expected(folder, key))
    aucs = expected(folder, "auc", "validation")
    aucs[1800] = record["metrics"]["validation"]["auc"]
    assert shown["validation/auc"] == pytest.approx(aucs)
    assert sorted(aucs) == [640, 1280, 1800]
    assert shown["test/logloss"] == pytest.approx({1800: record["metrics"]["test"]["logloss"]})
    assert "validation/num_samples" not in shown


def test_mlflow_gets_keys_as_parameters_and_the_history_as_metrics(small_config, tmp_path, mlflow):
    logger = MLflow(tags={"a": "b"})
    record = run(small_config(*SETTINGS), tmp_path / "run", callbacks=[logger])
    run(small_config(*SETTINGS), tmp_path / "other", callbacks=[logger])

    found, other = mlflow.runs.values()
    assert (found.name, found.options, other.name) == ("run", {"tags": {"a": "b"}}, "other")
    assert (found.params["batch_size"], found.params["optimizer.name"]) == (128, "sgd")
    assert found.ends == ["FINISHED"]
    require_logged(found.logged, record, tmp_path / "run")


def test_weights_and_biases_gets_the_configuration_and_the_history(small_config, tmp_path, wandb):
    logger = WeightsAndBiases(project="clicks")
    record = run(small_config(*SETTINGS), tmp_path / "run", callbacks=[logger])
    run(small_config(*SETTINGS), tmp_path / "other", callbacks=[logger])

    found, other = wandb.runs
    assert found.options == {"project": "clicks", "name": "run", "config": record["config"]}
    assert found.ends == [0]
    assert other.id != found.id
    require_logged(found.logged, record, tmp_path / "run")


def test_a_resumed_run_continues_its_run_of_mlflow(small_config, tmp_path, mlflow, stop_at):
    kill_and_resume(small_config(*SETTINGS), tmp_path / "run", MLflow, stop_at)

    (found,) = mlflow.runs.values()
    assert found.ends == ["FAILED", "FINISHED"]
    steps = [step for step, values in found.logged if "train/loss" in values]
    assert steps == [128 * number for number in [*range(1, 8), *range(5, 15)]] + [1800]


def test_a_resumed_run_continues_its_run_of_weights_and_biases(
    small_config, tmp_path, wandb, stop_at
):
    kill_and_resume(small_config(*SETTINGS), tmp_path / "run", WeightsAndBiases, stop_at)

    first, second = wandb.runs
    assert "id" not in first.options
    assert (second.options["id"], second.options["resume"]) == (first.id, "allow")
    assert (first.ends, second.ends) == ([1], [0])


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

    with pytest.raises(MissingDependency, match=package):
        run(small_config(f'callbacks=["{name}"]', data="nowhere"), tmp_path / "run")

    assert not (tmp_path / "run").exists()
