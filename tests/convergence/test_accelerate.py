"""The example with a model built the classic way, plain and accelerated."""

import pytest

from recsys.datasets import SyntheticCriteo


def test_the_example_finds_the_same_auc_both_ways(classic):
    source = SyntheticCriteo(num_samples=7000, table_sizes=[30, 7, 1, 500])

    found = classic.train_and_test(source, 0, 256, dim=4, dense_arch=[8], over_arch=[8])

    assert found["seed"] == 0
    assert found["plain"]["auc"] == pytest.approx(found["accelerated"]["auc"], abs=1e-3)
    assert found["accelerated"]["seconds"] > 0
