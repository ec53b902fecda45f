"""Runs that end once their evaluations no longer improve."""

import signal
import warnings

import pytest

from recsys.ablate import ablate
from recsys.config import load_config, replace
from recsys.errors import CallbackFailed, ConfigError
from recsys.train import Callback, EarlyStopping, train
from tests.train import resumed_runs
from tests.train.judged_stores import SMALL_MODEL, write_store

# 15 steps an epoch. No evaluation is better by 0.9 than the first, after step 3.
STOPS_AT_12 = (
    *resumed_runs.SETTINGS,
    "eval.every_steps=3",
    "early_stopping.patience=3",
    "early_stopping.min_delta=0.9",
    "early_stopping.keep=last",
)
AFTER_3 = {
    "step": 12,
    "callback": "EarlyStopping",
    "metric": "auc",
    "min_delta": 0.9,
    "split": "validation",
    "num_without": 3,
}


def best_of(folder, metric="auc"):
    """The best evaluation before the last step, as the record has it."""
    found = [each for each in resumed_runs.history(folder)[:-1] if "validation" in each]
    best = max(found, key=lambda each: each["validation"][metric])
    return {
        "best": best["validation"][metric],
        "best_step": best["step"],
        "improved": found[0]["validation"][metric],
    }


def run(config, folder, **options):
    return train(config, folder, show_progress=False, **options)


def evaluations(stopping, values, metric="auc"):
    """What it answers to evaluations with these values."""
    return [
        stopping.on_validation_end({"step": step, "validation": {metric: value}})
        for step, value in enumerate(values, 1)
    ]


def test_it_stops_after_as_many_evaluations_without_an_improvement():
    stopping = EarlyStopping(2)

    assert evaluations(stopping, [0.5, 0.6, 0.6, 0.61, 0.6, 0.61]) == [False] * 5 + [True]
    assert stopping.state_dict() == {
        "metric": "auc",
        "min_delta": 0.0,
        "split": "validation",
        "best": 0.61,
        "best_step": 4,
        "num_without": 2,
        "improved": 0.61,
    }


def test_an_improvement_must_be_more_than_min_delta():
    stopping = EarlyStopping(2, min_delta=0.25)

    assert evaluations(stopping, [0.0, 0.25, 0.375, 0.5, 0.625]) == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_the_best_evaluation_is_told_even_if_it_is_better_by_less_than_min_delta():
    stopping, resumed = EarlyStopping(3, min_delta=0.25), EarlyStopping(3, min_delta=0.25)

    assert evaluations(stopping, [0.5, 0.625]) == [False, False]
    resumed.load_state_dict(stopping.state_dict())
    assert evaluations(resumed, [0.6, 0.7]) == [False, True]  # 0.7 - 0.5 is not above 0.25

    state = resumed.state_dict()
    assert (state["best"], state["best_step"], state["num_without"]) == (0.7, 2, 3)


def test_a_state_that_lacks_something_changes_nothing():
    stopping, other = EarlyStopping(3), EarlyStopping(3)
    evaluations(other, [0.9, 0.5])
    state = other.state_dict()
    del state["improved"]

    with pytest.raises(KeyError):
        stopping.load_state_dict(state)

    assert stopping.state_dict() == EarlyStopping(3).state_dict()


@pytest.mark.parametrize("metric", ["logloss", "normalized_entropy"])
def test_of_a_loss_lower_is_better(metric):
    assert evaluations(EarlyStopping(1, metric=metric), [0.6, 0.5, 0.55], metric)[-1]
    assert not any(evaluations(EarlyStopping(1, metric=metric), [0.6, 0.5, 0.4], metric))


