"""The table of Hotline's halves in docs/ablation.md, from a file of results."""

import json
import runpy
import sys
from statistics import geometric_mean, mean

import pytest

from recsys.ablate.run import ablate
from recsys.train.trainer import train
from tests.doc_tables import cells_of

TEXT = """
[ablate]
seeds = [0, 1]
baseline = "resident"
[[ablate.variations]]
name = "resident"
[[ablate.variations]]
name = "neither"
budget = "20KiB"
schedule.name = "sequential"
[[ablate.variations]]
name = "split"
budget = "20KiB"
schedule.name = "hotline"
"""


@pytest.fixture
def hotline_table(pytestconfig, monkeypatch):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return runpy.run_path(str(folder / "tables_of_hotline.py"))["hotline_table"]


@pytest.mark.outside_ci
def test_the_table_of_hotline_says_what_its_cells_say(hotline_table, ablation, tmp_path):
    results = tmp_path / "hotline.json"
    config = ablation(TEXT, "synthetic.table_sizes=[900, 700, 1, 800]")
    ablate(config, tmp_path / "out", results=results, show_progress=False, run_cell=train)
    runs = {}
    for cell in json.loads(results.read_text())["cells"]:
        runs.setdefault(cell["variation"], []).append(cell["run"])

    text = hotline_table(str(results))

    _, _, *lines = cells_of(text)
    assert [line[0] for line in lines] == ["resident", "neither", "split"]
    speeds = {
        name: [run["throughput"]["samples_per_second"] for run in own] for name, own in runs.items()
    }
    assert [line[1] for line in lines] == [f"{mean(own):,.0f}" for own in speeds.values()]
    for line in lines[1:]:
        own = runs[line[0]]
        tiers = [run["tiers"] for run in own]
        assert line[2] == f"{mean(each['hot_bytes'] for each in tiers) / 2**20:,.1f}"
        assert line[3] == f"{mean(each['lookup_hit_rate'] for each in tiers):.4f}"
        stalls = [run["stalls"] for run in own]
        total = sum(run["throughput"]["train_seconds"] for run in own)
        waited = sum(each["prefetch_wait_seconds"] for each in stalls)
        waited += sum(each["write_back_wait_seconds"] for each in stalls)
        assert line[5] == f"{100 * waited / total:.1f} %"
        pairs = zip(speeds[line[0]], speeds["resident"], strict=True)
        assert line[7].split()[0] == f"{geometric_mean(one / other for one, other in pairs):.3f}"
    assert [line[6] for line in lines[:2]] == ["", ""]
    shares = [run["schedule"]["split_step_share"] for run in runs["split"]]
    assert lines[2][6] == f"{100 * mean(shares):.0f} %"
    assert lines[1][8].startswith("+0.00000")
    assert lines[0][7:] == ["", ""]
