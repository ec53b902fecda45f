"""Runs of random configurations on several processes: with a budget, and stopped and continued."""

import json
import random
import shutil

import pytest
from ranks_shared import IS_STRESS
from safetensors.torch import load_file

pytest.importorskip("torchrec")

from ranks_train import run_training  # imports TorchRec

from tests.train.conftest import table_store  # noqa: F401
from tests.train.random_runs import data_of, draw_run
from tests.train.resumed_runs import (
    history,
    require_same,
)

# In CI one of few steps on two processes, which have room in the first budget.
SEEDS = range(30) if IS_STRESS else (103,)


def read_record(run):
    return json.loads((run / "run.json").read_text())


@pytest.fixture
def train_in_pieces(failing_ranks):
    """Trains under the least budget that has room; stopped after steps, and continued each time."""

    def has_room(world, run, stops, **arguments):
        for step, interrupted in [*stops, (0, None)]:
            stop = {"step": step, "interrupted": interrupted}
            ended = failing_ranks("is_interrupted", world, run=str(run), **stop, **arguments)
            errors = "".join(error for error, _ in ended)
            if errors:
                assert "BudgetTooSmall" in errors, errors
                return False
            assert read_record(run)["status"] == ("interrupted" if step else "finished")
        return True

    def train_in_pieces(world, run, stops, schedule, **arguments):
        for kibibytes in (6, 12, 24, 48, 96, 192, 384):
            settings = [*schedule, f"budget={kibibytes}KiB"]
            if has_room(world, run, stops, settings=settings, resume=True, **arguments):
                return
            shutil.rmtree(run)
        raise AssertionError("no budget has room")

    return train_in_pieces


@pytest.mark.filterwarnings("ignore::UserWarning")  # of runs that are too short for their settings
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_and_stops_change_no_bit(
    seed,
    ranks,
    train_in_pieces,
    table_store,  # noqa: F811
    tmp_path,
):
    draw, drawn = random.Random(seed), draw_run(seed, num_ranks=6)
    world, other_world = (2, draw.choice([1, 3])) if seed % 2 else (3, draw.choice([1, 2]))
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    arguments = {"base": drawn.settings, "data": data_of(drawn, table_store)}
    ranks("trains_a_run", world, run=str(whole), **arguments)
    num_steps = read_record(whole)["throughput"]["num_steps"]

    steps = draw.sample(range(1, num_steps), 2 if IS_STRESS else 1)
    stops = [(step, draw.choice([None, *range(world)])) for step in sorted(steps)]
    train_in_pieces(world, pieces, stops, drawn.schedule, **arguments)

    require_same(load_file(pieces / "model.safetensors"), load_file(whole / "model.safetensors"))
    require_same(history(pieces), history(whole))
    require_same(read_record(pieces)["metrics"], read_record(whole)["metrics"])

    if IS_STRESS:
        other, (step, interrupted) = tmp_path / "other", stops[0]
        stop = {"step": step, "interrupted": interrupted}
        ranks("is_interrupted", world, run=str(other), **stop, **arguments)
        if other_world == 1:
            run_training(other, resume=True, **arguments)
        else:
            ranks("trains_a_run", other_world, run=str(other), resume=True, **arguments)
        found, expected = (
            {each["step"]: each["train_loss"] for each in history(run) if "train_loss" in each}
            for run in (other, whole)
        )
        assert found == pytest.approx(expected, rel=1e-3)  # sums have another order
