import json
import os

import pytest

from recsys.bench.file_tier import FileTierCase, bench_file_tier, scaled_table_sizes
from recsys.cli import main
from recsys.datasets.criteo_shape import KAGGLE_TABLE_SIZES
from recsys.errors import ConfigError


def case(tmp_path, **changed):
    values = {
        "table_sizes": (3000, 2000, 7),
        "dim": 8,
        "batch_size": 16,
        "budget": "40KiB",
        "cold_path": tmp_path / "rows",
        "num_rounds": 2,
        "num_steps": 2,
        "num_fill_steps": 3,
        "disk_seconds": 0.01,
    }
    return FileTierCase(**(values | changed))


def can_read_directly(folder):
    (folder / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.usefixtures("quick_workers")
def test_ours_is_measured_beside_mapped_files_and_the_disk_and_leaves_them_whole(tmp_path):
    if not can_read_directly(tmp_path):
        pytest.skip(f"{tmp_path} has no direct reads")

    rows = bench_file_tier(case(tmp_path))

    cells = {(row.provider, row.metric): row.median for row in rows}
    memory = {"anonymous_memory_at_start", "peak_anonymous_memory"}
    assert {metric for provider, metric in cells if provider == "mmap"} == {"speed", *memory}
    assert {metric for provider, metric in cells if provider == "recsys"} == {
        "speed",
        "speed_over_mmap",
        "fetched_rows_per_sample",
        "lookup_hit_rate",
        "hot_memory",
        *memory,
    }
    assert cells["disk", "num_bytes"] == 5007 * 8 * 4
    assert 0 < cells["recsys", "hot_memory"] <= 40 * 1024
    assert 0 < cells["recsys", "fetched_rows_per_sample"] <= 3
    assert cells["disk", "speed_if_every_fetched_row_were_a_read"] == pytest.approx(
        cells["disk", "random_reads_of_4096"] / cells["recsys", "fetched_rows_per_sample"]
    )
    manifest = json.loads((tmp_path / "rows" / "arrays.json").read_text())
    assert not manifest["is_dirty"]


def test_tables_that_the_disk_has_no_room_for_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"cold_path: tables take .* free; choose another folder"):
        bench_file_tier(case(tmp_path, table_sizes=(10**13,)))

    assert not list(tmp_path.iterdir())


def test_kaggles_tables_grow_by_one_factor():
    sizes = scaled_table_sizes(3 * sum(KAGGLE_TABLE_SIZES) * 64 * 4, 64)

    assert sizes == tuple(3 * size for size in KAGGLE_TABLE_SIZES)


def test_the_command_asks_for_a_folder(capsys):
    assert main(["bench", "tiers", "--cold-tier", "file"]) != 0
    assert "--cold-tier file needs --cold-path" in capsys.readouterr().err
