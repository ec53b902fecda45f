"""The ready configurations of examples/ablation: what they vary, and that their cells train."""

import re

import pytest

from recsys.ablate import load_ablation
from recsys.config import replace
from recsys.train.trainer import train

# A configuration, and the variation of it that is tried.
READY = {
    "fae": "fae-50-8MiB",
    "hotline": "split-6MiB",
    "models": "deepfm",
    "parts": "8MiB-lookahead-4",
    "precision": "13MiB,precision=bf16",
    "slipstream": "random_drop-0.4",
}


@pytest.mark.parametrize(("name", "variation"), READY.items())
def test_a_cell_of_a_ready_configuration_can_be_trained(pytestconfig, tmp_path, name, variation):
    config = load_ablation(
        pytestconfig.rootpath / "examples" / "ablation" / f"{name}.toml",
        [
            "data=synthetic:criteo-kaggle",
            "synthetic.num_samples=2100",
            "synthetic.table_sizes=[900, 700, 1, 800]",
            "model.embedding_dim=4",
            "model.dense_arch=[8, 4]",
            "model.over_arch=[8, 1]",
            "num_threads=1",
        ],
    )
    (cell, *_) = [cell for cell in config.cells if cell.variation == variation]
    evaluation = replace(cell.config.eval, every_steps=0)  # the run is too short for the file's
    of_tables = {"sgd": "28KiB", "adagrad": "60KiB"}[cell.config.optimizer.name]  # three quarters
    budget = cell.config.budget and of_tables

    small = replace(cell.config, batch_size=64, budget=budget, eval=evaluation)
    record = train(small, tmp_path / "run", show_progress=False)

    assert record["status"] == "finished"
    assert (record["tiers"] is not None) == bool(budget)


def test_the_plan_of_parts_can_be_taken_in(pytestconfig, tmp_path):
    file = pytestconfig.rootpath / "examples" / "ablation" / "parts.toml"
    commented = re.compile(r"^# (?=\[\[ablate|name = |plan = |schedule\.)", re.MULTILINE)
    (tmp_path / "parts.toml").write_text(commented.sub("", file.read_text()))

    last = load_ablation(tmp_path / "parts.toml").cells[-1]

    assert (last.variation, last.config.plan) == ("8MiB-plan", "plan.npz")
