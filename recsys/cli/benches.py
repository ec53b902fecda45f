"""`recsys bench NAME`: the options of every benchmark, and the function that each one calls."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.sizes import parse_bytes
from recsys.cli.bench_gpu import add_gpu_options, bench_gpu
from recsys.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

    from recsys.bench.parts.harness import Row

__all__ = ["add_bench_options"]

# Options that count something, by their names in the namespace.
_COUNTS = ("batch_size", "batch_sizes", "dim", "dims", "fill_samples", "rounds", "world_sizes")


def add_bench_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `bench` its benchmarks, and them their options."""
    bench = commands["bench"]
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="NAME")

    def add(name: str, run_command: Callable[..., int], help_text: str) -> argparse.ArgumentParser:
        parser = benchmarks.add_parser(name, help=help_text)
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
        parser.set_defaults(run_command=partial(_run, run_command))
        return parser

    prepare = add("prepare", _bench_prepare, "raw text to arrays, against pandas")
    source = prepare.add_mutually_exclusive_group()
    source.add_argument(
        "--table",
        action="store_true",
        help="a synthetic table of 20 columns, as CSV and Parquet; with --quick, or one gigabyte",
    )
    source.add_argument(
        "--raw", type=Path, metavar="FILE", help="default: criteo_kaggle_137k under RECSYS_DATA"
    )
    size = prepare.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a tenth of the text, one run")
    size.add_argument(
        "--kaggle-size",
        action="store_true",
        help="46 M lines and 34 M ids, one run; needs 20 GB of disk while it runs",
    )

    step = add("step", _bench_step, "one training step, against its lower bounds")
    lookup = add("lookup", _bench_lookup, "forward, backward and update of the embeddings alone")
    models = add("models", _bench_models, "PyTorch models, before and after recsys.accelerate")
    tiers = add("tiers", _bench_tiers, "training with less fast memory than the tables need")
    for parser in (step, lookup, models, tiers):
        parser.add_argument("--quick", action="store_true", help="small tables, few rounds")
    for parser, sizes in (
        (step, [128, 2048, 16384]),
        (lookup, [128, 2048, 16384]),
        (models, [128, 1024, 8192]),
    ):
        parser.add_argument("--batch-sizes", type=int, nargs="+", default=sizes, metavar="B")
    lookup.add_argument(
        "--dims", type=int, nargs="+", metavar="D", help="default: 16 64 128; with --quick 16"
    )
    for parser, optimizers in (
        (lookup, ("sgd", "rowwise_adagrad", "adagrad")),
        (models, ("sgd", "adagrad")),
    ):
        parser.add_argument("--optimizers", nargs="+", default=optimizers, choices=optimizers)
    models.add_argument(
        "--models",
        nargs="+",
        metavar="KIND",
        help="classic, tbsm, bags, collection, embeddings, dense-embeddings; default: all",
    )
    models.add_argument(
        "--share",
        type=float,
        default=0.0,
        help="measure them with a budget, too: this share of the bytes of rows and state",
    )
    models.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where models are; default: cpu"
    )
    models.add_argument(
        "--evaluation", action="store_true", help="measure forwards without gradients, not steps"
    )
    _add_tiers_options(tiers)

    checkpoints = add(
        "checkpoints", _bench_checkpoints, "training with checkpoints, against without"
    )
    checkpoints.add_argument("--quick", action="store_true", help="small tables, few steps")
    checkpoints.add_argument(
        "--folder", type=Path, default=Path("runs"), metavar="DIR", help="on the disk to measure"
    )

    skipping = add("skipping", _bench_skipping, "following rows while training, against not")
    skipping.add_argument("--quick", action="store_true", help="small tables, few rounds")
    skipping.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048], metavar="B")

    add_gpu_options(add("gpu", bench_gpu, "correctness, speed and memory on one CUDA GPU"))
    _add_distributed_options(
        add("distributed", _bench_distributed, "tables on several processes, against TorchRec")
    )

    for name, run_command, help_text in (
        ("predict", _bench_predict, "predictions of a saved model, against its training"),
        ("synthetic", _bench_synthetic, "generating samples, against reading them from a store"),
        ("count", _bench_count, "counting lookups, against numpy and torch"),
        ("rand-em", _bench_rand_em, "FAE's interval for the number of hot rows, against the count"),
    ):
        parser = add(name, run_command, help_text)
        parser.add_argument("--quick", action="store_true", help="few samples, few rounds")


def _run(run_command: Callable[..., int], options: argparse.Namespace) -> int:
    """Run a benchmark if every count that it was given is at least 1."""
    for name in _COUNTS:
        given = getattr(options, name, None)
        least = min(given) if isinstance(given, list) else given
        if least is not None and least < 1:
            raise ConfigError(
                f"bench {options.benchmark}: --{name.replace('_', '-')} must be at least 1, "
                f"got {least}"
            )
    return run_command(options)


