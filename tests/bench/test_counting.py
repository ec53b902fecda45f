import json

import numpy as np
import torch

from recsys.bench import counting
from recsys.bench.parts.harness import write_rows
from recsys.datasets import Store, SyntheticCriteo
from recsys.embeddings import PopularityProfile


def test_stores_and_mini_batches_are_measured_beside_numpy_and_torch(tmp_path):
    rows = list(counting.bench_counting([32], num_samples=700, num_rounds=2, table_sizes=[50, 7]))
    write_rows(tmp_path / "rows.json", rows)

    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    measured = [
        *((name, "throughput", "lookups/s") for name in ("recsys", "numpy", "torch")),
        ("recsys", "speed_over_numpy", "ratio"),
        ("recsys", "speed_over_torch", "ratio"),
    ]
    assert [(row["provider"], row["metric"], row["unit"]) for row in written] == 3 * measured
    assert list(dict.fromkeys(row["case"] for row in written)) == [
        "lookups=criteo,samples=700,tables=2",
        "lookups=even,samples=700,tables=2",
        "B=32,batches=21,tables=2",
    ]
    assert all(row["median"] > 0 and row["num_runs"] == 2 for row in written)


def test_the_others_count_what_ours_counts(tmp_path):
    source = SyntheticCriteo(num_samples=640, table_sizes=[50, 7])
    store = Store(counting._write_even(source, tmp_path / "even"))
    batches = [store.read(np.arange(begin, begin + 64)) for begin in range(0, 640, 64)]
    arrays = [np.zeros(size, np.int32) for size in (50, 7)]
    tensors = [torch.zeros(size, dtype=torch.int32) for size in (50, 7)]

    counting._numpy_batches(arrays, batches)
    counting._torch_batches(tensors, torch.ones(64, dtype=torch.int32), batches)

    expected = PopularityProfile.count(store).counts()
    for found in (
        counting._numpy_store(store),
        [counts.numpy() for counts in counting._torch_store(store)],
        arrays,
        [counts.numpy() for counts in tensors],
    ):
        np.testing.assert_array_equal(np.concatenate(found), expected)


def test_even_lookups_reach_every_row_alike(tmp_path):
    source = SyntheticCriteo(num_samples=5000, table_sizes=[50, 7])

    store = Store(counting._write_even(source, tmp_path / "even"))

    counts = PopularityProfile.count(store).counts("cat_0")
    assert counts.min() > 60
    assert counts.max() < 140
    assert store.splits == source.splits
