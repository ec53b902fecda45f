import json

import numpy as np
import torch

from recsys.bench import synthetic
from recsys.bench.parts.harness import write_rows
from recsys.datasets.store import Store
from recsys.datasets.synthetic.samples import SyntheticCriteo


def test_every_case_is_measured_beside_the_store(tmp_path):
    rows = synthetic.bench_synthetic(num_samples=7_000, num_rounds=2, table_sizes=[50, 7])
    write_rows(tmp_path / "rows.json", rows)

    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    cases = ["plain", "drift", "preference_changes", "all"]
    assert [(row["provider"], row["metric"], row["unit"]) for row in written] == [
        *((case, "throughput", "samples/s") for case in [*cases, "store"]),
        *((case, "speed_over_store", "ratio") for case in cases),
    ]
    assert {row["case"] for row in written} == {"B=2048,samples=7000,tables=2"}
    assert all(row["median"] > 0 and row["num_runs"] == 2 for row in written)


def test_the_store_holds_the_samples_that_are_made(tmp_path):
    source = SyntheticCriteo(num_samples=1_000, table_sizes=[50, 7])
    numbers = np.random.default_rng(0).permutation(1_000)

    store = Store(synthetic.write_store(source, tmp_path / "store"))

    batch, expected = store.read(numbers), source.read(numbers)
    assert store.splits == source.splits
    assert torch.equal(batch.sparse_features.values(), expected.sparse_features.values())
    assert torch.equal(batch.labels, expected.labels)
    torch.testing.assert_close(batch.dense_features, expected.dense_features)
