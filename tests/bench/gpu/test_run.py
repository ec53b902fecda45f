import dataclasses
import json

import pytest
import torch

from recsys.bench.gpu import cases, checks, run, tables
from recsys.bench.gpu.checks import Check, run_checks
from recsys.bench.gpu.record import Record
from recsys.bench.gpu.run import bench_gpu
from recsys.cli import main
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.kernels.torch.slots import TorchSlotMap
from recsys.errors import ConfigError
from tests.fake_graphs import capture_on_cpu

OF_STEP = {"time", "throughput", "host", "floor", "floor_share"}
OF_BYTES = {"pcie_per_sample", "distinct_per_sample", "hot_memory", "peak_memory"}
OF_OTHERS = {"share_of_resident_speed", "exposed"}
OF_TIERS = {
    "budget",
    "budget_share",
    "missing_per_sample",
    "lookup_hit_rate",
    "unique_hit_rate",
    "mean_depth",
}
SCHEDULES = ("sequential", "lookahead-1", "lookahead-2", "hotline")


def no_checks(*_, **__):
    return iter([Check("stub", "passed")])


def read(path):
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_every_case_has_its_providers_and_metrics(quick_plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(tmp_path / "gpu.json", "cpu")

    bench_gpu(dataclasses.replace(quick_plan, has_kernels=True), record)

    found = read(tmp_path / "gpu.json")
    start = "B=64,D=8,model=kaggle,precision=tf32,share="
    assert [(case["name"], case["status"]) for case in found["cases"]] == [
        (start + share, "measured") for share in ("0.5", "floor", "1")
    ]
    metrics = {}
    for row in found["rows"]:
        key = row["case"].removeprefix(start), row["provider"]
        metrics.setdefault(key, set()).add(row["metric"])
    of_resident, of_baseline = OF_STEP | OF_BYTES, OF_STEP | OF_BYTES | OF_OTHERS
    expected = {(share, "resident"): of_resident for share in ("0.5", "floor", "1")}
    expected |= {("0.5", name): of_baseline for name in ("torch", "hybrid", "gather")}
    expected |= {
        (f"{share},schedule={schedule}", "recsys"): of_baseline | OF_TIERS
        for share in ("0.5", "floor")
        for schedule in SCHEDULES
    }
    expected["1,schedule=sequential", "recsys"] = of_baseline | OF_TIERS
    assert metrics == expected
    assert found["device"] == "cpu"
    assert found["is_done"]
    assert [each["provider"] for each in found["skipped"]] == ["fbgemm"]
    assert "MANAGED_CACHING needs a CUDA device" in found["skipped"][0]["reason"]
    assert set(found["limits"]) == {"to_device", "to_host", "on_device"}
    assert 0 < found["coverage"]["0.5"] <= 1
    assert 0 < len(found["kernels"]["by_time"]) <= 25
    assert record.is_ok
    assert "lookups by the most popular rows" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_bytes_and_budgets_are_those_of_the_tables(quick_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(None, "cpu")

    bench_gpu(dataclasses.replace(quick_plan, schedules=("lookahead-1",)), record)

    start = "B=64,D=8,model=kaggle,precision=tf32,share="
    cells = {
        (row.case.removeprefix(start), row.provider, row.metric): row.median for row in record.rows
    }
    everything = 1773 * 8 * 4
    assert cells["0.5", "resident", "hot_memory"] == everything
    assert cells["0.5", "resident", "pcie_per_sample"] == 0
    assert cells["0.5", "gather", "hot_memory"] == 0
    assert cells["0.5", "gather", "pcie_per_sample"] == (
        2 * cells["0.5", "gather", "distinct_per_sample"]
    )
    assert cells["0.5", "hybrid", "pcie_per_sample"] == 2 * 4 * 8 * 4
    for share in ("0.5", "floor"):
        ours = f"{share},schedule=lookahead-1", "recsys"
        assert 0 < cells[*ours, "hot_memory"] <= cells[*ours, "budget"] < everything
        assert cells[*ours, "missing_per_sample"] <= cells[*ours, "pcie_per_sample"]
    floor, half = (f"{share},schedule=lookahead-1" for share in ("floor", "0.5"))
    assert (
        cells[floor, "recsys", "missing_per_sample"] > cells[half, "recsys", "missing_per_sample"]
    )
    assert cells["0.5,schedule=lookahead-1", "recsys", "mean_depth"] == 1
    assert cells["floor,schedule=lookahead-1", "recsys", "mean_depth"] < 1
    assert cells["1,schedule=sequential", "recsys", "budget_share"] == 1


@pytest.mark.usefixtures("one_thread")
def test_the_dense_part_of_every_provider_is_replayed(quick_plan, tmp_path, monkeypatch, capsys):
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(tmp_path / "gpu.json", "cpu")

    bench_gpu(dataclasses.replace(quick_plan, shares=("0.5", "1"), capture=True), record)

    found = read(tmp_path / "gpu.json")
    assert found["plan"]["capture"]
    assert "dense part: replayed as CUDA graphs" in capsys.readouterr().out
    providers = [each["provider"] for each in found["captured"]]
    of_first = ["resident", *SCHEDULES, "torch", "gather", "hybrid"]
    assert providers == [*of_first, "resident", "sequential"]
    num_steps = {}
    for each in found["captured"]:
        assert each["reason"] == ""
        num_steps[each["provider"]] = each["num_replays"]
    hotline = num_steps.pop("hotline")
    assert 0 <= hotline < num_steps["torch"]
    assert min(num_steps.values()) > 3


@pytest.mark.usefixtures("one_thread")
def test_why_the_dense_part_is_not_captured_is_told(quick_plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(tmp_path / "gpu.json", "cpu")

    bench_gpu(dataclasses.replace(quick_plan, shares=("0.5",), capture=True), record)

    found = read(tmp_path / "gpu.json")
    assert [each["num_replays"] for each in found["captured"]] == [0] * 8
    assert {each["reason"].partition(",")[0] for each in found["captured"]} == {
        "the dense part is on 'cpu'"
    }
    assert "torch: dense part op by op: the dense part is on 'cpu'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], True),
        (["--no-capture"], False),
        (["--device", "cpu", "--quick"], False),
    ],
)
def test_the_dense_part_is_captured_on_cuda_unless_told_otherwise(monkeypatch, options, expected):
    plans = []
    monkeypatch.setattr(run, "require_device", lambda _: None)
    monkeypatch.setattr(run, "bench_gpu", lambda plan, _: plans.append(plan))

    main(["bench", "gpu", *options])

    assert [(plan.capture, plan.has_baselines) for plan in plans] == [(expected, True)]


def test_baselines_can_be_left_out_by_an_option(monkeypatch):
    plans = []
    monkeypatch.setattr(run, "bench_gpu", lambda plan, _: plans.append(plan))

    main(["bench", "gpu", "--device", "cpu", "--quick", "--no-baselines"])

    assert [plan.has_baselines for plan in plans] == [False]


@pytest.mark.usefixtures("one_thread")
def test_the_kernels_for_cuda_can_be_measured(quick_plan, monkeypatch):
    """On the CPU, with the operations of torch that run on a GPU in place of numba's kernels."""
    maps, make = [], tables.Tables._make_tiered

    def make_tiered(*arguments):
        found = make(*arguments)
        maps.extend(tiers.hot.map for tiers in found.module.tiers())
        return found

    monkeypatch.setattr(kernel_choice, "_BY_TORCH", {"cuda", "cpu"})
    monkeypatch.setattr(tables.Tables, "_make_tiered", make_tiered)
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(None, "cpu")

    bench_gpu(dataclasses.replace(quick_plan, shares=("0.5", "floor")), record)

    assert [case["reason"] for case in record.cases] == [""] * 2
    assert [each["provider"] for each in record.skipped] == ["fbgemm"]
    assert [type(each) for each in maps] == [TorchSlotMap] * 2
    errors_on(torch.device("cpu")).forget()


@pytest.mark.usefixtures("one_thread")
def test_what_fails_is_recorded_with_its_reason_and_the_rest_still_runs(
    quick_plan, tmp_path, monkeypatch
):
    def fail(*_):
        raise RuntimeError("no pinned\nmemory")

    monkeypatch.setattr(run, "run_checks", lambda *_, **__: iter([Check("a", "failed", "b")]))
    monkeypatch.setattr(tables.Tables, "gathered", fail)
    monkeypatch.setattr(tables.TieredTables, "__init__", fail)
    record = Record(tmp_path / "gpu.json", "cpu")

    bench_gpu(quick_plan, record)

    found = read(tmp_path / "gpu.json")
    assert found["checks"] == [{"name": "a", "status": "failed", "reason": "b"}]
    assert [case["status"] for case in found["cases"]] == ["failed", "failed", "measured"]
    assert found["cases"][0]["reason"] == "RuntimeError: no pinned memory"
    assert not record.is_ok


@pytest.mark.usefixtures("one_thread")
def test_a_provider_that_fails_is_left_out_of_its_case(quick_plan, monkeypatch):
    def fail(*_):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(run, "run_checks", no_checks)
    monkeypatch.setattr(tables.Tables, "gathered", fail)
    record = Record(None, "cpu")

    bench_gpu(dataclasses.replace(quick_plan, shares=("0.5",), schedules=("sequential",)), record)

    skipped = {each["provider"]: each["reason"] for each in record.skipped}
    assert skipped["gather"] == "RuntimeError: no pinned memory"
    assert {row.provider for row in record.rows} == {"resident", "recsys", "torch", "hybrid"}
    assert record.is_ok


@pytest.mark.usefixtures("one_thread")
def test_a_command_that_is_killed_leaves_the_cases_before(quick_plan, tmp_path, monkeypatch):
    real = run._Cases._measure

    def interrupt(self, case, of_dim):
        if case.share == "1":
            raise KeyboardInterrupt
        real(self, case, of_dim)

    monkeypatch.setattr(run, "run_checks", no_checks)
    monkeypatch.setattr(run._Cases, "_measure", interrupt)
    plan = dataclasses.replace(quick_plan, shares=("0.5", "1"), schedules=("sequential",))

    with pytest.raises(KeyboardInterrupt):
        bench_gpu(plan, Record(tmp_path / "gpu.json", "cpu"))

    found = read(tmp_path / "gpu.json")
    assert [case["status"] for case in found["cases"]] == ["measured"]
    assert found["rows"]
    assert not found["is_done"]


@pytest.mark.usefixtures("one_thread")
def test_cases_for_which_there_is_no_time_are_listed(quick_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_checks", no_checks)
    record = Record(tmp_path / "gpu.json", "cpu")

    bench_gpu(dataclasses.replace(quick_plan, seconds=0), record)

    found = read(tmp_path / "gpu.json")
    assert [case["status"] for case in found["cases"]] == ["not run"] * 3
    assert found["cases"][0]["reason"] == "0 seconds were over; raise --seconds"
    assert not record.is_ok


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_checks_pass_here(monkeypatch):
    monkeypatch.setattr("recsys.train.verify_tiers.set_num_threads", lambda _: None)
    optimizers = ("sgd", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam")

    found = list(run_checks("cpu", is_quick=False))

    assert [check.name for check in found] == [
        *(f"verify,optimizer={name}" for name in optimizers),
        "one_step,optimizer=sgd",
        "one_step,optimizer=adagrad",
    ]
    assert [check for check in found if check.status != "passed"] == []


def test_a_check_that_differs_or_raises_fails_with_the_reason(monkeypatch):
    def fail(*_):
        raise ValueError("nothing")

    monkeypatch.setattr(checks, "verify_budgets", fail)
    monkeypatch.setattr(checks, "_one_step", lambda *_: "row 3 differs")

    found = list(run_checks("cpu", is_quick=True))

    assert [check.reason for check in found] == ["ValueError: nothing"] * 2 + ["row 3 differs"] * 2
    assert {check.status for check in found} == {"failed"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_refuses_and_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(run, "Stream", None)  # nothing heavy comes first

    assert main(["bench", "gpu"]) == 2

    told = capsys.readouterr().err
    assert "torch sees no CUDA device" in told
    assert "--device cpu --quick" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "add --quick"),
        (["--shares", "2", "--device", "cpu", "--quick"], "above 0 and at most 1, got '2'"),
        (["--shares", "floor", "--device", "cpu", "--quick"], "must begin with a share below 1"),
        (["--schedule", "x", "--device", "cpu", "--quick"], "'x' must be one of the schedules"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, capsys):
    assert main(["bench", "gpu", *options]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_the_command_tells_that_figures_of_a_cpu_mean_nothing(tmp_path, monkeypatch, capsys):
    failed = Check("verify", "failed", "row 3 differs")
    monkeypatch.setattr(run, "run_checks", lambda *_, **__: iter([failed]))
    # This model's layers are as wide as they always are; a CPU takes long for them in bfloat16.
    monkeypatch.setattr(cases, "QUICK", dataclasses.replace(cases.QUICK, nvidia=(8, 4)))
    options = ["--presets", "nvidia", "--shares", "0.5", "--schedule", "sequential"]

    status = main(
        ["bench", "gpu", "--device", "cpu", "--quick", *options, "--json", f"{tmp_path}/x.json"]
    )

    told = capsys.readouterr().out
    assert status == 1
    assert "these figures mean nothing" in told
    assert "FAILED: verify" in told
    names = [case["name"] for case in read(tmp_path / "x.json")["cases"]]
    assert names == [
        f"B=4,D=8,model=nvidia,precision={each},share=0.5" for each in ("tf32", "bf16")
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_program_runs_on_a_gpu(tmp_path):
    assert main(["bench", "gpu", "--quick", "--kernels", "--json", f"{tmp_path}/x.json"]) == 0

    found = read(tmp_path / "x.json")
    assert {case["status"] for case in found["cases"]} == {"measured"}
    assert {each["provider"] for each in found["skipped"]} <= {"fbgemm"}
    assert found["plan"]["capture"]
    for each in found["captured"]:
        assert not each["reason"]
        assert each["num_replays"] > 0 or each["provider"] == "hotline"
    for row in found["rows"]:
        if row["metric"] == "peak_memory":
            assert row["median"] > 0


def test_the_device_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        run.require_device("cuda")
