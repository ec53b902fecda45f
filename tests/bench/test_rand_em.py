import json

import numpy as np
import pytest

from recsys.bench.parts.harness import write_rows
from recsys.bench.rand_em import _counts_by_order, _share, bench_rand_em


def test_every_order_cut_off_and_way_of_drawing_is_measured(tmp_path):
    rows = bench_rand_em([1, 2], num_samples=70_000, num_trials=6, num_rows=100_000)
    write_rows(tmp_path / "rows.json", rows)

    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    cases = [dict(pair.split("=") for pair in row["case"].split(",")) for row in written]
    assert [(case["order"], case["min_count"]) for case in cases[::4]] == [
        ("random", "1"),
        ("random", "2"),
        ("first_appearance", "1"),
        ("first_appearance", "2"),
    ]
    measured = [
        ("chunks", "inside"),
        ("chunks", "relative_error"),
        ("rows", "inside"),
        ("rows", "relative_error"),
    ]
    assert [(row["provider"], row["metric"]) for row in written] == 4 * measured
    assert all(row["num_runs"] == 6 and row["unit"] == "share" for row in written)
    assert cases[0]["hot_rows"] == cases[8]["hot_rows"]


def test_both_orders_have_the_same_counts_and_popular_rows_appear_first():
    orders = _counts_by_order(70_000, 100_000)

    scattered, appeared = orders["random"], orders["first_appearance"]

    np.testing.assert_array_equal(np.sort(scattered), np.sort(appeared))
    assert 6500 < scattered.sum() < 7500
    assert appeared[:1000].sum() > 4 * scattered[:1000].sum()
    assert not appeared[-10_000:].any()


@pytest.mark.parametrize(
    ("num_inside", "low", "high"),
    # Wilson's interval, worked out by hand from its formula.
    [(300, 0.9874, 1.0), (150, 0.4437, 0.5563), (0, 0.0, 0.0126)],
)
def test_a_share_of_trials_has_its_interval(num_inside, low, high):
    row = _share("case", "rows", [True] * num_inside + [False] * (300 - num_inside))

    assert row.median == num_inside / 300
    assert (row.low, row.high) == pytest.approx((low, high), abs=1e-4)
    assert row.num_runs == 300
