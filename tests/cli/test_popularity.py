import numpy as np
import pytest

from recsys.cli import main
from recsys.datasets import Store, SyntheticCriteo
from recsys.embeddings import HotPlan, PopularityProfile
from tests.stores import write_store


def run_cli(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def store(tmp_path):
    source = SyntheticCriteo(num_samples=2000, table_sizes=[300, 7, 1, 500])
    return write_store(source, tmp_path / "store")


def test_profile_counts_the_named_samples_and_prints_the_coverage_of_later_ones(
    store, tmp_path, capsys
):
    assert run_cli("profile", store, "--out", tmp_path / "p.npz", "--samples", "0.25:0.5") == 0

    printed = capsys.readouterr().out
    profile = PopularityProfile.load(tmp_path / "p.npz")
    expected = PopularityProfile.count(Store(store), range(500, 1000))
    np.testing.assert_array_equal(profile.counts(), expected.counts())
    assert f"2,000 lookups of 500 samples; {profile.num_rows_seen:,} of 808 rows" in printed


@pytest.mark.parametrize("samples", ["5", "0:1.5", "a:b", "0:nan", "0.7:0.7", "0:0.5:1"])
def test_samples_are_two_shares(store, tmp_path, samples):
    with pytest.raises(SystemExit):
        run_cli("profile", store, "--out", tmp_path / "p.npz", "--samples", samples)


def test_a_profile_that_is_there_is_not_replaced(store, tmp_path, capsys):
    (tmp_path / "p.npz").write_text("mine")

    assert run_cli("profile", store, "--out", tmp_path / "p.npz") == 2

    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "p.npz").read_text() == "mine"


def test_plan_pins_rows_for_the_model_that_train_would_make(store, tmp_path, capsys):
    profile, out = tmp_path / "p.npz", tmp_path / "plan.npz"
    run_cli("profile", store, "--out", profile)
    capsys.readouterr()
    (tmp_path / "model.toml").write_text("[model]\nembedding_dim = 8\ndense_arch = [16, 8]\n")
    settings = ["--config", tmp_path / "model.toml", "--set", "optimizer.name=rowwise_adagrad"]
    settings += ["--set", "batch_size=16"]

    assert run_cli("plan", profile, "--budget", "20KB", "--out", out, *settings) == 0

    printed = capsys.readouterr().out
    plan = HotPlan.load(out)
    assert plan.tables["t_cat_0"] == (8, "fp32", 1, 8 * 4 + 4 + 11)
    assert plan.num_shared_slots == {(8, "fp32"): 16 + 7 + 1 + 16}
    assert f"{plan.num_pinned} of 808 rows pinned in" in printed
    assert str(plan) in printed


def test_a_budget_below_the_floor_leaves_no_plan(store, tmp_path, capsys):
    profile, out = tmp_path / "p.npz", tmp_path / "plan.npz"
    run_cli("profile", store, "--out", profile)

    assert run_cli("plan", profile, "--budget", "1KiB", "--out", out) == 2

    assert "budget must be at least" in capsys.readouterr().err
    assert not out.exists()
