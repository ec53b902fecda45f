"""`recsys bench distributed`, on small tables and two processes, and its tables in the docs."""

import json
import runpy

import numpy as np
import pytest
import torch

from recsys.bench import distributed
from recsys.bench.distributed import bench_distributed
from recsys.bench.parts import worker
from recsys.bench.parts.harness import modelled, rows_by_provider, write_rows
from recsys.bench.ranks.collectives import _SENT
from recsys.bench.ranks.providers import TORCHREC, providers_with
from recsys.bench.ranks.traffic import traffic_of
from recsys.errors import MissingDependency

SIZES, DIM, BATCH_SIZE = [4000, 3000, 7, 5000], 16, 512
CASE = "W=2,B=512,D=16,max_rows=5000"


@pytest.fixture(scope="module")
def measured(forking):
    """The rows of one run that all tests read; starting the processes takes long."""
    pytest.importorskip("torchrec", exc_type=ImportError)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "multiprocessing", forking)
        for name in ("_NUM_BATCHES", "_NUM_COUNTED_STEPS", "_NUM_MODELLED_BATCHES"):
            patch.setattr(distributed, name, 3)  # so that the model has the mini-batches counted
        patch.setattr(distributed, "_NUM_WARM_UP_ROUNDS", 0)
        rows = list(
            bench_distributed(
                [2],
                batch_size=BATCH_SIZE,
                dim=DIM,
                num_rounds=1,
                table_sizes=SIZES,
                providers=providers_with(0.6),
                modelled_world_sizes=(2, 8),
            )
        )
    torch.set_num_threads(before)
    return rows


def cells_of(rows):
    return {(row.case, row.provider, row.metric): row for row in rows}


@pytest.mark.slow
def test_bytes_of_vectors_are_those_of_arithmetic(measured):
    cells, case = cells_of(measured), f"{CASE},plan="
    vectors = "collective=all_to_all_single,dtype=float32"

    # Table-wise, a rank sends the vectors of its two tables for the other rank's 256 samples, and
    # as many gradients; row-wise, its part of all four.
    expected = 2 * (2 * 256 * DIM * 4)
    for provider in ("recsys", TORCHREC):
        sent = cells[f"{case}table_wise,{vectors}", provider, "bytes_sent"]
        assert (sent.p20, sent.median, sent.p80) == (expected,) * 3
    parts = [
        row.median
        for (name, provider, metric), row in cells.items()
        if name.startswith(f"{case}row_wise,collective=") and name.endswith("float32")
        if (provider, metric) == (TORCHREC, "bytes_sent")
    ]
    assert sum(parts) == 2 * expected


@pytest.mark.slow
def test_the_model_computes_what_is_counted_but_for_the_sizes_that_ranks_announce(measured):
    cells = cells_of(measured)

    for provider in providers_with(0.6):
        exchange = provider.fused_params.get("row_wise_exchange", "pooled")
        design = f"{provider.plan}_{exchange}"
        counted = cells[f"{CASE},plan={provider.plan}", provider.name, "bytes_sent"]
        computed = cells[CASE, design, "bytes_sent"]

        for which in ("p20", "median", "p80"):
            assert 0 <= getattr(counted, which) - getattr(computed, which) < 100, provider


@pytest.mark.slow
def test_all_providers_have_equal_losses(measured):
    losses = [row.median for row in measured if row.metric == "loss"]

    assert len(losses) >= 5
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.slow
def test_the_rows_of_the_model_and_no_others_say_so_in_the_file(measured, tmp_path):
    write_rows(tmp_path / "distributed.json", measured)

    rows = json.loads((tmp_path / "distributed.json").read_text())["rows"]

    designs = {"table_wise_pooled", "row_wise_pooled", "row_wise_rows"}
    assert {row["provider"] for row in rows if row.get("modelled")} == designs
    assert {row["metric"] for row in rows if row.get("modelled")} == {"bytes_sent", "link_time"}
    assert not designs & {row["provider"] for row in rows if "modelled" not in row}
    assert len(rows) == len(measured)


@pytest.mark.slow
def test_a_budget_is_a_share_of_the_bytes_of_a_ranks_rows(measured):
    cells, case = cells_of(measured), f"{CASE},plan=row_wise"

    budget = cells[case, "recsys_budget", "budget"].median
    hits = cells[case, "recsys_budget", "lookup_hit_rate"].median

    # Half of the rows of each table; of seven rows, four and three.
    assert budget == pytest.approx(0.6 * sum(SIZES) / 2 * DIM * 4, abs=1)
    assert 0 < hits < 1


@pytest.mark.parametrize(
    ("collective", "given", "expected"),
    [
        ("all_to_all_single", {"input": 12}, 9 * 4),
        ("all_to_all_single", {"input": 12, "input_split_sizes": [5, 1, 4, 2]}, 11 * 4),
        ("all_to_all", {"input_tensor_list": [5, 1, 4, 2]}, 11 * 4),
        ("reduce_scatter", {"input_list": [3, 3, 3, 3]}, 9 * 4),
        ("reduce_scatter_tensor", {"input": 12}, 9 * 4),
        ("all_gather", {"tensor": 3}, 9 * 4),
        ("all_gather_into_tensor", {"input_tensor": 3}, 9 * 4),
        ("all_reduce", {"tensor": 12}, 18 * 4),
    ],
)
def test_only_bytes_for_other_ranks_count(collective, given, expected):
    """Rank 1 of 4."""

    def tensors(value):
        return [torch.zeros(size) for size in value] if isinstance(value, list) else value

    given = {
        name: value
        if name.endswith("sizes")
        else tensors(value)
        if isinstance(value, list)
        else torch.zeros(value)
        for name, value in given.items()
    }

    _, num_bytes = _SENT[collective](given, 1, 4)

    assert num_bytes == expected


