import json
import re
import runpy
from functools import cache
from itertools import chain, product
from statistics import mean, stdev

import numpy as np
import pytest

from recsys.ablate.config import load_ablation
from recsys.ablate.run import ablate
from recsys.bench.parts.disk import rows_of_empty_cache
from recsys.bench.parts.file_tier_rows import FileTierTurns, rows_of_file_tier
from recsys.bench.parts.harness import median_of_ratios, ratio, rows_by_provider, write_rows
from recsys.bench.parts.scheduled import Turn
from recsys.bench.rand_em import bench_rand_em
from recsys.bench.synthetic import write_store
from recsys.cli.commands import build_parser
from recsys.datasets import SyntheticCriteo
from recsys.embeddings.tiers.counts import TierCounts
from recsys.train.trainer import train


@pytest.fixture(scope="module")
def tables(pytestconfig):
    """The names of tables.py; each of its tables is made once."""
    found = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    found["TABLES"].update({name: cache(make) for name, make in found["TABLES"].items()})
    return found


def test_tables_are_what_their_json_makes_them(pytestconfig, tables):
    for name in tables["DOCUMENTS"]:
        text = (pytestconfig.rootpath / name).read_text()
        assert tables["with_tables"](text) == text


def has_record(table):
    try:
        table()
    except FileNotFoundError:
        return False
    return True


def test_every_table_stands_between_whole_marks_and_once_in_the_docs(pytestconfig, tables):
    placed = {}

    for name in tables["DOCUMENTS"]:
        text = (pytestconfig.rootpath / name).read_text()
        placed[name] = [table for _, table, _ in tables["_PLACE"].findall(text)]
        # Whatever looks like a mark, a damaged one too: a table after it would not be checked.
        marks = [
            line for line in text.splitlines() if re.search(r"<!--|-->|<!-.*(table|end)", line)
        ]
        whole = [(f"<!-- table: {table} -->", "<!-- end -->") for table in placed[name]]
        assert marks == [mark for pair in whole for mark in pair], name

    assert placed["README.md"] == ["lookup_headline"]
    measured = {name for name, table in tables["TABLES"].items() if has_record(table)}
    everywhere = list(chain.from_iterable(placed.values()))
    assert len(everywhere) == len(set(everywhere))
    assert measured <= set(everywhere) <= set(tables["TABLES"])  # some are not measured yet


@pytest.mark.parametrize("error", [{}, {"auc_standard_error": 0.0054}])
def test_the_standard_error_of_an_auc_is_told_where_every_record_has_it(
    pytestconfig, tmp_path, monkeypatch, error
):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    tables = runpy.run_path(str(folder / "tables.py"))
    (tmp_path / "reference").mkdir()
    for file in (folder / "reference").glob("sgd-*.json"):
        run = json.loads(file.read_text())
        run["metrics"]["test"]["auc_standard_error"] = 0.0058
        if "torch-0" in file.name:
            del run["metrics"]["test"]["auc_standard_error"]
            run["metrics"]["test"] |= error
        (tmp_path / "reference" / file.name).write_text(json.dumps(run))
    monkeypatch.setitem(tables["reference_table"].__globals__, "RECORDS", tmp_path)

    caption = tables["TABLES"]["reference"]().partition("\n")[0]

    expected = "; the standard error of one AUC is 0.0054 to 0.0058" if error else ""
    assert f"of the last of seven parts{expected}); " in caption


