"""Runs of random configurations: with a budget, and stopped and continued, as without."""

import contextlib
import os
import random
import signal

import pytest
from safetensors.torch import load_file

from recsys.config import load_config
from recsys.errors import BudgetTooSmall
from recsys.train.evaluate import evaluate_run
from tests.train.random_runs import data_of, draw_run
from tests.train.resumed_runs import Killed, history, require_same, run

SEEDS = range(200) if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else range(3)


def run_with_least_budget(data, settings, path):
    """The configuration, the folder and the record of the first budget that has room."""
    for kibibytes in (6, 12, 18, 24, 36, 48, 72, 96, 192, 384):
        config = load_config(None, [*settings, f"budget={kibibytes}KiB"], data=data)
        folder = path / f"{kibibytes}KiB"
        with contextlib.suppress(BudgetTooSmall):
            return config, folder, run(config, folder)
    raise AssertionError("no budget has room")


def run_in_pieces(config, folder, stops, stop_at):
    stop_at(*stops)
    for number in range(1 + len(stops)):
        try:
            record = run(config, folder, resume=number > 0)
        except Killed:
            continue
        if record["status"] == "finished":
            return record
    raise AssertionError("the run has not ended")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of runs that are too short for their settings
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_and_stops_change_no_bit(seed, table_store, stop_at, tmp_path):
    drawn, draw = draw_run(seed), random.Random(seed)
    data, settings = data_of(drawn, table_store), (*drawn.settings, *drawn.schedule)
    config, folder, whole = run_with_least_budget(data, settings, tmp_path)
    model = load_file(folder / "model.safetensors")

    if not drawn.changes_order:
        resident = run(load_config(None, drawn.settings, data=data), tmp_path / "resident")
        require_same(load_file(tmp_path / "resident" / "model.safetensors"), model)
        require_same(resident["metrics"], whole["metrics"])

    num_steps = whole["throughput"]["num_steps"]
    steps = sorted({draw.randint(1, num_steps - 1) for _ in range(draw.randint(1, 3))})
    stops = [(step, draw.choice([None, signal.SIGINT, signal.SIGTERM])) for step in steps]
    record = run_in_pieces(config, tmp_path / "pieces", stops, stop_at)
    if "schedule=hotline" in drawn.schedule:
        # Sums have another order, and optimizers that divide by a gradient's size make much of a
        # gradient that is zero but for rounding, such as that of the bias of attention's keys.
        found, expected = (each["metrics"]["test"]["logloss"] for each in (record, whole))
        assert found == pytest.approx(expected, rel=1e-3)
    else:
        require_same(load_file(tmp_path / "pieces" / "model.safetensors"), model)
        require_same(history(tmp_path / "pieces"), history(folder))
        require_same(record["metrics"], whole["metrics"])

    evaluated = evaluate_run(folder)
    assert evaluated["test"].as_dict() == whole["metrics"]["test"]
