"""Small stores with bags, shared tables and weights, to train on; classes of the user's own."""

import sys

import numpy as np
import pytest

from recsys.datasets.store_writer import Feature, StoreWriter, classic_splits
from tests.train.resumed_runs import stop_at  # noqa: F401
from tests.train.test_models import CUSTOM, POOLED

FEATURES = (
    ("user", "user"),
    ("tags", "tag", "multi"),
    ("item", "item"),
    ("history", "item", "sequence"),
)
TABLES = {"item": 400, "user": 90, "tag": 12}


@pytest.fixture
def table_store(tmp_path):
    """Writes a store of random samples, whose labels depend on the rows, and returns its path."""

    def write(name="store", *, num_samples=700, num_dense=2, has_weights=True, features=FEATURES):
        features = [Feature(*each) for each in features]
        rng = np.random.default_rng(1)
        effects = {table: rng.normal(size=size) for table, size in TABLES.items()}
        sizes = [TABLES[each.table] for each in features if not each.is_bag]
        sparse = np.stack([rng.zipf(1.5, num_samples) % size for size in sizes], 1)
        bags = [each for each in features if each.is_bag]
        looked_up = {each.table for each in features}
        sizes_of_tables = {name: size for name, size in TABLES.items() if name in looked_up}
        lengths = rng.integers(0, 5, (num_samples, len(bags)))
        highs = np.repeat(np.tile([TABLES[each.table] for each in bags], num_samples), lengths.flat)
        values = (rng.zipf(1.5, len(highs)) % highs).astype(np.int32)
        ones = [each for each in features if not each.is_bag]
        logits = sum(effects[each.table][rows] for each, rows in zip(ones, sparse.T, strict=True))
        labels = (rng.random(num_samples) < 1 / (1 + np.exp(-logits))).astype(np.int8)
        weights = rng.random(num_samples).astype(np.float32) + 0.5
        path = tmp_path / name
        with StoreWriter(
            path, dense_transform="none", features=features, has_weights=has_weights
        ) as writer:
            writer.append(
                labels,
                rng.normal(size=(num_samples, num_dense)).astype(np.float32),
                sparse.astype(np.int32),
                bag_values=values if bags else None,
                bag_lengths=lengths if bags else None,
                weights=weights if has_weights else None,
            )
            writer.finish(
                dense_names=[f"dense_{column}" for column in range(num_dense)],
                table_sizes=sizes_of_tables,
                splits=classic_splits(num_samples),
                about={"convention": "table", "sources": [], "schema": {"label": "click"}},
            )
        return path

    return write


@pytest.fixture
def own_class(tmp_path, monkeypatch):
    """Writes a module with a class `Sum` of the user's own, and returns its `model.name`."""

    def write(attribute="pass", pool=POOLED, code=CUSTOM):
        (tmp_path / "own_code.py").write_text(code.format(attribute=attribute, pool=pool))
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "own_code", raising=False)
        return "model.name=own_code:Sum"

    yield write
    sys.modules.pop("own_code", None)