@pytest.mark.parametrize(("drift", "least", "most"), [(0.5, 0.1, 0.25), (0.0, 0.0, 0.03)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_click_rate_of_synthetic_samples_wanders_with_drift_alone(seed, drift, least, most):
    source = SyntheticCriteo(num_samples=5_000_000, seed=seed, drift=drift)

    rates = [
        float(source.read(np.arange(start, start + 10_000)).labels.mean())
        for start in (5_000_000 * part // 6 for part in range(6))
    ]

    assert least < max(rates) - min(rates) < most


def test_the_table_of_an_ablation_holds_what_its_cells_measured(
    pytestconfig, tmp_path, small_settings
):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    (tmp_path / "ablation.toml").write_text(
        "[ablate]\nseeds = [0, 1]\ntarget_auc = 0.999\neval_every_samples = 256\n"
        "[[ablate.variations]]\nname = 'sgd'\n"
    )
    config = load_ablation(tmp_path / "ablation.toml", [*small_settings[1::2], "num_threads=1"])
    ablate(config, tmp_path / "out", show_progress=False, run_cell=train)
    runs = [
        json.loads((tmp_path / "out" / "cells" / f"sgd-seed{seed}" / "run.json").read_text())
        for seed in (0, 1)
    ]

    caption, _, header, _, line = (
        tables["ablate_table"](str(tmp_path / "out" / "ablate.json")).strip().split("\n")
    )

    aucs = [run["metrics"]["test"]["auc"] for run in runs]
    rates = [run["throughput"]["samples_per_second"] for run in runs]
    cells = line.strip("| ").split(" | ")
    assert caption.startswith("1,800 training samples, tested on 150, seeds 0, 1: mean")
    assert header.endswith("| seconds to test AUC 0.999 |")
    assert cells[:2] == [
        "sgd",
        f"{mean(aucs):.4f} ({min(aucs):.4f}-{max(aucs):.4f}; {stdev(aucs):.4f})",
    ]
    assert cells[3].startswith(f"{mean(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}; ")
    assert cells[4] == "-, 0 of 2 runs"


def test_the_table_of_the_generator_holds_what_was_measured(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    values = {"plain": [8e5, 9e5, 1e6] * 2, "preference_changes": [6e5] * 6, "store": [5e6] * 6}
    throughput = {"metric": "throughput", "unit": "samples/s", "values": values}
    rows = rows_by_provider(bench="synthetic", case="B=2048,samples=7000,tables=26", **throughput)
    for provider in ("plain", "preference_changes"):
        speed = {"metric": "speed_over_store", "values": [4.0] * 6, "baseline": [2.0] * 6}
        rows.append(ratio(bench="synthetic", case=rows[0].case, provider=provider, **speed))
    write_rows(tmp_path / "generator.json", rows)

    text = tables["generator_table"](str(tmp_path / "generator.json"))

    caption, _, _, _, *lines = text.strip().split("\n")
    assert "mini-batches of 2,048 through" in caption
    assert "7,000 samples, 26 tables; median of 6 rounds" in caption
    assert lines == [
        "| plain | 900,000 (800,000-1,000,000) | 0.50 (0.50-0.50) |",
        "| preference changes | 600,000 (600,000-600,000) | 0.50 (0.50-0.50) |",
        "| store | 5,000,000 (5,000,000-5,000,000) |  |",
    ]


def test_the_table_of_counting_holds_what_was_measured(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    rows = []
    for case in ("lookups=even,samples=7000,tables=3", "B=128,batches=5,tables=3"):
        seconds = {"recsys": [1.0] * 6, "numpy": [4.0] * 6, "torch": [0.5] * 6}
        rates = {name: [2e8 / s for s in spent] for name, spent in seconds.items()}
        named = {"bench": "count", "case": case}
        unit = {"metric": "throughput", "unit": "lookups/s"}
        rows += rows_by_provider(**named, **unit, values=rates)
        for other in ("numpy", "torch"):
            times = {"values": seconds["recsys"], "baseline": seconds[other]}
            rows.append(ratio(**named, provider="recsys", metric=f"speed_over_{other}", **times))
    write_rows(tmp_path / "count.json", rows)

    text = tables["count_table"](str(tmp_path / "count.json"))

    caption, _, _, _, store, batches = text.strip().split("\n")
    assert "7,000 samples, 3 tables; median of 6 rounds" in caption
    cells = "200 | 50 | 400 | 4.00 (4.00-4.00) | 0.50 (0.50-0.50) |"
    assert store == f"| a store, lookups drawn evenly | {cells}"
    assert batches == f"| mini-batches of 128 | {cells}"


def test_the_table_of_intervals_holds_what_was_measured(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    rows = bench_rand_em([1, 10**9], num_samples=7_000, num_trials=6, num_rows=50_000)
    write_rows(tmp_path / "rand_em.json", rows)

    text = tables["rand_em_table"](str(tmp_path / "rand_em.json"))

    caption, _, _, _, first, nothing, *_ = text.strip().split("\n")
    inside, error = rows[0], rows[1]
    assert "A table of 50,000 rows, " in caption
    assert "6 trials in each line" in caption
    assert first.startswith("| random | 1 | ")
    assert (
        f" | **{100 * inside.median:.1f} %** ({100 * inside.low:.1f}-{100 * inside.high:.1f}) "
        f"| {100 * error.median:.1f} % | " in first
    )
    assert nothing == (
        "| random | 1000000000 | 0 | **100.0 %** (61.0-100.0) |  | **100.0 %** (61.0-100.0) |  |"
    )


def _lookup_record(path):
    """What `recsys bench lookup` writes, where providers take as many milliseconds as these."""
    of_ours = {"recsys": 2.0, "kernels": 1.0, "floor": 0.5}
    milliseconds = {**of_ours, "fbgemm": 5.0, "torch": 8.0}
    seconds = {name: [spent] * 6 for name, spent in milliseconds.items()}
    rows = []
    for optimizer in ("sgd", "rowwise_adagrad"):
        named = {"bench": "lookup", "case": f"B=128,D=16,optimizer={optimizer}"}
        found = {n: s for n, s in seconds.items() if (n, optimizer) != ("torch", "rowwise_adagrad")}
        rows += rows_by_provider(**named, metric="time", unit="ms", values=found)
        for ours, other in product(of_ours, list(found)[3:]):
            times = {"values": found[ours], "baseline": found[other]}
            rows.append(ratio(**named, provider=ours, metric=f"speed_over_{other}", **times))
        memory = (("stream", "bandwidth", 44.0), ("recsys", "bandwidth_share", 0.25))
        for provider, metric, value in memory:
            values = {provider: [value] * 6}
            rows += rows_by_provider(**named, metric=metric, unit="u", values=values)
    for ours, (other, num_cases) in product(of_ours, (("fbgemm", 2), ("torch", 1))):
        pairs = [(seconds[ours], seconds[other])] * num_cases
        named = {"bench": "lookup", "case": "B=128", "provider": ours}
        rows.append(median_of_ratios(**named, metric=f"speed_over_{other}", pairs=pairs))
    write_rows(path, rows)


def test_the_tables_of_lookups_hold_what_was_measured(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    _lookup_record(tmp_path / "lookup.json")

    cases = tables["lookup_table"](str(tmp_path / "lookup.json"))
    summary = tables["lookup_summary_table"](str(tmp_path / "lookup.json"))

    caption, _, header, _, sgd, rowwise = cases.strip().split("\n")
    assert "median of 6 rounds" in caption
    assert "streams 44 to 44 GB/s" in caption
    assert header.count("|") == sgd.count("|") == rowwise.count("|")
    assert sgd == (
        "| 16 | sgd | 128 | 2.00 | 1.00 | 0.50 | 5.00 | 8.00 | 2.50 (2.50-2.50) | 4.00 (4.00-4.00) "
        "| 25% |"
    )
    assert rowwise == (
        "| 16 | rowwise_adagrad | 128 | 2.00 | 1.00 | 0.50 | 5.00 |  | 2.50 (2.50-2.50) |  | 25% |"
    )
    caption, *_, line = summary.strip().split("\n")
    assert "Median over 2 cases beside fbgemm and 1 beside torch" in caption
    assert line == (
        "| 128 | **2.50** (2.50-2.50) | **4.00** (4.00-4.00) | **5.00** (5.00-5.00) "
        "| **10.00** (10.00-10.00) |"
    )


def test_the_table_of_steps_has_a_column_for_ours_where_it_was_measured(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    case = "B=128,D=16,optimizer=sgd,precision=fp32"
    named = {"bench": "step", "case": case}
    seconds = {"recsys": 2.0, "torch": 4.0, "fbgemm": 3.0, "dense": 1.6, "dense_eager": 3.2}
    values = {name: [spent] * 6 for name, spent in seconds.items()}
    rows = rows_by_provider(**named, metric="time", unit="ms", values=values)
    for provider, metric, of, baseline in (
        ("recsys", "speed_over_torch", "recsys", "torch"),
        ("recsys", "speed_over_fbgemm", "recsys", "fbgemm"),
        ("recsys", "time_over_dense", "dense", "recsys"),
        ("dense", "speed_over_dense_eager", "dense", "dense_eager"),
    ):
        pair = {"values": values[of], "baseline": values[baseline]}
        rows.append(ratio(**named, provider=provider, metric=metric, **pair))
    write_rows(tmp_path / "step.json", rows)

    _, _, header, _, line = tables["step_table"](str(tmp_path / "step.json")).strip().split("\n")

    assert header.startswith(
        "| B | precision | recsys | torch | fbgemm | dense | dense_eager | rec"
    )
    assert line == (
        "| 128 | fp32 | 2.00 | 4.00 | 3.00 | 1.60 | 3.20 | **2.00** (2.00-2.00) "
        "| **1.50** (1.50-1.50) | **1.25** (1.25-1.25) | **2.00** (2.00-2.00) |"
    )


def test_the_table_of_budgets_has_a_line_for_each_schedule(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    case = "B=16,D=4,cold_tier=host,optimizer=sgd,share="
    of_tiers = {"peak_over_resident": 2**20, "lookup_hit_rate": 0.9, "unique_hit_rate": 0.5}
    rows = []
    for share, schedule, more in (
        ("floor", "lookahead-2", {**of_tiers, "exposed_fetch": 1.5}),
        ("1", "sequential", {}),
    ):
        named = {"bench": "tiers", "case": f"{case}{share},schedule={schedule}"}
        times = {"recsys": [4.0] * 6, "resident": [2.0] * 6}
        rows += rows_by_provider(**named, metric="time", unit="ms", values=times)
        pair = {"values": times["recsys"], "baseline": times["resident"]}
        metric = "share_of_resident_speed"
        rows.append(ratio(**named, provider="recsys", metric=metric, **pair))
        sizes = {"budget": 2**21, "hot_memory": 2**20, "budget_share": 0.25}
        for metric, value in (sizes | more).items():
            values = {"recsys": [value]}
            rows += rows_by_provider(**named, metric=metric, unit="u", values=values)
    write_rows(tmp_path / "tiers.json", rows)

    text = tables["tiers_table"](str(tmp_path / "tiers.json"))

    _, _, header, _, tiered, resident = text.strip().split("\n")
    assert header.count("|") == tiered.count("|") == resident.count("|")
    assert tiered == (
        "| the floor | lookahead-2 | 25.0 % | 2 | 1 | 1 | 90.0 % | 50.0 % | 1.5 | 4.0 | 2.0 "
        "| **0.50** (0.50-0.50) |"
    )
    assert resident == (
        "| 1 | sequential | 25.0 % | 2 | 1 |  |  |  |  | 4.0 | 2.0 | **0.50** (0.50-0.50) |"
    )


def test_the_table_of_the_file_tier_has_a_line_for_each_schedule(pytestconfig, tmp_path):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    case = "B=4,D=8,budget=1MiB,cold_tier=file,optimizer=sgd,tables=1GiB"
    counts = TierCounts(num_lookups=10, num_hits=9, num_rows=9, num_rows_hit=1, num_fetched=8)
    of_schedules = {
        name: [Turn(seconds, exposed, counts, disk_bytes=2 * 4096)] * 6
        for name, seconds, exposed in (
            ("sequential", 0.040, 0.030),
            ("lookahead-2", 0.020, 0.001),
        )
    }
    turns = FileTierTurns(of_schedules, [Turn(0.004)] * 6, [Turn(0.080)] * 6, [500.0] * 6)
    memory = {"anonymous_at_start": 2.0**20, "peak_anonymous": 2.0**21}
    direct = {("direct", 4): [600.0] * 3, ("direct", 1): [200.0] * 3, ("ordinary", 16): [5.0]}
    rows = rows_of_file_tier(
        case,
        batch_size=4,
        row_bytes=32,
        num_bytes=2**30,
        num_timed_steps=1,
        turns=turns,
        memory={"recsys": {**memory, "hot_bytes": 1.0}, "mmap": memory},
    )
    write_rows(tmp_path / "file.json", [*rows_of_empty_cache(case, direct), *rows])

    text = tables["tiers_file_table"](str(tmp_path / "file.json"))

    caption, _, header, _, sequential, ahead, mapped = text.strip().split("\n")
    assert "with 1.0 GiB of tables" in caption
    assert "fetched 2.00 rows a sample (90.0 % of lookups hit); a step that fetches none" in caption
    assert "takes 4.0 ms. The disk gave 500 random reads of 4 KiB a second" in caption
    assert "600 (4), 200 (1), at best 600, and 5 by way of it" in caption
    assert "1 MiB for ours, 1 MiB for mmap." in caption
    assert header.count("|") == sequential.count("|") == ahead.count("|") == mapped.count("|")
    assert sequential == (
        "| sequential | 100 | 100-100 | 40.0 | 30.0 | 16.0 | **0.40** (0.40-0.40) "
        "| 0.10 (0.10-0.10) |  | **2.00** (2.00-2.00) |"
    )
    assert ahead == (
        "| lookahead-2 | 200 | 200-200 | 20.0 | 1.0 | 16.0 | **0.80** (0.80-0.80) "
        "| 0.20 (0.20-0.20) | **2.00** (2.00-2.00) | **4.00** (4.00-4.00) |"
    )
    assert mapped == "| mmap | 50 | 50-50 | 80.0 |  |  |  |  |  |  |"


def _prepare_record(path, num_runs, *, has_ratio=True):
    """What `recsys bench prepare` writes: ours takes 1 s or 2 s, pandas always 8 s."""
    case = "bytes=8000000000,lines=10,ids=7"
    seconds = {"recsys": ([2.0, 1.0] * num_runs)[:num_runs], "pandas": [8.0] * num_runs}
    rates = {name: [8e3 / s for s in spent] for name, spent in seconds.items()}
    peaks = {name: [2.0**30] * num_runs for name in seconds}
    named = {"bench": "prepare", "case": case}
    rows = [
        *rows_by_provider(**named, metric="throughput", unit="MB/s", values=rates),
        *rows_by_provider(**named, metric="peak_memory", unit="bytes", values=peaks),
    ]
    if has_ratio:
        times = {"values": seconds["recsys"], "baseline": seconds["pandas"]}
        rows.append(ratio(**named, provider="recsys", metric="speed_over_pandas", **times))
    write_rows(path, rows)


@pytest.mark.parametrize(
    ("num_runs", "has_ratio", "title", "cell"),
    [
        (1, False, "", ""),
        (1, True, "over pandas | ", "4.00 | "),
        (6, True, "over pandas (95 %) | ", "5.33 (4.00-8.00) | "),
    ],
)
def test_the_table_of_preparing_says_how_many_times_faster_and_an_interval_where_there_is_one(
    pytestconfig, tmp_path, num_runs, has_ratio, title, cell
):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    _prepare_record(tmp_path / "prepare.json", num_runs, has_ratio=has_ratio)

    text = tables["prepare_table"](str(tmp_path / "prepare.json"))

    _, _, header, _, ours, theirs = text.strip().split("\n")
    assert f"{header} ".endswith(f"| peak memory, GiB | {title}")
    assert f"{ours} ".endswith(f" | 1.00 | {cell}")
    assert theirs.count("|") == header.count("|")


@pytest.mark.slow
def test_what_make_coverage_writes_is_what_the_tables_read(pytestconfig, tmp_path, small_config):
    scripts = pytestconfig.rootpath / "docs" / "benchmarks"
    coverage, reached, tables = (
        runpy.run_path(str(scripts / f"{name}.py"))
        for name in ("synthetic_coverage", "synthetic_reached", "tables")
    )
    sample = SyntheticCriteo(num_samples=20_000, table_sizes=[50, 7], seed=1)
    store = write_store(sample, tmp_path / "store")
    run = train(small_config(), tmp_path / "run", show_progress=False)
    found, best = tmp_path / "found.json", tmp_path / "best.json"

    coverage["main"]([str(store), "--out", str(found), "--max-samples", "30000"])
    reached["main"]([str(tmp_path / "run"), "--out", str(best)])

    assert tables["coverage_table"](str(found)).startswith("The first 20,000 samples; ")
    assert "| distinct rows | 57 | " in tables["coverage_table"](str(found))
    assert "\n| 20,000 | " in tables["continuation_table"](str(found))
    assert "| everything | 0.8" in tables["planted_table"](str(found))
    auc = run["metrics"]["test"]["auc"]
    assert f"| sgd 0.1, B=128 | {auc:.4f} | " in tables["reached_table"](str(best))


@pytest.mark.parametrize(("recipe", "least"), [("sgd", 0.718), ("adagrad", 0.759)])
@pytest.mark.parametrize("provider", ["torch", "fbgemm"])
def test_the_reference_recipes_reach_their_bounds_over_three_seeds(
    pytestconfig, recipe, least, provider
):
    folder = pytestconfig.rootpath / "docs" / "benchmarks" / "reference"

    runs = [json.loads((folder / f"{recipe}-{provider}-{n}.json").read_text()) for n in range(3)]

    assert [run["config"]["seed"] for run in runs] == [0, 1, 2]
    assert mean(run["metrics"]["test"]["auc"] for run in runs) >= least


def test_kept_results_are_of_a_commit(pytestconfig):
    records = list((pytestconfig.rootpath / "docs" / "benchmarks").rglob("*.json"))

    assert records
    for record in records:
        found = json.loads(record.read_text())
        environment = found["environment"]
        assert "unfinished" not in found, record
        assert environment["commit"], record
        assert environment["dirty"] is False, record


def test_every_link_between_documents_leads_to_a_file(pytestconfig):
    root = pytestconfig.rootpath
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]

    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_decision_is_in_the_index(pytestconfig):
    folder = pytestconfig.rootpath / "docs" / "decisions"
    pages = {page.name: page.read_text().split("\n")[0] for page in folder.glob("*.md")}
    del pages["README.md"]

    index = re.findall(r"^- \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE)

    assert {name: f"# {title}" for title, name in index} == pages


def test_make_bench_runs_every_bench_that_needs_no_gpu(pytestconfig):
    makefile = (pytestconfig.rootpath / "Makefile").read_text()
    commands = next(each for each in build_parser()._actions if each.dest == "command").choices
    benches = next(each for each in commands["bench"]._actions if each.choices).choices

    assert set(re.findall(r"\$\(BENCH\) ([\w-]+)", makefile)) == set(benches) - {"gpu"}


def test_kept_commands_name_no_place_of_the_machine_they_ran_on(pytestconfig):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    records = {file: json.loads(file.read_text()) for file in folder.rglob("*.json")}

    commands = {file: record["command"] for file, record in records.items() if "command" in record}

    assert commands
    for file, command in commands.items():
        assert not any(word.startswith("/") for word in command.split()), file


def test_files_of_the_routes_exist(pytestconfig):
    """Both drawings of the architecture page name files of the package."""
    text = (pytestconfig.rootpath / "docs" / "architecture.md").read_text()
    drawn = "".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    named = set(re.findall(r"[\w/]+\.py", drawn))

    assert len(named) > 20
    assert [name for name in named if not (pytestconfig.rootpath / "recsys" / name).exists()] == []
