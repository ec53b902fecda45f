"""Runs that end once their evaluations no longer improve, with the weights of the best one."""

import signal
from unittest import mock

import pytest

from recsys.config import load_config, replace
from recsys.errors import CallbackFailed, ConfigError
from recsys.train import Callback, EarlyStopping
from tests.train import resumed_runs
from tests.train.judged_stores import SMALL_MODEL, write_store
from tests.train.resumed_runs import Killed, load_model, require_equal, require_same_run, run

# 15 steps an epoch. No evaluation is better by 0.9 than the first, after step 3.
STOPS_AT_12 = (
    *resumed_runs.SETTINGS,
    "eval.every_steps=3",
    "early_stopping.patience=3",
    "early_stopping.min_delta=0.9",
    "early_stopping.keep=last",
)
# The model soon fits its training samples better and others no longer.
OVERFITS = (*resumed_runs.SETTINGS, "eval.every_steps=4", "epochs=8", "optimizer.lr=0.2")


@pytest.mark.parametrize(
    ("metric", "patience", "min_delta", "values", "best"),
    [
        ("auc", 2, 0.0, [0.5, 0.6, 0.6, 0.61, 0.6, 0.61], 0.61),
        ("auc", 2, 0.25, [0.0, 0.25, 0.375, 0.5, 0.625], 0.625),
        # The best one is better by less than min_delta; 0.7 - 0.5 is not above it.
        ("auc", 3, 0.25, [0.5, 0.625, 0.6, 0.7], 0.7),
        ("logloss", 1, 0.0, [0.6, 0.5, 0.55], 0.5),
        ("normalized_entropy", 1, 0.0, [0.6, 0.5, 0.4, 0.45], 0.4),
    ],
)
def test_it_stops_at_the_last_of_these_evaluations(metric, patience, min_delta, values, best):
    stopping = EarlyStopping(patience, metric=metric, min_delta=min_delta)
    answers = []
    for step, value in enumerate(values, 1):
        answers.append(stopping.on_validation_end({"step": step, "validation": {metric: value}}))
        state = stopping.state_dict()
        stopping = EarlyStopping(patience, metric=metric, min_delta=min_delta)
        stopping.load_state_dict(state)  # as after a checkpoint

    assert answers == [False] * (len(values) - 1) + [True]
    assert (state["best"], state["best_step"]) == (best, values.index(best) + 1)


