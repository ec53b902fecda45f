import json

import pytest
import torch

from recsys.bench.parts.harness import rows_by_provider, write_rows
from recsys.bench.parts.tiers_curve import curve_file, write_curve
from recsys.bench.tiers import bench_tiers
from recsys.embeddings.tiers.slot_costs import map_bytes, row_bytes, slot_bytes
from recsys.errors import ConfigError


@pytest.mark.outside_ci
@pytest.mark.usefixtures("quick_workers")
def test_budgets_and_schedules_are_measured_beside_everything_resident(capsys):
    rows = list(
        bench_tiers(
            ["floor", "0.001", "0.5", "1"],
            ["sequential", "lookahead-1"],
            dim=4,
            batch_size=16,
            optimizer="rowwise_adagrad",
            num_rounds=2,
            num_fill_steps=3,
            table_sizes=[3000, 2000, 7],
            is_quick=True,
        )
    )

    start = "B=16,D=4,cold_tier=host,optimizer=rowwise_adagrad,share="
    assert all(row.case.startswith(start) for row in rows)
    cells = {(row.case.removeprefix(start), row.provider, row.metric): row for row in rows}
    found = {share: {m for s, _, m in cells if s == share} for share, _, _ in cells}
    of_pipeline = {"time", "share_of_resident_speed", "budget", "budget_share", "hot_memory"}
    metrics = {
        *of_pipeline,
        "exposed_fetch",
        "mean_depth",
        "peak_over_resident",
        "lookup_hit_rate",
        "unique_hit_rate",
    }
    assert found == {
        "floor,schedule=sequential": metrics,
        "floor,schedule=lookahead-1": metrics,
        "0.5,schedule=sequential": metrics,
        "0.5,schedule=lookahead-1": metrics,
        "1,schedule=sequential": of_pipeline,
    }
    assert "share=0.001: skipped" in capsys.readouterr().out
    everything = 5007 * row_bytes(4, torch.float32, {"state": 1})
    assert cells["0.5,schedule=sequential", "recsys", "budget"].median == int(0.5 * everything)
    assert cells["1,schedule=sequential", "recsys", "budget"].median == everything
    floor = cells["floor,schedule=sequential", "recsys", "budget"].median
    at_most = map_bytes(5007) + (2 * 16 + 7) * slot_bytes(4, torch.float32, {"state": 1})
    assert map_bytes(5007) < floor <= at_most
    for case, metrics_of_case in found.items():
        hot, budget = (cells[case, "recsys", name].median for name in ("hot_memory", "budget"))
        assert 0 < hot <= budget
        times = [cells[case, provider, "time"].median for provider in ("recsys", "resident")]
        assert cells[case, "recsys", "share_of_resident_speed"].median == times[1] / times[0]
        if "unique_hit_rate" in metrics_of_case:
            hits = cells[case, "recsys", "lookup_hit_rate"].median
            assert cells[case, "recsys", "unique_hit_rate"].median <= hits < 1
    depths = {case: cells[case, "recsys", "mean_depth"].median for case in found if case[0] != "1"}
    assert depths["0.5,schedule=sequential"] == 0
    assert depths["0.5,schedule=lookahead-1"] == 1


def write_record(path):
    """What `recsys bench tiers` writes: twice the time of the resident module, then the same."""
    rows = []
    for case, share, speed in (
        ("D=4,share=floor,schedule=sequential", 0.02, 0.5),
        ("D=4,share=0.5,schedule=sequential", 0.5, 1.0),
        ("D=4,share=0.5,schedule=lookahead-2", 0.5, 0.9),
    ):
        for metric, value in (("budget_share", share), ("share_of_resident_speed", speed)):
            named = {"bench": "tiers", "case": case, "metric": metric, "unit": "ratio"}
            rows += rows_by_provider(**named, values={"recsys": [value] * 6})
    write_rows(path, rows)


def test_the_curve_has_a_line_for_each_schedule_and_lies_beside_the_json(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "recsys.bench.parts.tiers_curve.draw_shares",
        lambda curves: drawn.append(curves) or b"picture",
    )
    write_record(tmp_path / "tiers.json")

    write_curve(tmp_path / "tiers.json")

    assert drawn == [
        {
            "sequential": [(0.02, 0.5, 0.5, 0.5), (0.5, 1.0, 1.0, 1.0)],
            "lookahead-2": [(0.5, 0.9, 0.9, 0.9)],
        }
    ]
    assert (tmp_path / "tiers.png").read_bytes() == b"picture"


def test_the_curve_of_a_record_without_intervals_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "recsys.bench.parts.tiers_curve.draw_shares", lambda curves: drawn.append(curves) or b""
    )
    named = {"case": "D=4,share=0.5,schedule=sequential", "provider": "recsys"}
    values = {"median": 0.5, "low": None, "high": None}
    rows = [
        {**named, **values, "metric": metric}
        for metric in ("budget_share", "share_of_resident_speed")
    ]
    (tmp_path / "tiers.json").write_text(json.dumps({"rows": rows}))

    write_curve(tmp_path / "tiers.json")

    assert drawn == [{"sequential": [(0.5, 0.5, 0.5, 0.5)]}]


def test_the_curve_never_takes_the_place_of_its_json(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.png is where the curve goes.*ends in \.json"):
        curve_file(tmp_path / "x.png")