def _add_tiers_options(tiers: argparse.ArgumentParser) -> None:
    tiers.add_argument(
        "--shares",
        nargs="+",
        metavar="SHARE",
        help="budgets: shares of the bytes of rows and state, or floor; 1: every row resident; "
        "default: floor 0.02 0.05 0.1 0.2 0.5 1",
    )
    tiers.add_argument(
        "--schedule",
        default="sequential,lookahead-2",
        metavar="NAME[,NAME...]",
        help="sequential, lookahead-DEPTH (1, 2, 4, 8), hotline; default: sequential,lookahead-2",
    )
    tiers.add_argument(
        "--dim", type=int, metavar="D", help="default: 64; 128 with --cold-tier file"
    )
    tiers.add_argument(
        "--batch-size", type=int, metavar="B", help="default: 2048; 4096 with --cold-tier file"
    )
    tiers.add_argument(
        "--optimizer",
        default="rowwise_adagrad",
        choices=("sgd", "rowwise_adagrad"),
        help="--cold-tier file always uses sgd",
    )
    tiers.add_argument("--cold-tier", default="host", choices=("host", "file"))
    in_files = tiers.add_argument_group("with --cold-tier file")
    in_files.add_argument(
        "--cold-path",
        type=Path,
        metavar="DIR",
        help="folder of the tables; created if missing, and kept for the next run",
    )
    in_files.add_argument(
        "--times-memory",
        type=float,
        default=1.5,
        metavar="X",
        help="bytes of the tables, in units of RAM",
    )
    in_files.add_argument("--budget", default="2GiB", metavar="SIZE")


def _add_distributed_options(distributed: argparse.ArgumentParser) -> None:
    distributed.add_argument("--quick", action="store_true", help="small tables, few rounds")
    distributed.add_argument(
        "--world-sizes",
        type=int,
        nargs="+",
        metavar="W",
        help="numbers of processes on this machine; default: 1 2 4; with --quick 1 2",
    )
    distributed.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="samples over all processes; default: 16384; with --quick 512",
    )
    distributed.add_argument("--dim", type=int, default=16, metavar="D", help="default: 16")
    distributed.add_argument(
        "--budget-share",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="fast memory of recsys_budget, as a share of the bytes of rows; default: 0.2",
    )
    distributed.add_argument("--rounds", type=int, metavar="N", help="default: 30; with --quick 3")


def _bench_prepare(options: argparse.Namespace) -> int:
    from recsys.bench.prepare import SIZES, bench_prepare

    if options.table:
        from recsys.bench.prepare_table import TABLE_SIZES, bench_prepare_table

        if options.kaggle_size:
            raise ConfigError("--kaggle-size is not for --table; leave one of the two out")
        table_size = TABLE_SIZES["quick" if options.quick else "gigabyte"]
        return _show_rows(bench_prepare_table(table_size), options)
    size = "quick" if options.quick else "kaggle" if options.kaggle_size else "gigabyte"
    return _show_rows(bench_prepare(options.raw, SIZES[size]), options)


def _bench_step(options: argparse.Namespace) -> int:
    from recsys.bench.step import bench_step

    rows = bench_step(
        options.batch_sizes,
        ("fp32", "bf16"),
        num_rounds=5 if options.quick else 60,
        num_processes=1 if options.quick else 4,
        table_sizes=[1000] * 26 if options.quick else (),
    )
    return _show_rows(rows, options)


def _bench_models(options: argparse.Namespace) -> int:
    from recsys.bench.models import ALL_KINDS, bench_models

    kinds = options.models or ALL_KINDS
    if unknown := set(kinds) - set(ALL_KINDS):
        raise ConfigError(
            f"--models must be of {', '.join(ALL_KINDS)}, got {', '.join(sorted(unknown))}"
        )
    rows = bench_models(
        options.batch_sizes,
        options.optimizers,
        kinds=kinds,
        num_rounds=3 if options.quick else 30,
        max_rows=1000 if options.quick else 1_000_000,
        table_counts=(1, 4) if options.quick else (1, 4, 26),
        share=options.share,
        is_evaluation=options.evaluation,
        device=options.device,
    )
    return _show_rows(rows, options)


def _bench_lookup(options: argparse.Namespace) -> int:
    from recsys.bench.lookup import bench_lookup

    rows = bench_lookup(
        options.batch_sizes,
        options.dims or ([16] if options.quick else [16, 64, 128]),
        options.optimizers,
        num_rounds=3 if options.quick else 30,
        **({"table_sizes": [1000] * 26} if options.quick else {}),
    )
    return _show_rows(rows, options)


def _bench_file_tier(options: argparse.Namespace) -> int:
    from recsys.bench.file_tier import (
        FileTierCase,
        bench_file_tier,
        default_table_bytes,
        scaled_table_sizes,
    )
    from recsys.bench.parts.scheduled import parse_schedules

    if options.cold_path is None:
        raise ConfigError("--cold-tier file needs --cold-path, a folder for the tables")
    parse_bytes(options.budget, "--budget")
    if not options.times_memory > 0:
        raise ConfigError(f"--times-memory must be above 0, got {options.times_memory}")
    dim, batch_size = options.dim or 128, options.batch_size or 4096
    case = FileTierCase(
        table_sizes=(20_000,) * 26
        if options.quick
        else scaled_table_sizes(default_table_bytes(options.times_memory), dim),
        dim=dim,
        batch_size=batch_size,
        budget=options.budget,
        cold_path=options.cold_path,
        schedules=parse_schedules(options.schedule),
        num_rounds=3 if options.quick else 15,
        num_fill_steps=5 if options.quick else 700,
        fill_batch_size=batch_size if options.quick else 4096,
        is_quick=options.quick,
    )
    return _show_rows(bench_file_tier(case), options)


