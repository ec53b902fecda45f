"""The two ways of docs/callbacks.md to the weights of the best evaluation."""

import re
import signal
from pathlib import Path

import pytest

from recsys.cli import main
from recsys.train import EarlyStopping, train
from tests.train import resumed_runs

PAGE = Path(__file__).parents[3] / "docs" / "callbacks.md"
# The model soon fits its training samples better and others no longer.
SETTINGS = (*resumed_runs.SETTINGS, "eval.every_steps=4", "epochs=8", "optimizer.lr=0.2")


def run(config, folder, **options):
    return train(config, folder, show_progress=False, **options)


def model_after(step, config, folder, stop_at):
    """The model of a run that ends after this step."""
    stop_at((step, signal.SIGINT))
    run(config, folder)
    return resumed_runs.load_file(folder / "model.safetensors")


def test_the_older_checkpoint_of_a_run_with_patience_1_is_that_of_the_best_evaluation(
    small_config, tmp_path, stop_at
):
    record = run(small_config(*SETTINGS, "early_stopping.patience=1"), tmp_path / "run")
    numbers = sorted(int(each.stem) for each in (tmp_path / "run/checkpoints").glob("*.json"))
    best = str(tmp_path / "best.safetensors")
    command = ["export", str(tmp_path / "run"), "--to", "safetensors", "--out", best]
    assert main([*command, "--checkpoint", str(numbers[0])]) == 0

    assert len(numbers) == 2
    step = record["stopped_early"]["best_step"]
    assert step == record["stopped_early"]["step"] - 4
    expected = model_after(step, small_config(*SETTINGS), tmp_path / "to_best", stop_at)
    resumed_runs.require_same(resumed_runs.load_file(best), expected)


@pytest.mark.in_ci("True")
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_callback_of_the_page_keeps_the_weights_of_the_best_evaluation(
    small_config, tmp_path, stop_at, is_killed
):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = [each for each in blocks if "class KeepBest" in each]
    found = {}
    exec(compile(block.partition("\nconfig =")[0], PAGE.name, "exec"), found)
    config, kept = small_config(*SETTINGS), found["KeepBest"]
    best = run(config, tmp_path / "whole", callbacks=[EarlyStopping(2)])["stopped_early"][
        "best_step"
    ]

    if is_killed:  # its checkpoint is saved, and was not told of
        stop_at((best + 1, None))
        with pytest.raises(resumed_runs.Killed):
            run(config, tmp_path / "run", callbacks=[EarlyStopping(2), kept()])
    callbacks = [EarlyStopping(2), kept()]
    record = run(config, tmp_path / "run", callbacks=callbacks, resume=is_killed)

    assert record["stopped_early"]["best_step"] == best
    expected = model_after(best, config, tmp_path / "to_best", stop_at)
    resumed_runs.require_same(
        resumed_runs.load_file(tmp_path / "run" / "best.safetensors"), expected
    )
