"""`recsys bench gpu`: its options, and what it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from recsys.bench.gpu.cases import Plan

__all__ = ["add_gpu_options", "bench_gpu"]


def add_gpu_options(gpu: argparse.ArgumentParser) -> None:
    """Give `bench gpu` its options, besides `--json`."""
    gpu.add_argument("--quick", action="store_true", help="tiny tables, to try the program")
    gpu.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu only with --quick: the same program, whose figures then mean nothing",
    )
    gpu.add_argument(
        "--presets",
        nargs="+",
        default=("kaggle", "nvidia"),
        choices=("kaggle", "nvidia"),
        help="nvidia: D=128, B=65536, top MLP 1024-1024-512-256-1, TF32 and bf16",
    )
    gpu.add_argument("--dims", type=int, nargs="+", metavar="D", help="of kaggle; default: 128 64")
    gpu.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="B",
        help="of kaggle, the most important first; default: 16384 2048 65536",
    )
    gpu.add_argument(
        "--precision",
        default="tf32",
        choices=("fp32", "tf32", "bf16"),
        help="of kaggle's matrix products; rows and updates are float32; default: tf32",
    )
    gpu.add_argument(
        "--shares",
        nargs="+",
        metavar="SHARE",
        help="budgets: shares of the bytes of all rows, or floor; the first, a share, is measured "
        "beside all other providers; default: 0.1 floor 0.05 0.2 0.5 1",
    )
    gpu.add_argument(
        "--schedule",
        metavar="NAME[,NAME...]",
        help="default: sequential,lookahead-1,lookahead-2,hotline",
    )
    gpu.add_argument(
        "--fill-samples",
        type=int,
        metavar="N",
        help="samples whose lookups fill the budget before it is measured; default: 3000000",
    )
    gpu.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        metavar="S",
        help="no case begins later; cases not run are listed in the JSON; default: 480",
    )
    gpu.add_argument(
        "--case-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="measured rounds of a case, at least three; default: 10",
    )
    gpu.add_argument(
        "--kernels",
        action="store_true",
        help="also list the time by kernel of one step, and time copies of rows by themselves",
    )
    gpu.add_argument(
        "--no-baselines",
        action="store_true",
        help="measure every budget beside the resident tables alone",
    )
    gpu.add_argument(
        "--no-capture",
        action="store_true",
        help="launch the dense part op by op, in place of replaying it as CUDA graphs, for all "
        "providers",
    )


def bench_gpu(options: argparse.Namespace) -> int:
    """Measure; returns 1 if a check failed or nothing could be measured.

    Raises:
        ConfigError: options do not go together, or there is no CUDA device.
    """
    if options.device == "cpu" and not options.quick:
        raise ConfigError(
            "bench gpu: --device cpu is for trying the program; add --quick, or leave it out"
        )
    from recsys.bench.gpu.run import bench_gpu as measure
    from recsys.bench.gpu.run import require_device

    require_device(options.device)
    from recsys.bench.gpu.record import Record

    record = Record(options.json, options.device)
    measure(_plan(options), record)
    if options.device == "cpu":
        print("Measured on a CPU in place of a GPU: these figures mean nothing.")
    failed = [check.name for check in record.checks if check.status != "passed"]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 0 if record.is_ok else 1


def _plan(options: argparse.Namespace) -> Plan:
    from recsys.bench.gpu.cases import QUICK, SCHEDULES_MEASURED, Plan
    from recsys.bench.parts.scheduled import parse_schedules
    from recsys.bench.parts.shares import EVERYTHING, FLOOR, parse_shares

    defaults = QUICK if options.quick else Plan()
    shares = parse_shares(options.shares or defaults.shares)
    if shares[0] in (FLOOR, EVERYTHING):
        raise ConfigError(
            f"--shares must begin with a share below 1, which has room for all schedules, got "
            f"{shares[0]!r}"
        )
    schedules = parse_schedules(options.schedule or ",".join(SCHEDULES_MEASURED))
    return Plan(
        device=options.device,
        table_sizes=defaults.table_sizes,
        presets=tuple(options.presets),
        dims=tuple(options.dims or defaults.dims),
        batch_sizes=tuple(options.batch_sizes or defaults.batch_sizes),
        precision=options.precision,
        nvidia=defaults.nvidia,
        shares=shares,
        schedules=schedules,
        num_fill_samples=options.fill_samples or defaults.num_fill_samples,
        seconds=options.seconds,
        case_seconds=options.case_seconds,
        has_kernels=options.kernels,
        has_baselines=not options.no_baselines,
        capture=options.device == "cuda" and not options.no_capture,
        is_quick=options.quick,
    )
