"""Runs of random configurations: with a budget, and stopped and continued, as without."""

import contextlib
import os
import random
import signal

import pytest

from recsys.config import load_config
from recsys.errors import BudgetTooSmall
from tests.train.random_runs import data_of, draw_run
from tests.train.resumed_runs import (
    evaluated,
    history,
    load_model,
    require_equal,
    run,
    run_and_resume,
)

SEEDS = range(200) if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else range(3)


def run_with_least_budget(data, settings, path):
    """The configuration, the folder and the record of the first budget that has room."""
    for kibibytes in (6, 12, 18, 24, 36, 48, 72, 96, 192, 384):
        config = load_config(None, [*settings, f"budget={kibibytes}KiB"], data=data)
        folder = path / f"{kibibytes}KiB"
        with contextlib.suppress(BudgetTooSmall):
            return config, folder, run(config, folder)
    raise AssertionError("no budget has room")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of runs that are too short for their settings
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_and_stops_change_no_bit(seed, table_store, stop_at, tmp_path):
    drawn, draw = draw_run(seed), random.Random(seed)
    data, settings = data_of(drawn, table_store), (*drawn.settings, *drawn.schedule)
    config, folder, whole = run_with_least_budget(data, settings, tmp_path)
    model = load_model(folder)

    if not drawn.changes_order:
        resident = run(load_config(None, drawn.settings, data=data), tmp_path / "resident")
        require_equal(load_model(tmp_path / "resident"), model)
        require_equal(resident["metrics"], whole["metrics"])

    num_steps = whole["throughput"]["num_steps"]
    steps = sorted({draw.randint(1, num_steps - 1) for _ in range(draw.randint(1, 3))})
    stops = [(step, draw.choice([None, signal.SIGINT, signal.SIGTERM])) for step in steps]
    record = run_and_resume(config, tmp_path / "pieces", stops, stop_at)
    if "schedule=hotline" in drawn.schedule:
        # Sums have another order, and optimizers that divide by a gradient's size make much of a
        # gradient that is zero but for rounding, such as that of the bias of attention's keys.
        found, expected = (each["metrics"]["test"]["logloss"] for each in (record, whole))
        assert found == pytest.approx(expected, rel=1e-3)
    else:
        require_equal(load_model(tmp_path / "pieces"), model)
        require_equal(history(tmp_path / "pieces"), history(folder))
        require_equal(record["metrics"], whole["metrics"])

    assert evaluated(folder) == whole["metrics"]
