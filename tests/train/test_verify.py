import pytest
import torch

from recsys.cli import main
from recsys.embeddings import PopularityProfile, plan_hot_rows
from recsys.train import trials
from recsys.train.build import open_source, tables_of
from recsys.train.trials import verify_budgets

TABLES = "synthetic.table_sizes=[900, 700, 1, 800]"


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_every_budget_equals_everything_resident(small_config, name):
    dense = "adagrad" if name == "rowwise_adagrad" else name
    config = small_config(TABLES, f"optimizer.name={name}", f"dense_optimizer.name={dense}")

    found = verify_budgets(config)

    assert not any(each.differing for each in found), found
    assert all(each.tiers is not None for each in found)
    assert [each.num_steps for each in found] == [15] * 2


def test_rows_in_files_equal_everything_resident_even_where_all_would_fit(small_config, tmp_path):
    config = small_config(TABLES, "optimizer.name=adam", "cold_tier=file", f"cold_path={tmp_path}")

    found = verify_budgets(config, ["floor", "1MiB"])

    assert not any(each.differing for each in found), found
    assert [each.tiers["cold_tier"] for each in found] == ["file"] * 2
    assert not list(tmp_path.iterdir())


def test_a_plan_changes_nothing_but_what_is_hot(small_config, tmp_path):
    config = small_config(TABLES)
    source = open_source(config)
    profile = PopularityProfile.count(source, source.splits["train"])
    tables = tables_of(source.table_sizes, profile.features, config.model)
    plan = plan_hot_rows(profile, tables, "30KiB", window_lookups=config.batch_size)
    plan.save(tmp_path / "plan.npz")

    found = verify_budgets(small_config(TABLES, f"plan={tmp_path}/plan.npz"))

    assert not any(each.differing for each in found), found
    assert found[0].budget_bytes == plan.floor_bytes
    assert all(each.tiers is not None for each in found)


def test_what_differs_is_named_and_the_command_fails(
    small_config, small_settings, monkeypatch, capsys
):
    real = trials._train

    def wrong(config, source, max_steps):
        numbers, *rest = real(config, source, max_steps)
        if config.budget:
            numbers["loss of step 1"] += 1e-6
        return numbers, *rest

    monkeypatch.setattr(trials, "_train", wrong)
    command = ["verify", "synthetic:criteo-kaggle", *small_settings, "--set", TABLES]
    command += ["--budgets", "half", "--steps", "3"]

    assert main(command) == 1
    assert "loss of step 1" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_every_budget_equals_everything_resident_on_a_gpu(small_config, name):
    config = small_config(TABLES, f"optimizer.name={name}", "device=cuda")

    found = verify_budgets(config)

    assert not any(each.differing for each in found), found
    assert all(each.tiers is not None for each in found)
