import pytest

from recsys.bench.skipping import bench_skipping


@pytest.mark.outside_ci
@pytest.mark.usefixtures("quick_workers")
def test_every_provider_trains_one_window_a_round():
    rows = list(bench_skipping([8], num_rounds=1, table_sizes=[50] * 3, samples_per_window=360))

    found = {(row.provider, row.metric): row for row in rows}
    others = ("plain_again", "observe", "drop_input")
    times = [found[name, "time"].median for name in ("plain", *others)]
    assert {row.case for row in rows} == {"B=8,D=16,optimizer=adagrad,window=40"}
    assert {row.num_runs for row in rows} == {1}
    assert min(times) > 0
    assert set(found) - {(name, "time") for name in ("plain", *others)} == {
        (name, "time_over_plain") for name in others
    }
