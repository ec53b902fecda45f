"""What is kept about synthetic data in docs/benchmarks says what the docs claim."""

import json

import pytest


@pytest.fixture
def kept(pytestconfig):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def test_coverage_is_within_two_points_of_the_real_sample(kept):
    record = kept("synthetic_coverage")
    real, synthetic = record["real"], record["synthetic"]

    expected, found = real["popularity"][0], synthetic["popularity"][0]

    assert found["num_samples"] == expected["num_samples"] == 137_139
    assert found["num_rows"] == pytest.approx(expected["num_rows"], rel=0.02)
    assert found["top_shares"] == pytest.approx(expected["top_shares"], abs=0.02)
    assert synthetic["distinct_rows"] == pytest.approx(real["distinct_rows"], abs=0.02)


def test_the_default_model_comes_within_a_hundredth_of_the_best_auc(kept):
    run = kept("synthetic_reached")

    assert run["status"] == "finished"
    assert run["data"]["num_samples"] == 5_000_000
    assert sum(run["data"]["table_sizes"].values()) == 33_762_577
    assert run["config"]["model"]["dense_arch"] == [512, 256, 64, 16]
    assert run["config"]["model"]["over_arch"] == [512, 256, 1]
    assert run["best_auc"] == pytest.approx(0.80, abs=0.01)
    assert run["metrics"]["test"]["auc"] > run["best_auc"] - 0.01


def test_no_model_without_tables_or_interactions_comes_near_the_best_auc(kept):
    planted = kept("synthetic_coverage")["synthetic"]["planted"]

    assert planted["no_tables"] < planted["no_interactions"] - 0.05
    assert planted["no_interactions"] < planted["everything"] - 0.01