def test_a_run_stops_as_a_finished_one_with_all_its_files(small_config, tmp_path):
    record = run(small_config(*STOPS_AT_12, "checkpoint.every_steps=5"), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["throughput"]["num_steps"] == 12
    assert record["stopped_early"] == AFTER_3 | best_of(tmp_path / "run")
    assert record["metrics"]["test"]["num_samples"] == 75  # the whole split
    *_, last = resumed_runs.history(tmp_path / "run")
    assert last == {"step": 12, "num_samples": 768, **record["metrics"]}
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoints" / "00000003.json").is_file()


def test_it_equals_a_run_that_is_interrupted_at_the_same_step(small_config, tmp_path, stop_at):
    stopped, plain = small_config(*STOPS_AT_12), small_config(*STOPS_AT_12[:-3])
    run(stopped, tmp_path / "stopped")
    stop_at((12, signal.SIGINT))
    run(plain, tmp_path / "interrupted")

    resumed_runs.require_same(
        resumed_runs.load_file(tmp_path / "stopped" / "model.safetensors"),
        resumed_runs.load_file(tmp_path / "interrupted" / "model.safetensors"),
    )


@pytest.mark.in_ci("auto")
@pytest.mark.parametrize("case", ["resident", "lookahead", "file", "auto", "fae"])
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(
    small_config, tmp_path, stop_at, case
):
    config = small_config(*STOPS_AT_12, *resumed_runs.CASES[case])
    whole = run(config, tmp_path / "whole")

    stops = [(7, None), (10, signal.SIGINT), (11, None)]
    record = resumed_runs.run_and_resume(config, tmp_path / "run", stops, stop_at)

    assert record["stopped_early"] == whole["stopped_early"]
    assert whole["throughput"]["num_steps"] == 12
    resumed_runs.require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.in_ci("within an epoch")
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
    evaluate = resumed_runs.train.__globals__["evaluate_split"]

    def killed_at_the_end(model, source, split, *arguments, **options):
        if split == "test":
            raise resumed_runs.Killed
        return evaluate(model, source, split, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("recsys.train.trainer.evaluate_split", killed_at_the_end)
        with pytest.raises(resumed_runs.Killed):
            run(config, tmp_path / "run")
    record = run(config, tmp_path / "run", resume=True)

    assert record["status"] == "finished"
    assert record["stopped_early"] == whole["stopped_early"]
    assert record["stopped_early"]["step"] == 3 * (patience + 1)
    resumed_runs.require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.outside_ci
def test_a_stopped_run_is_finished_and_continues_with_more_epochs(small_config, tmp_path):
    config = small_config(*STOPS_AT_12)
    record = run(config, tmp_path / "run")

    assert run(config, tmp_path / "run", resume=True)["stopped_early"] == record["stopped_early"]

    again = run(replace(config, epochs=3), tmp_path / "run", resume=True)
    best = best_of(tmp_path / "run")
    assert again["stopped_early"] == AFTER_3 | best | {"step": 15, "num_without": 4}
    stopping = replace(config.early_stopping, patience=6)
    longer = replace(config, epochs=4, early_stopping=stopping)
    assert run(longer, tmp_path / "run", resume=True)["stopped_early"]["step"] == 21
    off = small_config(*STOPS_AT_12[:-3], "epochs=5")
    last = run(off, tmp_path / "run", resume=True)
    assert last["stopped_early"] is None
    assert last["throughput"]["num_steps"] == 75


@pytest.mark.outside_ci
def test_more_epochs_count_until_a_checkpoint_has_them(small_config, tmp_path, stop_at):
    run(small_config(*STOPS_AT_12), tmp_path / "run")
    longer = small_config(*STOPS_AT_12[:-3], "epochs=4")
    stop_at((13, None))
    with pytest.raises(
        resumed_runs.Killed
    ):  # config.toml has 4 epochs now, the newest checkpoint has 2
        run(longer, tmp_path / "run", resume=True)

    record = run(longer, tmp_path / "run", resume=True)

    assert record["stopped_early"] is None
    assert record["throughput"]["num_steps"] == 60


def test_the_same_object_begins_anew_in_another_run(small_config, tmp_path):
    stopping = EarlyStopping(3, min_delta=0.9)
    config = small_config(*resumed_runs.SETTINGS, "eval.every_steps=3")

    found = [run(config, tmp_path / name, callbacks=[stopping]) for name in ("one", "other")]

    assert [record["stopped_early"]["step"] for record in found] == [12, 12]


def test_the_same_object_begins_anew_after_a_run_that_could_not_continue(
    small_config, tmp_path, stop_at
):
    class Fails(Callback):
        def on_train_start(self, run_dir, record):
            raise ValueError("no")

    def stopping():
        return EarlyStopping(3, min_delta=0.9)

    config = small_config(*resumed_runs.SETTINGS, "eval.every_steps=3")
    stop_at((10, None))
    with pytest.raises(resumed_runs.Killed):
        run(config, tmp_path / "run", callbacks=[stopping()])
    same = stopping()
    with pytest.raises(CallbackFailed, match="on_train_start raised ValueError"):
        run(config, tmp_path / "run", callbacks=[Fails(), same], resume=True)

    record = run(config, tmp_path / "other", callbacks=[same])

    assert record["stopped_early"]["step"] == 12


def test_another_metric_begins_anew(small_config, tmp_path, stop_at):
    config = small_config(*STOPS_AT_12)
    stop_at((10, None))
    with pytest.raises(resumed_runs.Killed):
        run(config, tmp_path / "run")

    other = replace(config, early_stopping=replace(config.early_stopping, metric="accuracy"))
    record = run(other, tmp_path / "run", resume=True)

    assert record["stopped_early"]["best_step"] >= 9  # the first after the checkpoint at step 8
    assert record["stopped_early"]["step"] == 18


def test_a_signal_in_the_step_that_stops_changes_nothing(small_config, tmp_path, stop_at):
    stop_at((12, signal.SIGINT))

    record = run(small_config(*STOPS_AT_12), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["stopped_early"]["step"] == 12
    assert record["metrics"]["test"] is not None


def test_a_run_that_skips_samples_stops(small_config, tmp_path):
    settings = [*STOPS_AT_12, "skip.random_drop.share=0.3"]

    record = run(small_config(*settings), tmp_path / "run")

    assert record["status"] == "finished"
    assert record["stopped_early"]["num_without"] == 3
    assert record["throughput"]["num_samples"] < 3600


def test_a_callback_of_the_user_ends_training(small_config, tmp_path):
    class Stops(Callback):
        def on_validation_end(self, evaluation):
            return evaluation["step"] == 6

    config = small_config(*resumed_runs.SETTINGS, "eval.every_steps=3")
    record = run(config, tmp_path / "run", callbacks=[Callback(), Stops()])

    assert record["stopped_early"] == {"step": 6, "callback": "Stops"}
    assert record["throughput"]["num_steps"] == 6


def test_stopping_by_the_test_split_is_warned_of_once(small_config, tmp_path):
    config = small_config(*STOPS_AT_12, "eval.split=test")

    with pytest.warns(UserWarning, match="early stopping on eval.split 'test' .* 'valid") as seen:
        record = run(config, tmp_path / "run")

    assert len(seen) == 1
    assert record["stopped_early"]["split"] == "test"


@pytest.mark.parametrize(
    ("metric", "is_ranked"),
    [("auc", True), ("gauc", True), ("normalized_entropy", True), ("recall_at_k", False)],
)
def test_a_metric_that_evaluations_of_the_data_lack_is_refused(tmp_path, metric, is_ranked):
    store = write_store(tmp_path / "store", is_ranked=is_ranked)
    settings = [*SMALL_MODEL, "early_stopping.patience=1", f"early_stopping.metric={metric}"]

    with pytest.raises(ConfigError, match=f"early_stopping.metric '{metric}'"):
        run(load_config(None, settings, data=str(store.path)), tmp_path / "run")


def test_positives_alone_stop_by_recall(tmp_path):
    store = write_store(tmp_path / "store", is_ranked=True)
    settings = [*SMALL_MODEL, "early_stopping.patience=1", "early_stopping.metric=recall_at_k"]
    settings += ["early_stopping.min_delta=0.99", "eval.every_steps=3"]

    record = run(load_config(None, settings, data=str(store.path)), tmp_path / "run")

    assert record["stopped_early"]["step"] == 6
    found = [each for each in resumed_runs.history(tmp_path / "run") if "validation" in each]
    assert record["stopped_early"]["best"] in [each["validation"]["recall_at_k"] for each in found]


def test_data_with_groups_stop_by_gauc(tmp_path):
    store = write_store(tmp_path / "store")
    settings = [*SMALL_MODEL, "early_stopping.patience=1", "early_stopping.metric=gauc"]
    settings += ["early_stopping.min_delta=0.9", "eval.every_steps=3"]

    record = run(load_config(None, settings, data=str(store.path)), tmp_path / "run")

    assert record["stopped_early"]["step"] == 6
    assert 0 < record["stopped_early"]["best"] < 1


def test_a_metric_that_is_null_ends_the_run_by_name(small_config, tmp_path):
    config = small_config("early_stopping.patience=1", "eval.max_samples=1")

    with pytest.raises(CallbackFailed, match="auc of the evaluation at step 2 is null"):
        run(config, tmp_path / "run")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_cells_of_an_ablation_with_a_target_stop_early(ablation, tmp_path, split):
    config = ablation(
        f"[ablate]\nseeds = [0]\ntarget_auc = 0.999\ntarget_split = '{split}'\n"
        "eval_every_samples = 384\nlate_share = 0.5\n"
        "[[ablate.variations]]\nname = 'whole'\n[[ablate.variations]]\nname = 'stops'\n"
        "early_stopping.patience = 1\nearly_stopping.min_delta = 0.9\n"
    )

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    whole, stops = record["cells"]
    assert whole["run"]["stopped_early"] is None
    assert stops["run"]["stopped_early"]["step"] == 6
    assert stops["late"]["num_evaluations"] == 2  # after steps 3 and 6, the last one
    assert stops["seconds_to_target_auc"] is None
    found = [each for each in seen if "or ablate.target_split" in str(each.message)]
    assert len(found) == (split == "test")
