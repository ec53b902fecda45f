import pytest
import torch

from recsys.bench.gpu.cases import Case, Model
from recsys.bench.gpu.clock import Clock, Limits, gemm_seconds, measure_limits, precision_of
from recsys.bench.gpu.providers import Turn
from recsys.bench.gpu.rows import Floor, Measured, rows_of_case, table_of_case
from recsys.bench.parts.harness import ModelledRow
from recsys.embeddings.tiers.counts import TierCounts

CASE = Case(Model("kaggle", 128, 1000, "tf32"), "0.1", has_baselines=True)


def test_a_step_is_at_least_as_long_as_the_slower_of_computing_and_of_each_direction():
    floor = Floor(0.5, num_lookups=10, num_distinct=5, limits=Limits(100, 50, 1000))

    on_device = 4 * (3 * 10 * 2 + 2 * 5 * 2)
    assert floor.seconds(2, 0, 0) == 0.5 + on_device / 1000
    assert floor.seconds(2, 200, 10) == 2
    assert floor.seconds(2, 200, 150) == 3


def test_rows_say_what_the_turns_say():
    counts = TierCounts(
        num_lookups=100,
        num_hits=80,
        num_rows=50,
        num_rows_hit=40,
        num_fetched=10,
        num_written_back=6,
    )
    resident = [Turn(0.010, 2, 0.004, 300)] * 6
    ours = [Turn(0.012, 2, 0.011, 500, counts)] * 6
    measured = [
        Measured("resident", "", resident, 5000, None, 0, 0),
        Measured("recsys", "lookahead-2", ours, 700, 800, mean_depth=2.0),
    ]
    floor = Floor(0.003, 0, 0.0, Limits(1e9, 1e9, 1e9))

    rows = rows_of_case(CASE, measured, floor, row_bytes=512, everything=8000)

    found = {(row.provider, row.metric): row.median for row in rows}
    ours_case = f"{CASE.name},schedule=lookahead-2"
    assert {row.case for row in rows if row.provider == "recsys"} == {ours_case}
    assert found["recsys", "time"] == pytest.approx(12)
    assert found["recsys", "throughput"] == pytest.approx(1000 / 0.012)
    assert found["recsys", "share_of_resident_speed"] == pytest.approx(10 / 12)
    assert found["recsys", "exposed"] == pytest.approx(2)
    assert found["recsys", "host"] == pytest.approx(11)
    assert found["recsys", "floor"] == pytest.approx(3)
    assert found["recsys", "floor_share"] == pytest.approx(3 / 12)
    assert found["recsys", "pcie_per_sample"] == pytest.approx(6 * 16 * 512 / (12 * 1000))
    assert found["recsys", "missing_per_sample"] == pytest.approx(6 * 10 * 512 / (12 * 1000))
    assert found["recsys", "lookup_hit_rate"] == 0.8
    assert found["recsys", "unique_hit_rate"] == 0.8
    assert found["recsys", "budget_share"] == 0.1
    assert found["recsys", "peak_memory"] == 1200
    assert found["resident", "peak_memory"] == 5300
    assert ("resident", "exposed") not in found
    modelled = {row.metric for row in rows if isinstance(row, ModelledRow)}
    assert modelled == {"floor", "floor_share"}
    told = table_of_case(rows).splitlines()
    assert len(told) == 3
    assert told[2].split()[:2] == ["recsys", "lookahead-2"]
    assert told[2].split()[2:4] == ["12.00", "11.00"]
    assert "83.3%" in told[2]


def test_limits_and_products_take_time():
    device = torch.device("cpu")

    limits = measure_limits(device, 1 << 16)

    assert min(limits) > 0
    for precision in ("fp32", "bf16"):
        assert gemm_seconds(Model("nvidia", 8, 16, precision), 3, device) > 0
    assert Clock(device).time(lambda: sum(range(1000))) > 0


def test_the_products_are_those_of_a_step(monkeypatch):
    """Counted by their multiplications: forward, and both gradients but that of the features."""
    counted = []

    def mm(a, b):
        counted.append(a.shape[0] * a.shape[1] * b.shape[1])
        return a.new_empty(a.shape[0], b.shape[1])

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(Clock, "median", lambda self, function: function() or 1.0)
    model = Model("kaggle", 8, 16, "fp32")

    gemm_seconds(model, 3, torch.device("cpu"))

    first, others = 13 * 512, [512 * 256, 256 * 8, (8 + 6) * 512, 512 * 256, 256 * 1]
    assert sum(counted) == 16 * (2 * first + 3 * sum(others))


def test_a_precision_ends_with_its_case():
    before = torch.get_float32_matmul_precision()

    for precision, expected in (("fp32", "highest"), ("tf32", "high"), ("bf16", "high")):
        with precision_of(Model("kaggle", 8, 16, precision)):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == before