def test_a_run_stops_as_a_finished_one_with_all_its_files(small_config, tmp_path):
    record = run(small_config(*STOPS_AT_12, "checkpoint.every_steps=5"), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["throughput"]["num_steps"] == record["model_step"] == 12
    told = record["stopped_early"]
    assert (told["step"], told["callback"], told["num_without"]) == (12, "EarlyStopping", 3)
    assert record["metrics"]["test"]["num_samples"] == 75  # the whole split
    *_, last = resumed_runs.history(tmp_path / "run")
    assert last == {"step": 12, "num_samples": 768, **record["metrics"]}
    assert (tmp_path / "run" / "checkpoints" / "00000003.json").is_file()


@pytest.mark.slow(but=("within an epoch",))
@pytest.mark.parametrize(
    ("patience", "batch_size"),
    [(3, 128), (4, 128), (4, 16)],
    ids=["within an epoch", "after its last step", "between two reports"],
)
def test_a_run_that_was_killed_after_it_had_stopped_makes_no_further_step(
    small_config, tmp_path, monkeypatch, patience, batch_size
):
    changed = f"early_stopping.patience={patience}", f"batch_size={batch_size}"
    config = small_config(*STOPS_AT_12, *changed)
    whole = run(config, tmp_path / "whole")

    with monkeypatch.context() as patch:
        patch.setattr("recsys.train.run_folder.RunFolder.save_model", resumed_runs.kill)
        with pytest.raises(Killed):
            run(config, tmp_path / "run")
    record = run(config, tmp_path / "run", resume=True)

    assert record["stopped_early"] == whole["stopped_early"]
    assert record["stopped_early"]["step"] == 3 * (patience + 1)
    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_stopped_run_is_finished_and_continues_with_more_epochs(small_config, tmp_path):
    config, folder = small_config(*STOPS_AT_12), tmp_path / "run"
    record = run(config, folder)

    assert run(config, folder, resume=True)["stopped_early"] == record["stopped_early"]

    again = run(replace(config, epochs=3), folder, resume=True)["stopped_early"]
    assert (again["step"], again["num_without"]) == (15, 4)
    last = run(small_config(*STOPS_AT_12[:-3], "epochs=5"), folder, resume=True)
    assert (last["stopped_early"], last["throughput"]["num_steps"]) == (None, 75)


def test_the_same_object_begins_anew_in_another_run(small_config, tmp_path):
    stopping = EarlyStopping(3, min_delta=0.9)
    config = small_config(*resumed_runs.SETTINGS, "eval.every_steps=3")

    found = [run(config, tmp_path / name, callbacks=[stopping]) for name in ("one", "other")]

    assert [record["stopped_early"]["step"] for record in found] == [12, 12]


def test_a_callback_of_the_user_ends_training(small_config, tmp_path):
    class Stops(Callback):
        def on_validation_end(self, evaluation):
            return evaluation["step"] == 6

    config = small_config(*resumed_runs.SETTINGS, "eval.every_steps=3")
    record = run(config, tmp_path / "run", callbacks=[Callback(), Stops()])

    assert record["stopped_early"] == {"step": 6, "callback": "Stops"}
    assert record["throughput"]["num_steps"] == 6


def test_stopping_by_the_test_split_is_warned_of_once(small_config, tmp_path):
    with pytest.warns(UserWarning, match="eval.split 'test'") as seen:
        record = run(small_config(*STOPS_AT_12, "eval.split=test"), tmp_path / "run")

    assert len(seen) == 1
    assert record["stopped_early"]["split"] == "test"


@pytest.mark.parametrize(
    ("metric", "is_ranked", "is_known"),
    [
        ("gauc", False, True),
        ("recall_at_k", True, True),
        ("auc", True, False),
        ("gauc", True, False),
        ("normalized_entropy", True, False),
        ("recall_at_k", False, False),
    ],
)
def test_metrics_that_evaluations_of_the_data_have_may_stop_it(
    tmp_path, metric, is_ranked, is_known
):
    store = write_store(tmp_path / "store", is_ranked=is_ranked)
    stopping = ("patience=1", "min_delta=0.99", f"metric={metric}")
    settings = [*SMALL_MODEL, *(f"early_stopping.{each}" for each in stopping)]
    config = load_config(None, [*settings, "eval.every_steps=3"], data=str(store.path))

    if is_known:
        assert run(config, tmp_path / "run")["stopped_early"]["step"] == 6
        config = load_config(None, [*SMALL_MODEL, "eval.every_steps=3"], data=str(store.path))
        record = run(
            config, tmp_path / "given", callbacks=[EarlyStopping(1, min_delta=0.99, metric=metric)]
        )
        assert record["stopped_early"]["step"] == 6
    else:
        with pytest.raises(ConfigError, match=f"early_stopping.metric '{metric}'"):
            run(config, tmp_path / "run")


def test_a_metric_that_is_null_ends_the_run_by_name(small_config, tmp_path):
    config = small_config("early_stopping.patience=1", "eval.max_samples=1")

    with pytest.raises(CallbackFailed, match="auc of the evaluation at step 2"):
        run(config, tmp_path / "run")


def require_model_of_step(step, config, folder, stop_at):
    """Require the model of a run to be that of another one that ends after this step."""
    stop_at((step, signal.SIGINT))
    run(config, folder.with_name("to_step"))
    require_equal(load_model(folder), load_model(folder.with_name("to_step")))


@pytest.mark.filterwarnings("ignore:tables .* cold tier")
@pytest.mark.parametrize(
    ("tiers", "killed"),
    [
        ((), None),
        ((), "after its best step"),  # of which its checkpoint does not know
        ((), "before its record"),
        (("budget=12KiB", "cold_tier=file"), "after its best step"),
    ],
)
def test_the_model_is_that_of_the_best_evaluation(
    small_config, tmp_path, monkeypatch, stop_at, tiers, killed
):
    config, folder = small_config(*OVERFITS, *tiers, "early_stopping.patience=2"), tmp_path / "run"
    best = run(config, tmp_path / "whole")["stopped_early"]["best_step"]
    with monkeypatch.context() as patch:
        if killed == "before its record":
            patch.setattr("recsys.train.trainer.write_json", mock.Mock(side_effect=Killed))
        elif killed:
            stop_at((best + 1, None))
        if killed:
            with pytest.raises(Killed):
                run(config, folder)
    record = run(config, folder, resume=killed is not None)

    assert record["model_step"] == record["stopped_early"]["best_step"] == best
    assert best < record["throughput"]["num_steps"]
    require_model_of_step(best, small_config(*OVERFITS, *tiers), folder, stop_at)
    assert record["metrics"] == resumed_runs.evaluated(folder)
    assert not list(folder.glob("best-*"))


def test_a_run_to_its_last_step_has_its_best_weights_too(small_config, tmp_path, stop_at):
    config, folder = small_config(*OVERFITS), tmp_path / "run"
    record = run(config, folder, callbacks=[EarlyStopping(100)])

    steps = [each for each in resumed_runs.history(folder)[:-1] if "validation" in each]
    best = max(steps, key=lambda each: each["validation"]["auc"])["step"]
    assert record["stopped_early"] is None
    assert record["model_step"] == best < steps[-1]["step"] == record["throughput"]["num_steps"]
    require_model_of_step(best, config, folder, stop_at)
