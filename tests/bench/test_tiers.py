import pytest
import torch

from recsys.bench.tiers import bench_tiers
from recsys.embeddings.hot_tier import map_bytes, row_bytes, slot_bytes


@pytest.mark.usefixtures("quick_workers")
def test_budgets_are_measured_beside_everything_resident(capsys):
    rows = bench_tiers(
        ["floor", "0.001", "0.5"],
        dim=4,
        batch_size=16,
        optimizer="rowwise_adagrad",
        num_rounds=2,
        num_fill_steps=3,
        table_sizes=[3000, 2000, 7],
    )

    cells = {(row.case.rpartition("=")[2], row.provider, row.metric): row for row in rows}
    found = {share: {m for s, _, m in cells if s == share} for share, _, _ in cells}
    metrics = {
        "time",
        "share_of_resident_speed",
        "budget",
        "budget_share",
        "hot_memory",
        "peak_over_resident",
        "lookup_hit_rate",
        "unique_hit_rate",
    }
    assert found == {"floor": metrics, "0.5": metrics}
    assert "share=0.001: left out" in capsys.readouterr().out
    everything = 5007 * row_bytes(4, torch.float32, {"state": 1})
    assert cells["0.5", "recsys", "budget"].median == int(0.5 * everything)
    floor = cells["floor", "recsys", "budget"].median
    at_most = map_bytes(5007) + (2 * 16 + 7) * slot_bytes(4, torch.float32, {"state": 1})
    assert map_bytes(5007) < floor <= at_most
    for share in found:
        hot, budget = (cells[share, "recsys", name].median for name in ("hot_memory", "budget"))
        assert 0 < hot <= budget
        times = [cells[share, provider, "time"].median for provider in ("recsys", "resident")]
        assert cells[share, "recsys", "share_of_resident_speed"].median == times[1] / times[0]
        hits = cells[share, "recsys", "lookup_hit_rate"].median
        assert cells[share, "recsys", "unique_hit_rate"].median <= hits < 1
