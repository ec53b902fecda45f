import pytest
import torch

from recsys.bench.harness import ratio, summarize
from recsys.bench.step import bench_step, take_turns


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


def test_whoever_begins_changes_from_round_to_round_and_warm_up_is_not_counted():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}

    seconds = take_turns(steps, num_rounds=3)

    assert {name: len(spent) for name, spent in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert len(calls) == 3 * (3 + 3)
    assert "".join(calls[-9:]) == "abcbcacab"


def test_a_ratio_is_that_of_the_medians_with_an_interval_around_it():
    ours, theirs = [1.0, 2.0, 3.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0, 40.0]

    row = ratio(bench="b", case="c", provider="p", metric="m", values=ours, baseline=theirs)

    assert row.median == 2.0
    assert row.low <= row.median <= row.high
    assert row.unit == "ratio"


def test_the_interval_of_equal_values_is_a_point():
    row = summarize(bench="b", case="c", provider="p", metric="m", unit="ms", values=[3.0] * 9)

    assert (row.low, row.median, row.high) == (3.0, 3.0, 3.0)
