"""The ready configurations of examples/ablation: what they vary, and that their cells train."""

import re

import pytest

from recsys.ablate import load_ablation
from recsys.config import replace
from recsys.errors import ConfigError
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


@pytest.fixture
def ready(pytestconfig):
    """Loads a ready configuration, with settings."""

    def load(name, *settings):
        file = pytestconfig.rootpath / "examples" / "ablation" / f"{name}.toml"
        return load_ablation(file, settings)

    return load


def what_varies(config):
    return {
        (
            cell.config.schedule.kind,
            getattr(cell.config.schedule.lookahead, "depth", 0),
            cell.config.budget,
        )
        for cell in config.cells
    }


@pytest.mark.parametrize("name", READY)
def test_a_ready_configuration_is_for_a_store_and_says_how_it_is_run(ready, pytestconfig, name):
    text = (pytestconfig.rootpath / "examples" / "ablation" / f"{name}.toml").read_text()
    config = ready(name)

    assert {cell.config.data for cell in config.cells} == {"STORE"}
    assert len(config.keys.seeds) == 3
    assert config.keys.baseline
    comment = text.partition("\n\n")[0]
    assert "?" in comment  # the question that it answers
    command = (
        f"#     recsys ablate examples/ablation/{name}.toml --set data=STORE --run runs/{name}"
    )
    assert command in comment.splitlines()


@pytest.mark.parametrize(("name", "variation"), READY.items())
def test_a_cell_of_a_ready_configuration_can_be_trained(ready, tmp_path, name, variation):
    config = ready(
        name,
        "data=synthetic:criteo-kaggle",
        "synthetic.num_samples=2100",
        "synthetic.table_sizes=[900, 700, 1, 800]",
        "model.embedding_dim=4",
        "model.dense_arch=[8, 4]",
        "model.over_arch=[8, 1]",
        "num_threads=1",
    )
    (cell, *_) = [cell for cell in config.cells if cell.variation == variation]
    evaluation = replace(cell.config.eval, every_steps=0)  # the run is too short for the file's
    of_tables = {"sgd": "28KiB", "adagrad": "60KiB"}[cell.config.optimizer.name]  # three quarters
    budget = cell.config.budget and of_tables

    small = replace(cell.config, batch_size=64, budget=budget, eval=evaluation)
    record = train(small, tmp_path / "run", show_progress=False)

    assert record["status"] == "finished"
    assert (record["tiers"] is not None) == bool(budget)


def test_hotline_is_beside_sequential_and_look_ahead_at_two_budgets(ready):
    assert what_varies(ready("hotline")) == {("", 0, "")} | {
        (name, depth, budget)
        for name, depth in (("sequential", 0), ("lookahead", 2), ("hotline", 0))
        for budget in ("6MiB", "16MiB")
    }


def test_fae_varies_rate_and_budget_and_nothing_else(ready):
    found = {
        (cell.config.schedule.fae.rate, cell.config.budget)
        for cell in ready("fae").cells
        if cell.config.schedule.kind == "fae"
    }

    assert found == {(1, "4MiB"), (50, "4MiB"), (100, "4MiB"), (50, "8MiB")}


def test_slipstream_asks_every_policy_for_the_same_shares_without_a_guard(ready):
    cells = [cell.config.skip for cell in ready("slipstream").cells]

    found = [(skip.kind, getattr(skip, skip.kind)) for skip in cells if skip.kind != "none"]
    assert {(policy, keys.share) for policy, keys in found} == {
        (policy, share)
        for policy in ("drop_input", "importance", "random_drop")
        for share in (0.2, 0.4)
    }
    # random_drop and none have no guard to switch off.
    assert {keys.guard.every for policy, keys in found if policy != "random_drop"} == {0}


def test_parts_has_every_provider_every_depth_every_order_and_policies(ready):
    cells = [cell.config for cell in ready("parts").cells]

    assert {each.embeddings for each in cells} == {"torch", "recsys"}
    assert {each.precision for each in cells} == {"fp32", "bf16"}
    assert {each.budget for each in cells} == {"", "3MiB", "8MiB"}
    assert {
        each.schedule.lookahead.depth for each in cells if each.schedule.kind == "lookahead"
    } == {1, 2, 4}
    assert {each.schedule.kind for each in cells} == {
        *("", "sequential", "lookahead", "hotline", "fae"),
    }
    assert {each.skip.kind for each in cells} == {
        *("none", "drop_input", "freeze_rows", "subsample", "importance", "random_drop"),
    }


def test_the_plan_of_parts_can_be_taken_in(pytestconfig, tmp_path):
    file = pytestconfig.rootpath / "examples" / "ablation" / "parts.toml"
    commented = re.compile(r"^# (?=\[\[ablate|name = |plan = |schedule\.)", re.MULTILINE)
    (tmp_path / "parts.toml").write_text(commented.sub("", file.read_text()))

    last = load_ablation(tmp_path / "parts.toml").cells[-1]

    assert (last.variation, last.config.plan) == ("8MiB-plan", "plan.npz")


@pytest.mark.parametrize("typo", ["schedule.lookahead.dept", "skipp.drop_input"])
def test_a_typo_in_a_variation_is_told_before_a_cell_is_trained(pytestconfig, tmp_path, typo):
    file = pytestconfig.rootpath / "examples" / "ablation" / "hotline.toml"
    text = file.read_text()
    last = text.rindex("schedule.lookahead.depth")
    (tmp_path / "typo.toml").write_text(
        text[:last] + text[last:].replace("schedule.lookahead.depth", typo)
    )

    with pytest.raises(
        ConfigError, match=f"variation 'lookahead-16MiB': .*{typo.partition('.')[0]}"
    ):
        load_ablation(tmp_path / "typo.toml")
