"""A run with early stopping ends with the weights of its best evaluation."""

import signal

import pytest

from recsys.train import EarlyStopping, train
from recsys.train.evaluate import evaluate_run
from tests.train import resumed_runs

# The model soon fits its training samples better and others no longer.
SETTINGS = (*resumed_runs.SETTINGS, "eval.every_steps=4", "epochs=8", "optimizer.lr=0.2")


def run(config, folder, **options):
    return train(config, folder, show_progress=False, **options)


def model_after(step, config, folder, stop_at):
    """The model of a run that ends after this step."""
    stop_at((step, signal.SIGINT))
    run(config, folder)
    return resumed_runs.load_file(folder / "model.safetensors")


@pytest.mark.filterwarnings("ignore:tables .* cold memory")
@pytest.mark.parametrize("tiers", [(), ("budget=12KiB",), ("budget=12KiB", "cold_tier=file")])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_model_is_that_of_the_best_evaluation(
    small_config, tmp_path, stop_at, tiers, is_killed
):
    config, folder = small_config(*SETTINGS, *tiers, "early_stopping.patience=2"), tmp_path / "run"
    best = run(config, tmp_path / "whole")["stopped_early"]["best_step"]
    if is_killed:  # after the best evaluation, of which its checkpoint does not know
        stop_at((best + 1, None))
        with pytest.raises(resumed_runs.Killed):
            run(config, folder)
    record = run(config, folder, resume=is_killed)

    assert record["model_step"] == record["stopped_early"]["best_step"] == best
    assert best < record["throughput"]["num_steps"]
    plain = small_config(*SETTINGS, *tiers)
    expected = model_after(best, plain, tmp_path / "to_best", stop_at)
    resumed_runs.require_same(resumed_runs.load_file(folder / "model.safetensors"), expected)
    assert record["metrics"]["test"] == evaluate_run(folder)["test"].as_dict()
    assert not list(folder.glob("best-*"))


def test_a_run_to_its_last_step_has_its_best_weights_too(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS)
    record = run(config, tmp_path / "run", callbacks=[EarlyStopping(100)])

    steps = [each for each in resumed_runs.history(tmp_path / "run")[:-1] if "validation" in each]
    best = max(steps, key=lambda each: each["validation"]["auc"])["step"]
    assert record["stopped_early"] is None
    assert record["model_step"] == best < steps[-1]["step"] == record["throughput"]["num_steps"]
    expected = model_after(best, config, tmp_path / "to_best", stop_at)
    found = resumed_runs.load_file(tmp_path / "run" / "model.safetensors")
    resumed_runs.require_same(found, expected)


def test_the_last_weights_are_kept_on_request(small_config, tmp_path):
    record = run(
        small_config(*SETTINGS), tmp_path / "run", callbacks=[EarlyStopping(2, keep="last")]
    )

    assert record["model_step"] == record["throughput"]["num_steps"]
