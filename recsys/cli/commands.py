"""What the commands do: each calls one function of the library and prints what it returns.

A command imports that function when it runs: PyTorch takes seconds to import. Before,
`RunFolder.open_model` refuses a folder without a model, and warns of a run that has not finished.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from recsys._support.files import require_new
from recsys._support.machine import tune_allocator
from recsys._support.sizes import counted, format_bytes
from recsys.config import load_config
from recsys.errors import refuse
from recsys.train.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

__all__ = ["COMMANDS"]

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
# Sets of hot rows whose coverage is printed, as shares of the rows seen.
_SHARES = (0.001, 0.01, 0.1, 1.0)


def _inspect(options: argparse.Namespace) -> None:
    from recsys.datasets.tabular.inspect import inspect_table

    draft = inspect_table(
        options.files,
        label=options.label,
        group=options.group,
        item=options.item,
        ignore=options.ignore,
        names=options.no_header,
        quote=options.quote,
    )
    print(draft.to_toml(), end="")


def _prepare(options: argparse.Namespace) -> None:
    if options.format == "table":
        _prepare_table(options)
        return
    from recsys.datasets.criteo import prepare_criteo_1tb, prepare_criteo_kaggle

    if options.format == "criteo-kaggle":
        report = prepare_criteo_kaggle(options.raw, options.out)
    else:
        report = prepare_criteo_1tb(options.raw, options.out, max_ind_range=options.max_ind_range)
    print(
        f"{report.path}: {report.num_samples:,} samples, "
        f"{report.num_rows:,} distinct ids in 26 columns"
    )


def _prepare_table(options: argparse.Namespace) -> None:
    from recsys.datasets.tabular.prepare import prepare_table
    from recsys.datasets.tabular.schema import find_schema
    from recsys.report import format_unknown

    report = prepare_table(
        options.files,
        options.out,
        None if options.schema is None else find_schema(options.schema),
        like=options.like,
        split=options.split,
        show_progress=True,
    )
    parts = ", ".join(f"{name} {size:,}" for name, size in report.splits.items())
    print(
        f"{report.path}: {report.num_rows:,} rows, {report.num_samples:,} samples ({parts}), "
        f"{report.num_embeddings:,} rows in {counted(report.num_tables, 'table')}",
        *format_unknown(report.unknown),
        *(f"note: {finding}" for finding in report.findings),
        sep="\n",
    )
    if report.num_lacking:
        print(f"{report.num_lacking:,} negatives were not drawn: no other item was left")


def _train(options: argparse.Namespace) -> int:
    is_rank = "RANK" in os.environ
    refuse(
        (
            options.dry_run and (options.resume or is_rank),
            "--dry-run is for a new run on one process; no --resume, no torchrun",
        ),
        (
            is_rank and not options.run,
            "several processes train in one folder; name it by --run DIR",
        ),
        (
            options.checkpoint is not None and not options.resume,
            "--checkpoint N is for a run to continue; add --resume",
        ),
    )
    run_dir = Path(options.run or f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    from recsys.train.resume import config_of_run

    config = config_of_run(
        run_dir, options.config, options.set, options.data, resume=options.resume
    )
    if options.dry_run:
        from recsys.train.trials import dry_run

        print(f"{dry_run(config, run_dir)}\nthe run would be in {run_dir}; nothing was written")
        return 0
    from recsys.report import format_run
    from recsys.train.trainer import train

    record = train(config, run_dir, resume=options.resume, checkpoint=options.checkpoint)
    if os.environ.get("RANK", "0") == "0":
        print(format_run(record, run_dir))
    return _INTERRUPTED if record["status"] == "interrupted" else 0


def _evaluate(options: argparse.Namespace) -> None:
    RunFolder.open_model(options.run)

    from recsys.report import format_metrics, format_unknown
    from recsys.train.evaluate import evaluate_run

    metrics, unknown = evaluate_run(options.run, options.data)
    print("\n".join([format_metrics(metrics), *format_unknown(unknown)]))
    if options.json is not None:
        write_json(options.json, {"metrics": metrics} | ({"unknown": unknown} if unknown else {}))


def _predict(options: argparse.Namespace) -> None:
    RunFolder.open_model(options.run)

    from recsys.report import format_unknown
    from recsys.train.predict import predict_run

    tune_allocator()
    written, unknown = predict_run(
        options.run,
        options.data,
        options.out,
        batch_size=options.batch_size,
        store=options.store,
    )
    print(
        f"{options.out}: {counted(written.num_rows, 'prediction')} in {written.seconds:.1f} s "
        f"({written.num_rows / written.seconds:,.0f} samples/s); "
        f"columns {', '.join(written.columns)}",
        *format_unknown({"data": unknown}),
        sep="\n",
    )


def _recommend(options: argparse.Namespace) -> None:
    RunFolder.open_model(options.run)

    from recsys.train.recommend import recommend_run

    tune_allocator()
    written = recommend_run(
        options.run,
        options.users,
        options.out,
        k=options.top,
        with_seen=options.with_seen,
        batch_size=options.batch_size,
        store=options.store,
    )
    print(
        f"{options.out}: {counted(written.num_rows, 'recommendation')} in {written.seconds:.1f} s"
    )


def _export(options: argparse.Namespace) -> None:
    number = options.checkpoint
    refuse(
        (
            number is not None and options.to != "safetensors",
            f"--checkpoint {number} goes with --to safetensors only; leave it out",
        ),
        (
            options.quantize is not None and options.to != "torch-export",
            f"--quantize {options.quantize} goes with --to torch-export only; leave it out",
        ),
    )

    from recsys.train.export import export_checkpoint, export_run

    if options.since is None and number is None:
        RunFolder.open_model(options.run)
        written = export_run(options.run, options.to, options.out, options.quantize)
    else:
        folder = RunFolder.open(options.run).checkpoints_folder
        number = None if number == "last" else number
        written = export_checkpoint(folder, options.out, number, options.since)
    print(f"wrote {written}")


def _apply(options: argparse.Namespace) -> None:
    from recsys.train.export import apply_deltas

    print(f"wrote {apply_deltas(options.full, options.deltas, options.out)}")


def _ablate(options: argparse.Namespace) -> int:
    from recsys.ablate import ablate, load_ablation
    from recsys.report import format_ablation

    record = ablate(load_ablation(options.config, options.set), options.run)
    print(format_ablation(record))
    print(f"saved in {options.run}/: report.html, table.md, table.csv, ablate.json, cells/")
    return 0 if record["status"] == "finished" else _INTERRUPTED


def _report(options: argparse.Namespace) -> None:
    from recsys.report import write_report

    print(write_report(Path(options.run)))


def _verify(options: argparse.Namespace) -> int:
    from recsys.train.trials import BUDGETS, verify_budgets

    config = load_config(options.config, options.set, data=options.data)
    found = verify_budgets(config, options.budgets or BUDGETS, options.steps)
    print("\n".join(map(str, found)))
    return int(any(one.differing for one in found))


def _profile(options: argparse.Namespace) -> None:
    from recsys.embeddings.popularity.counts import PopularityProfile, format_coverages
    from recsys.train.build import open_source

    source = open_source(load_config(None, [], data=options.store), to_train=False)
    samples = range(*(int(share * source.num_samples) for share in options.samples))
    require_new(options.out)
    profile = PopularityProfile.count(source, samples)
    profile.save(options.out)

    num_rows, num_seen = sum(profile.table_sizes.values()), profile.num_rows_seen
    print(
        f"{options.out}: {profile.num_lookups:,} lookups of {profile.num_samples:,} samples; "
        f"{num_seen:,} of {num_rows:,} rows in "
        f"{counted(len(profile.table_sizes), 'table')} seen"
    )
    if not profile.num_samples:
        return
    later = range(samples.stop, source.num_samples)
    measured = later if later else samples
    print(
        f"\ncoverage, measured on samples {measured.start:,} to {measured.stop:,}"
        f"{', which come later' if later else ', the same ones'}:"
    )
    nums_rows = [max(int(share * num_seen), 1) for share in _SHARES]
    print(format_coverages(profile.coverages(nums_rows, source, measured), num_seen))


def _plan(options: argparse.Namespace) -> None:
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import plan_hot_rows
    from recsys.train.build import row_optimizer, tables_of

    config = load_config(options.config, options.set)
    require_new(options.out)
    profile = PopularityProfile.load(options.profile)
    plan = plan_hot_rows(
        profile,
        tables_of(profile.table_sizes, profile.features, config.model),
        options.budget,
        row_optimizer(config.optimizer),
        window_lookups=config.batch_size,
    )
    plan.save(options.out)
    parts = (plan.map_bytes, plan.shared_bytes, plan.pinned_bytes)
    of_map, shared, pinned = (format_bytes(num_bytes) for num_bytes in parts)
    print(
        f"{options.out}: {plan.num_pinned:,} of {sum(profile.table_sizes.values()):,} rows pinned "
        f"in {pinned}, with a row map of {of_map} and {shared} for mini-batches"
    )
    print(
        "\nshares of the counted lookups (a run also misses each pinned row the first time, and "
        f"later lookups miss more):\n{plan}"
    )


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int | None]]] = {
    "inspect": _inspect,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "recommend": _recommend,
    "report": _report,
    "ablate": _ablate,
    "export": _export,
    "apply": _apply,
    "profile": _profile,
    "plan": _plan,
    "verify": _verify,
}