def test_the_traffic_of_a_small_mini_batch_is_what_one_counts_by_hand():
    # Rank 0 has samples 0 to 2, and rows 0 and 1 of both tables; rank 1 has the others.
    ids = np.array([[0, 3, 3, 0, 1, 0], [2, 0, 1, 3, 0, 0]])

    found = traffic_of(ids, [4, 4], 2, 8)

    row = 8 * 4
    tables, parts, rows = found.values()
    assert tables.ids[0, 1] == tables.ids[1, 0] == 3 * 16
    assert tables.vectors[0, 1] == tables.vectors[1, 0] == 3 * row
    assert parts.vectors[0, 1] == parts.vectors[1, 0] == 2 * 3 * row
    # Rank 0 looks up row 3 twice, and row 2 of the other table. Rank 1 looks up rows of rank 0 five
    # times, and three of them are distinct.
    assert (parts.ids[0, 1], parts.ids[1, 0]) == (3 * 8 + 6 * 8, 5 * 8 + 6 * 8)
    assert (rows.ids[0, 1], rows.ids[1, 0]) == (2 * 4 + 2 * 4, 3 * 4 + 2 * 4)
    assert (rows.vectors[0, 1], rows.vectors[1, 0]) == (2 * row, 3 * row)
    assert rows.bytes_sent == (16 + 20 + 2 * 5 * row) / 2
    assert rows.seconds(8.0) == 20 + 2 * 3 * row


def test_no_traffic_is_lost_where_there_are_more_ranks_than_tables():
    ids = np.random.default_rng(0).integers(0, 50, (3, 64))

    found = traffic_of(ids, [50] * 3, 16, 4)

    assert {name: each.vectors.shape for name, each in found.items()} == {
        "table_wise_pooled": (16, 16),
        "row_wise_pooled": (16, 16),
        "row_wise_rows": (16, 16),
    }
    assert found["table_wise_pooled"].vectors.sum() == 3 * 64 * 16
    assert (found["row_wise_rows"].vectors <= found["row_wise_pooled"].vectors).all()


def test_without_torchrec_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(distributed, "find_spec", lambda name: None)

    with pytest.raises(MissingDependency, match=r"pip install 'recsys\[torchrec\]'"):
        list(
            bench_distributed([1], batch_size=8, dim=4, num_rounds=1, providers=providers_with(0.5))
        )


def record_of(path):
    """What `recsys bench distributed` writes, of two providers."""
    case = f"{CASE},plan=table_wise"
    one = f"{case},collective=all_reduce,dtype=int32"
    rows = []
    for name, metric, unit, values in (
        (case, "time", "ms", {"recsys": [4.0] * 6, TORCHREC: [8.0] * 6}),
        (case, "speed_over_torchrec_fbgemm", "ratio", {"recsys": [2.0] * 6}),
        (case, "bytes_sent", "bytes", {"recsys": [3e6], TORCHREC: [5e6]}),
        (case, "loopback_sent", "bytes", {"recsys": [4e6], TORCHREC: [6e6]}),
        (case, "collective_time", "ms", {"recsys": [1.5], TORCHREC: [2.5]}),
        (one, "calls", "calls", {"recsys": [1.0]}),
        (one, "bytes_sent", "bytes", {"recsys": [2e4]}),
        (one, "collective_time", "ms", {"recsys": [0.5]}),
    ):
        rows += rows_by_provider(
            bench="distributed", case=name, metric=metric, unit=unit, values=values
        )
    for number, design in enumerate(("table_wise_pooled", "row_wise_pooled", "row_wise_rows"), 1):
        named = {"bench": "distributed", "provider": design}
        case = "W=8,B=512,D=16,max_rows=5000"
        rows.append(
            modelled(**named, case=case, metric="bytes_sent", unit="bytes", values=[number * 1e6])
        )
        for link in ("25GbE", "100GbE"):
            named["case"] = f"{case},link={link}"
            rows.append(modelled(**named, metric="link_time", unit="ms", values=[number / 4]))
    write_rows(path, rows)


def test_the_tables_hold_what_was_measured_and_what_was_computed(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    record_of(tmp_path / "distributed.json")
    file = str(tmp_path / "distributed.json")

    steps, collectives, model = (
        tables[f"distributed_{name}table"](file) for name in ("", "collectives_", "model_")
    )

    assert (
        "A step of 512 samples over all processes, D=16, tables of at most 5,000 rows; median of 6"
        in steps
    )
    assert steps.strip().split("\n")[-2:] == [
        "| 2 | table-wise | recsys | 4.0 (4.0-4.0) | **2.00** (2.00-2.00) | 3.00 | 4.00 | 1.5 |",
        "| 2 | table-wise | torchrec_fbgemm | 8.0 (8.0-8.0) |  | 5.00 | 6.00 | 2.5 |",
    ]
    assert collectives.strip().split("\n")[-1] == (
        "| table-wise | recsys | `all_reduce` | int32 | 1 | 0.02 | 0.5 |"
    )
    assert model.startswith("A model, not measured: ")
    assert model.strip().split("\n")[-1] == (
        "| 8 | 1.00 | 0.25 / 0.25 | 2.00 | 0.50 / 0.50 | 3.00 | 0.75 / 0.75 |"
    )
