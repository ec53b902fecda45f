"""The page, `table.md` and `table.csv` of an ablation say what `ablate.json` says."""

import csv
import json
import re
from statistics import geometric_mean, mean, stdev

import pytest

from recsys.ablate.run import ablate
from recsys.report.ablation_files import csv_table, markdown_table
from recsys.report.page import write_report
from recsys.train.trainer import train
from tests.report.test_ablation_columns import record_of
from tests.report.test_page import Page
from tests.report.test_paired import cell_of

TEXT = """
[ablate]
seeds = [0, 1]
target_auc = 0.3
eval_every_samples = 256
baseline = "resident"

[[ablate.variations]]
name = "resident"

[[ablate.variations]]
name = "tiered"
budget = "20KiB"

[[ablate.variations]]
name = "skipping"
skip.policy = "random_drop"
skip.share = 0.2
"""
TABLE_BYTES = (900 + 700 + 1 + 800) * 4 * 4  # D = 4, float32, SGD keeps no state


def moved(run):
    tiers = run["tiers"]
    return tiers and tiers["fetched_bytes"] + tiers["written_back_bytes"]


# Title, name in the CSV, how it is read from a cell, format, and what readers multiply it with.
COLUMNS = [
    ("test AUC", "auc", lambda cell: cell["run"]["metrics"]["test"]["auc"], "{:.4f}", 1),
    (
        "test logloss",
        "logloss",
        lambda cell: cell["run"]["metrics"]["test"]["logloss"],
        "{:.4f}",
        1,
    ),
    (
        "validation AUC",
        "validation_auc",
        lambda cell: cell["run"]["metrics"]["validation"]["auc"],
        "{:.4f}",
        1,
    ),
    (
        "test normalized entropy",
        "normalized_entropy",
        lambda cell: cell["run"]["metrics"]["test"]["normalized_entropy"],
        "{:.4f}",
        1,
    ),
    (
        "test calibration",
        "calibration",
        lambda cell: cell["run"]["metrics"]["test"]["calibration"],
        "{:.4f}",
        1,
    ),
    (
        "seconds of training",
        "train_time",
        lambda cell: cell["run"]["throughput"]["train_seconds"] * 1e3,
        "{:.1f}",
        1e-3,
    ),
    (
        "samples/s",
        "throughput",
        lambda cell: cell["run"]["throughput"]["samples_per_second"],
        "{:,.0f}",
        1,
    ),
    (
        "samples trained on",
        "num_trained",
        lambda cell: (
            cell["run"]["throughput"]["num_trained_samples"]
            if cell["variation"] == "skipping"
            else cell["run"]["throughput"]["num_samples"]
        ),
        "{:,.0f}",
        1,
    ),
    (
        "share skipped",
        "skipped_share",
        lambda cell: cell["run"]["skipped"] and cell["run"]["skipped"]["share_skipped"],
        "{:.4f}",
        1,
    ),
    (
        "MiB of fast memory",
        "fast_memory",
        lambda cell: cell["run"]["tiers"]["hot_bytes"] if cell["run"]["tiers"] else TABLE_BYTES,
        "{:,.1f}",
        1 / 2**20,
    ),
    (
        "lookup hit rate",
        "lookup_hit_rate",
        lambda cell: cell["run"]["tiers"] and cell["run"]["tiers"]["lookup_hit_rate"],
        "{:.4f}",
        1,
    ),
    (
        "unique hit rate",
        "unique_hit_rate",
        lambda cell: cell["run"]["tiers"] and cell["run"]["tiers"]["unique_hit_rate"],
        "{:.4f}",
        1,
    ),
    ("MiB moved", "moved_bytes", lambda cell: moved(cell["run"]), "{:,.0f}", 1 / 2**20),
    (
        "seconds to test AUC 0.3",
        "time_to_target_auc",
        lambda cell: cell["seconds_to_target_auc"] * 1e3,
        "{:.2f}",
        1e-3,
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of an ablation with tiers and with skipping."""
    folder = tmp_path_factory.mktemp("ablation")
    return folder / "out"


@pytest.fixture
def folder(trained, ablation):
    """The same, trained once."""
    if not trained.exists():
        config = ablation(TEXT, "synthetic.table_sizes=[900, 700, 1, 800]")
        ablate(config, trained, show_progress=False, run_cell=train)
    return trained


def values_of(record, variation, read):
    cells = [cell for cell in record["cells"] if cell["variation"] == variation]
    return [read(cell) for cell in cells]


def in_form(form, number, title):
    """A number for readers; less than a MiB has three digits."""
    return f"{number:.3g}" if "MiB" in title and 0 < number < 1 else form.format(number)


def mean_and_spread(form, values, scale, title):
    """The mean of values, and their deviation with as many digits after the point."""
    middle = in_form(form, mean(values) * scale, title)
    return middle, f"{stdev(values) * scale:,.{len(middle.partition('.')[2])}f}"


def test_every_number_of_the_page_is_that_of_the_json(folder):
    record = json.loads((folder / "ablate.json").read_text())

    page = Page(folder / "report.html")

    summary, differences, cells = page.tables[:3]
    assert summary[0] == ["variation", *(title for title, *_ in COLUMNS)]
    assert [line[0] for line in summary[1:]] == ["resident", "tiered", "skipping"]
    for line in summary[1:]:
        for text, (title, _, read, form, scale) in zip(line[1:], COLUMNS, strict=True):
            values = values_of(record, line[0], read)
            if None in values:
                assert text == "-", title
                continue
            middle, spread = mean_and_spread(form, values, scale, title)
            is_same = min(values) == max(values)
            assert text == (middle if is_same else f"{middle}\nsd {spread}"), title
    assert cells[0] == ["cell", *(title for title, *_ in COLUMNS), "status"]
    for line, cell in zip(cells[1:], record["cells"], strict=True):
        assert (line[0], line[-1]) == (cell["name"], "finished")
        for text, (title, _, read, form, scale) in zip(line[1:-1], COLUMNS, strict=True):
            value = read(cell)
            expected = "-" if value is None else in_form(form, value * scale, title)
            assert text.split(" \xb1 ")[0] == expected, title
    speed = next(read for _, name, read, *_ in COLUMNS if name == "throughput")
    ratios = [
        tiered / resident
        for tiered, resident in zip(
            values_of(record, "tiered", speed),
            values_of(record, "resident", speed),
            strict=True,
        )
    ]
    apart = (
        values_of(record, "skipping", COLUMNS[0][2]),
        values_of(record, "resident", COLUMNS[0][2]),
    )
    assert [line[0] for line in differences[1:]] == ["tiered", "skipping"]
    shown = differences[1][differences[0].index("samples/s, ratio")].split("\n")[0]
    assert shown == f"{geometric_mean(ratios):.3f}"
    shown = differences[2][differences[0].index("test AUC")].split("\n")[0]
    assert shown == f"{mean(apart[0]) - mean(apart[1]):+.5f}"


def test_every_number_of_the_markdown_is_that_of_the_json(folder):
    record = json.loads((folder / "ablate.json").read_text())

    text = (folder / "table.md").read_text()

    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split("\n\n")[2].splitlines()
    ]
    assert lines[0] == ["variation", *(title for title, *_ in COLUMNS)]
    assert [line[0] for line in lines[2:]] == ["resident", "tiered", "skipping"]
    for line in lines[2:]:
        for shown, (title, _, read, form, scale) in zip(line[1:], COLUMNS, strict=True):
            values = values_of(record, line[0], read)
            expected = "-"
            if None not in values:
                expected = " \xb1 ".join(mean_and_spread(form, values, scale, title))
            assert shown == expected, title
    assert "Equal in all cells: samples seen, skipped ones included 1,800." in text
    assert "Two seeds: a spread or an interval of two values says little" in text


def test_every_number_of_the_csv_is_that_of_the_json(folder):
    record = json.loads((folder / "ablate.json").read_text())

    with (folder / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))

    found = {(line["variation"], line["metric"]): line for line in lines}
    for variation in ("resident", "tiered", "skipping"):
        for _, metric, read, *_ in COLUMNS:
            line, values = found.pop((variation, metric)), values_of(record, variation, read)
            assert line["num_cells"] == "2"
            if None in values:
                assert line["num_runs"] == "0"
                assert {line[key] for key in ("mean", "std", "seed_0", "seed_1")} == {""}
                continue
            assert [float(line[key]) for key in ("seed_0", "seed_1")] == values
            assert float(line["mean"]) == pytest.approx(mean(values), rel=1e-12)
            assert float(line["std"]) == pytest.approx(stdev(values), rel=1e-12)
            assert (float(line["min"]), float(line["max"])) == (min(values), max(values))
    assert {metric for _, metric in found} == {"num_seen"}


def test_a_page_asks_for_nothing_outside_of_it(folder):
    text = (folder / "report.html").read_text()

    assert len(Page(folder / "report.html").sources) == 3  # quality, memory, stages
    assert not re.search(r"https?:|<script|<link|@import|url\(|\son\w+=", text)


def test_the_tables_of_an_older_folder_are_made_anew(folder):
    before = (folder / "table.md").read_text()
    for name in ("table.md", "table.csv", "report.html"):
        (folder / name).unlink()

    write_report(folder)

    assert (folder / "table.md").read_text() == before
    assert (folder / "table.csv").is_file()


def test_markup_in_a_name_is_no_markup_in_the_table():
    record = record_of([cell_of("none", 0), cell_of("drop", 0)], baseline=None)
    for row in record["rows"]:
        row["variation"] = "data=<b>|x"
    for cell in record["cells"]:
        cell["variation"] = "data=<b>|x"
    record |= {"status": "finished"}
    record["cells"] = record["cells"][:1]
    for cell in record["cells"]:
        cell["run"]["data"] = {}

    text = markdown_table(record, "a|b")

    assert "| data=&lt;b>\\|x |" in text
    assert text.startswith("# a\\|b\n")


def test_a_cell_that_diverged_leaves_its_place_empty():
    cells = [cell_of("none", 0), cell_of("none", 1, status="diverged")]
    for cell in cells:
        cell["run"]["data"] = {"best_auc": 0.75}
    cells[1]["name"] = "<b>-seed1"
    record = record_of(cells, baseline=None) | {"status": "finished"}

    lines = list(csv.DictReader(csv_table(record).splitlines()))

    auc = next(line for line in lines if line["metric"] == "auc")
    assert (auc["seed_0"], auc["seed_1"]) == ("0.7", "")
    assert (auc["num_runs"], auc["num_cells"], auc["std"]) == ("1", "2", "")
    text = markdown_table(record, "x")
    assert "0.7000 (1 of 2 have none)" in text
    assert "\n\n1 of 2 cells diverged and have no value: &lt;b>-seed1.\n" in text
    assert "\n\nBest AUC possible: 0.7500.\n" in text