def _bench_tiers(options: argparse.Namespace) -> int:
    if options.cold_tier == "file":
        return _bench_file_tier(options)
    from recsys.bench.parts.scheduled import parse_schedules
    from recsys.bench.parts.tiers_curve import curve_file, write_curve
    from recsys.bench.tiers import SHARES, bench_tiers
    from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES

    if options.json is not None:
        curve_file(options.json)
    batch_size = options.batch_size or 2048
    rows = bench_tiers(
        options.shares or (["floor", "0.2", "1"] if options.quick else SHARES),
        parse_schedules(options.schedule),
        dim=options.dim or 64,
        batch_size=batch_size,
        optimizer=options.optimizer,
        num_rounds=3 if options.quick else 30,
        num_fill_steps=5 if options.quick else 1500 * 2048 // batch_size,
        table_sizes=[100_000] * 26 if options.quick else KAGGLE_TABLE_SIZES,
        is_quick=options.quick,
    )
    status = _show_rows(rows, options)
    if options.json is not None:
        write_curve(options.json)
    return status


def _bench_checkpoints(options: argparse.Namespace) -> int:
    from recsys.bench.checkpoints import FILE_TIER_BYTES, bench_checkpoints

    rows = bench_checkpoints(
        folder=options.folder,
        num_rounds=2 if options.quick else 20,
        steps_per_turn=20 if options.quick else 1150,
        table_sizes=[1000] * 26 if options.quick else (),
        file_tier_bytes=10**7 if options.quick else FILE_TIER_BYTES,
    )
    return _show_rows(rows, options)


def _bench_distributed(options: argparse.Namespace) -> int:
    from recsys.bench.distributed import bench_distributed
    from recsys.bench.ranks.providers import providers_with

    if not 0 < options.budget_share < 1:
        raise ConfigError(f"--budget-share must be between 0 and 1, got {options.budget_share}")

    def value(given: int | None, quick: int, full: int) -> int:
        return given if given is not None else quick if options.quick else full

    rows = bench_distributed(
        options.world_sizes or ([1, 2] if options.quick else [1, 2, 4]),
        batch_size=value(options.batch_size, 512, 16384),
        dim=options.dim,
        num_rounds=value(options.rounds, 3, 30),
        providers=providers_with(options.budget_share),
        table_sizes=[20_000] * 26 if options.quick else (),
    )
    return _show_rows(rows, options)


def _bench_skipping(options: argparse.Namespace) -> int:
    from recsys.bench.skipping import bench_skipping

    rows = bench_skipping(
        options.batch_sizes,
        num_rounds=2 if options.quick else 30,
        table_sizes=[1000] * 26 if options.quick else (),
    )
    return _show_rows(rows, options)


def _bench_predict(options: argparse.Namespace) -> int:
    from recsys.bench.predict import bench_predict

    rows = bench_predict(
        num_samples=50_000 if options.quick else 2_000_000,
        num_rounds=1 if options.quick else 6,
        table_sizes=[1000] * 26 if options.quick else (),
    )
    return _show_rows(rows, options)


def _bench_synthetic(options: argparse.Namespace) -> int:
    from recsys.bench.synthetic import bench_synthetic

    rows = bench_synthetic(
        num_samples=50_000 if options.quick else 500_000, num_rounds=3 if options.quick else 30
    )
    return _show_rows(rows, options)


def _bench_count(options: argparse.Namespace) -> int:
    from recsys.bench.counting import bench_counting

    rows = bench_counting(
        (128, 2048, 16384),
        num_samples=50_000 if options.quick else 2_000_000,
        num_rounds=3 if options.quick else 30,
    )
    return _show_rows(rows, options)


def _bench_rand_em(options: argparse.Namespace) -> int:
    from recsys.bench.rand_em import bench_rand_em

    rows = bench_rand_em(
        (1, 2, 5, 20),
        num_samples=1_000_000 if options.quick else 45_840_617,
        num_trials=20 if options.quick else 300,
    )
    return _show_rows(rows, options)


def _show_rows(rows: Iterable[Row], options: argparse.Namespace) -> int:
    """Tell each row, and write those so far, when it is measured; print a table at the end."""
    from recsys.bench.parts.harness import print_rows, write_rows

    found: list[Row] = []
    for row in rows:
        found.append(row)
        where = f"{row.case}  {row.provider}  {row.metric}"
        print(f"{where}  {row.median:,.2f} {row.unit}", file=sys.stderr, flush=True)
        if options.json is not None:
            write_rows(options.json, found, are_all=False)
    print_rows(found)
    if options.json is not None:
        write_rows(options.json, found)
    return 0
