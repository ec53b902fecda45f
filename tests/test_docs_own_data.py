import runpy

import numpy as np
import pytest

from recsys.datasets import Store
from recsys.datasets.store_writer import StoreWriter


@pytest.fixture
def script(pytestconfig):
    return runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "own_data.py"))


@pytest.mark.outside_ci
def test_logistic_regression_learns_what_a_column_tells(script, tmp_path):
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 4, 900), rng.integers(0, 9, 900)], axis=1).astype(np.int32)
    labels = (rows[:, 0] >= 2).astype(np.int8)
    labels[::10] ^= 1  # a tenth of the labels are wrong
    with StoreWriter(tmp_path / "store", dense_transform="none") as writer:
        writer.append(labels, np.empty((900, 0), np.float32), rows)
        path = writer.finish(
            dense_names=[],
            splits={"train": range(600), "validation": range(600, 750), "test": range(750, 900)},
            about={"convention": "classic", "sources": []},
            table_sizes={"a": 4, "b": 9},
        )

    found = script["logistic_regression"](Store(path))

    auc = found["metrics"]["test"]["auc"]
    assert 0.85 < auc < 0.97  # 0.9 of the pairs are in order
    assert found["C"] in script["_REGULARIZATION"]
