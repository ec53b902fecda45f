import pytest
import torch

from recsys.bench.step import bench_step


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_provider_is_measured_in_every_case():
    pytest.importorskip("torchrec", exc_type=ImportError)

    rows = bench_step([16], ["fp32", "bf16"], num_rounds=2, table_sizes=[50] * 26)

    cases = [f"B=16,D=16,optimizer=sgd,precision={precision}" for precision in ("fp32", "bf16")]
    providers = ["torch", "fbgemm", "dense", "dense_eager", "gemm_torch", "gemm_onednn"]
    assert [(row.case, row.provider) for row in rows if row.metric == "time"] == [
        (case, provider) for case in cases for provider in providers
    ]
    assert [row.case for row in rows if row.metric == "speed_over_dense_eager"] == cases
    assert all(row.median > 0 and row.num_runs == 2 for row in rows)
