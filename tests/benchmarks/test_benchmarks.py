"""Each benchmark runs with --quick and writes its rows; the statistics of rounds are right."""

import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from turns import Row, Worker, median_of_ratios, ratio, show_rows, summarize, take_turns

FIELDS = set(Row.__dataclass_fields__)
# By script and arguments: some of the rows' (provider, metric).
SCRIPTS = {
    "lookup.py --batch-sizes 128 --optimizers sgd": {
        ("recsys", "time"), ("fbgemm", "time"), ("torch", "time"), ("stream", "bandwidth"),
        ("recsys", "speed_over_fbgemm"), ("recsys", "peak_memory"), ("recsys", "bandwidth_share"),
    },
    "step.py --batch-sizes 128": {
        ("recsys", "time_over_dense"), ("recsys", "speed_over_torch"), ("dense_eager", "time"),
    },
    "models.py --batch-sizes 128 --optimizers sgd --models classic lazy-adam": {
        ("torch", "time"), ("recsys", "speed_over_torch"), ("recsys", "table_time_over_torch"),
    },
    "tiers.py": {
        ("recsys", "share_of_resident_speed"), ("recsys", "exposed_fetch"),
        ("recsys", "lookup_hit_rate"), ("recsys", "budget"), ("resident", "time"),
    },
    "tiers.py --cold-path FOLDER --shares 0.2": {("recsys", "speed_over_mmap"), ("mmap", "time")},
    "checkpoints.py --folder FOLDER": {
        ("plain", "time_over_plain"), ("recsys", "exposed_time"), ("recsys", "peak_memory_beyond"),
    },
    "predict.py": {("predict", "speed_over_training"), ("predict", "peak_memory")},
    "gpu.py --device cpu --schedules sequential hotline": {
        ("recsys", "speed_over_torch"), ("recsys", "share_of_resident_speed"),
        ("torch", "throughput"), ("recsys", "lookup_hit_rate"),
    },
    "distributed.py": {
        ("recsys", "speed_over_torchrec_fbgemm"), ("recsys_budget", "loss"),
        ("recsys_pooled", "loopback_sent"),
    },
    "prepare.py --table": {("recsys-parquet", "speed_over_pandas"), ("pandas", "peak_memory")},
    "time_to_auc.py": {("recsys", "auc"), ("fbgemm", "epoch"), ("torchrec", "time_to_auc")},
    "frameworks.py": {("plain", "last_loss"), ("recsys", "largest_difference")},
    "slipstream/cost.py --batch-sizes 128": {("observe", "time_over_plain")},
    "lookup.py --against CHECKOUT --pairs 1": {("new", "time_over_old"), ("old", "time")},
}  # fmt: skip


def run(pytestconfig, folder, script):
    root = pytestconfig.rootpath
    words = script.replace("FOLDER", str(folder)).replace("CHECKOUT", str(root)).split()
    file = folder / "rows.json"
    command = [sys.executable, str(root / "benchmarks" / words[0]), *words[1:]]
    subprocess.run(
        [*command, "--quick", "--json", str(file)],
        check=True,
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
    )
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_writes_its_rows(pytestconfig, tmp_path, script):
    record = run(pytestconfig, tmp_path, script)

    assert set(record) == {"command", "environment", "rows"}
    assert all(set(row) == FIELDS for row in record["rows"])
    assert {(row["provider"], row["metric"]) for row in record["rows"]} >= SCRIPTS[script]
    assert all(row["median"] > 0 for row in record["rows"] if row["metric"] == "time")


@pytest.mark.slow
def test_criteo_text_is_prepared_as_by_pandas(pytestconfig, tmp_path, kaggle_10k):
    # The script compares the numbers of ids that both found.
    record = run(pytestconfig, tmp_path, f"prepare.py --raw {kaggle_10k}")

    assert {row["provider"] for row in record["rows"]} == {"recsys", "pandas"}


def test_every_provider_takes_a_turn_in_every_round_in_drawn_order():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}

    results = take_turns(calls, 20, num_warm_up_rounds=2)

    rounds = [called[begin : begin + 3] for begin in range(0, len(called), 3)]
    assert len(rounds) == 22
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 3
    assert all(len(of_provider) == 20 for of_provider in results.values())


def test_the_interval_of_a_median_holds_it_in_nineteen_of_twenty_cases():
    random = np.random.default_rng(0)

    rows = [summarize("b", "c", "p", "m", "u", random.exponential(size=30)) for _ in range(200)]

    inside = np.mean([row.low <= np.log(2) <= row.high for row in rows])
    assert 0.9 <= inside <= 0.99
    assert summarize("b", "c", "p", "m", "u", [1.0] * 5).low is None


def test_a_ratio_is_of_paired_rounds_and_not_disturbed_by_what_slows_both():
    random = np.random.default_rng(0)
    slowness = random.uniform(1, 5, 60)
    ours, theirs = slowness * random.uniform(0.99, 1.01, 60), 1.1 * slowness

    found = ratio("b", "c", "p", "m", values=ours, baseline=theirs, is_by_round=True)
    blocks = ratio(
        "b", "c", "p", "m", values=ours, baseline=theirs, is_by_round=True, num_per_block=10
    )

    assert found.low < 1.1 < found.high
    assert found.high - found.low < 0.01
    assert blocks.low <= blocks.median <= blocks.high
    with pytest.raises(ValueError, match="whole blocks of 7"):
        ratio("b", "c", "p", "m", values=ours, baseline=theirs, num_per_block=7)


def test_a_median_of_ratios_is_over_cases():
    pairs = [([1.0] * 6, [times] * 6) for times in (2.0, 3.0, 7.0)]

    found = median_of_ratios("b", "c", "p", "m", pairs=pairs)

    assert (found.median, found.low, found.high, found.num_runs) == (3.0, 3.0, 3.0, 3)


def test_rows_measured_so_far_are_kept_when_a_benchmark_is_stopped(tmp_path):
    file = tmp_path / "rows.json"
    row = summarize("b", "c", "p", "m", "u", [2.0, float("nan")])

    def rows():
        yield row
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_rows(rows(), SimpleNamespace(json=file))

    record = json.loads(file.read_text())
    assert record["unfinished"] is True
    assert record["rows"] == [asdict(row) | dict.fromkeys(("median", "p20", "p80"))]


def test_an_error_in_a_worker_has_its_traceback():
    with Worker("p", dict, 5) as worker, pytest.raises(ChildProcessError, match=r"p: .*\n.*Trace"):
        worker.call("keys")
