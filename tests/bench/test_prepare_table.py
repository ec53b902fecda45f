import numpy as np
import pytest

from recsys.bench import prepare_table
from recsys.datasets import Store

pytest.importorskip("pyarrow")


def test_all_providers_write_the_same_arrays(tmp_path):
    prepare_table.write_table_files(tmp_path, "rows", 500)
    found = {}
    for name, (prepare, suffix) in prepare_table._PROVIDERS.items():
        found[name] = prepare(tmp_path / f"rows{suffix}", tmp_path / name)
    assert len(set(found.values())) == 1
    store = Store(tmp_path / "recsys")
    assert (store.sparse.shape, store.dense.shape) == ((500, 13), (500, 6))
    for other in ("recsys-parquet", "pandas"):
        for array in ("labels.bin", "sparse.bin"):
            mine, theirs = (tmp_path / "recsys" / array, tmp_path / other / array)
            assert mine.read_bytes() == theirs.read_bytes()
        dense = np.fromfile(tmp_path / other / "dense.bin", np.float32).reshape(500, 6)
        np.testing.assert_allclose(dense, store.dense, rtol=1e-6)


@pytest.mark.usefixtures("quick_workers")
def test_all_providers_are_measured_into_rows(tmp_path):
    rows = prepare_table.bench_prepare_table(prepare_table.TableSize(num_rows=300, num_runs=1))

    providers = ["recsys", "recsys-parquet", "pandas"]
    assert [(row.provider, row.metric, row.unit) for row in rows] == [
        *((provider, "throughput", "MB/s") for provider in providers),
        *((provider, "peak_memory", "bytes") for provider in providers),
        *((provider, "speed_over_pandas", "ratio") for provider in providers[:2]),
    ]
    assert all(row.median > 0 and row.num_runs == 1 for row in rows)
    assert {row.case.split(",")[1:3] == ["rows=300", "columns=20"] for row in rows} == {True}
