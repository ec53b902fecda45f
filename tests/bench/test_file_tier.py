import json
import os

import pytest

from recsys._support import machine
from recsys.bench.file_tier import (
    FileTierCase,
    bench_file_tier,
    default_table_bytes,
    scaled_table_sizes,
)
from recsys.bench.parts.disk import PAGE_BYTES, Disk, best_num_threads
from recsys.bench.parts.file_tier_rows import FileTierTurns, rows_of_file_tier
from recsys.bench.parts.scheduled import Turn
from recsys.cli import main
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.embeddings.tiers.counts import TierCounts
from recsys.errors import ConfigError


def case(tmp_path, **changed):
    values = {
        "table_sizes": (3000, 2000, 7),
        "dim": 8,
        "batch_size": 16,
        "budget": "40KiB",
        "cold_path": tmp_path / "rows",
        "schedules": ("sequential", "lookahead-1"),
        "num_rounds": 2,
        "num_fill_steps": 3,
        "fill_batch_size": 20,
        "disk_seconds": 0.01,
        "is_quick": True,
    }
    return FileTierCase(**(values | changed))


def can_read_directly(folder):
    (folder / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.outside_ci
@pytest.mark.usefixtures("quick_workers")
def test_schedules_are_measured_beside_mapped_files_and_the_disk_and_files_are_left_whole(
    tmp_path,
):
    if not can_read_directly(tmp_path):
        pytest.skip(f"{tmp_path} has no direct reads")

    rows = bench_file_tier(case(tmp_path))

    whole = str(case(tmp_path))
    cells = {
        (row.case.removeprefix(whole).lstrip(","), row.provider, row.metric): row.median
        for row in rows
    }
    found = {(of, by): {m for c, p, m in cells if (c, p) == (of, by)} for of, by, _ in cells}
    memory = {"anonymous_memory_at_start", "peak_anonymous_memory"}
    of_schedule = {
        "speed",
        "time",
        "exposed_fetch",
        "speed_over_mmap",
        "fetched_rows_per_sample",
        "lookup_hit_rate",
        "mean_depth",
        "disk_floor",
        "share_of_limit",
    }
    for of in [key for key in found if key[0].startswith("schedule=")]:
        found[of] -= {"disk_floor_of_reads", "share_of_limit_of_reads"}  # where the system tells
    direct, ordinary = {"direct_reads_of_empty_cache"}, {"ordinary_reads_of_empty_cache"}
    assert found == {
        ("", "recsys"): {"compute_floor", "compute_floor_hit_rate", "hot_memory", *memory},
        ("", "mmap"): {"speed", *memory},
        ("", "disk"): {"random_reads_of_4096", "num_bytes"},
        ("schedule=sequential", "recsys"): of_schedule,
        ("schedule=lookahead-1", "recsys"): {*of_schedule, "speedup_over_sequential"},
        ("threads=1", "disk"): direct,
        ("threads=4", "disk"): direct | ordinary,
        ("threads=16", "disk"): direct,
        ("threads=32", "disk"): direct,
        ("threads=64", "disk"): direct,
    }
    assert cells["", "disk", "num_bytes"] == 5007 * 8 * 4
    assert 0 < cells["", "recsys", "hot_memory"] <= 40 * 1024
    assert cells["", "recsys", "compute_floor_hit_rate"] == 1
    for schedule, depth in (("sequential", 0), ("lookahead-1", 1)):
        ours = {m: value for (c, _, m), value in cells.items() if c == f"schedule={schedule}"}
        assert ours["mean_depth"] == depth
        assert 0 < ours["fetched_rows_per_sample"] <= 3
        limit = max(cells["", "recsys", "compute_floor"], ours["disk_floor"])
        assert ours["share_of_limit"] == pytest.approx(limit / ours["time"])
    manifest = json.loads((tmp_path / "rows" / "arrays.json").read_text())
    assert not manifest["is_dirty"]


@pytest.mark.parametrize(("reads", "limit"), [(1000, "disk"), (100_000, "compute")])
def test_the_limit_is_the_slower_of_computing_and_of_the_disk(reads, limit):
    # 8 rows of two pages a step: 16 ms or 0.16 ms of the disk; computing takes 2 ms.
    counts = TierCounts(num_fetched=16)
    ours = [Turn(0.020, 0.004, counts, disk_bytes=8 * 4096, mean_depth=2.0)] * 6
    turns = FileTierTurns({"sequential": ours}, [Turn(0.002)] * 6, [Turn(0.060)] * 6, [reads] * 6)
    memory = {"anonymous_at_start": 1.0, "peak_anonymous": 2.0}

    rows = rows_of_file_tier(
        "B=4",
        batch_size=4,
        row_bytes=8192,
        num_bytes=1,
        num_timed_steps=2,
        turns=turns,
        memory={"recsys": {**memory, "hot_bytes": 1.0}, "mmap": memory},
    )

    cells = {(row.case, row.metric): row.median for row in rows}
    ours = {m: value for (c, m), value in cells.items() if c == "B=4,schedule=sequential"}
    assert cells["B=4", "compute_floor"] == pytest.approx(2)
    assert ours["disk_floor"] == pytest.approx(16 * 1000 / reads)
    assert ours["disk_floor_of_reads"] == pytest.approx(4 * 1000 / reads)
    assert ours["share_of_limit"] == pytest.approx({"disk": 0.8, "compute": 0.1}[limit])
    assert ours["share_of_limit_of_reads"] == pytest.approx({"disk": 0.2, "compute": 0.1}[limit])
    assert ours["speed_over_mmap"] == pytest.approx(3)
    assert ours["speed"] == pytest.approx(200)
    assert ours["fetched_rows_per_sample"] == pytest.approx(2)


def test_the_disk_is_asked_with_as_many_reads_at_once_as_it_likes_best():
    found = {("direct", 1): [9.0, 1.0, 1.0], ("direct", 4): [2.0] * 3, ("ordinary", 16): [8.0]}

    assert best_num_threads(found) == 4


def test_tables_that_the_disk_has_no_room_for_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"cold_path: tables take .* free; choose another folder"):
        bench_file_tier(case(tmp_path, table_sizes=(10**13,)))

    assert not list(tmp_path.iterdir())


def test_kaggles_tables_grow_by_one_factor():
    sizes = scaled_table_sizes(3 * sum(KAGGLE_TABLE_SIZES) * 64 * 4, 64)

    assert sizes == tuple(3 * size for size in KAGGLE_TABLE_SIZES)


def test_tables_are_a_multiple_of_the_memory_that_a_container_has(monkeypatch):
    monkeypatch.setattr(machine, "limits_of_groups", lambda *_: [2**20])

    assert default_table_bytes(1.5) == 1.5 * 2**20


def test_the_command_asks_for_a_folder(capsys):
    assert main(["bench", "tiers", "--cold-tier", "file"]) != 0
    assert "--cold-tier file needs --cold-path" in capsys.readouterr().err


def test_a_thread_that_starts_late_reads_at_least_once(tmp_path):
    (tmp_path / "rows.bin").write_bytes(bytes(PAGE_BYTES))
    disk = Disk(tmp_path, 0.0, is_direct=False)

    assert disk.turn(2) > 0
