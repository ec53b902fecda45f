"""What the commands do: each calls one function of the library and prints what it returns.

A command checks keys and paths before it imports that function, so that a mistake is told at once:
PyTorch takes seconds to import. The library makes the same checks again.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from recsys._support.files import (
    TOO_MUCH,
    as_argument,
    require_files,
    require_new,
    require_place,
)
from recsys._support.sizes import counted, format_bytes, parse_bytes
from recsys._support.user_code import plain_warnings
from recsys.config import SYNTHETIC_PREFIX, TrainConfig, load_config, read_tree
from recsys.datasets.store_writer import is_store, read_meta
from recsys.errors import ConfigError, RecsysError
from recsys.train.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

__all__ = ["parse_samples", "run"]

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
_UNREAD = 141  # and for one whose output nothing reads
_NUMBER = r"\d+\.?\d*|\.\d+"
# Sets of hot rows whose coverage is printed, as shares of the rows seen.
_SHARES = (0.001, 0.01, 0.1, 1.0)
_ENDS = {"interrupted": "was interrupted", "failed": "failed", "diverged": "diverged"}
# What to do about an error of the system; errors of recsys say it themselves.
_HINTS: Final[dict[int | None, str]] = {
    None: "",
    errno.EMFILE: "; raise the limit of open files, as by `ulimit -n 4096`",
    **dict.fromkeys(TOO_MUCH - {errno.EFBIG}, "; free some space, or name another place"),
}


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit status, as `recsys.cli.main`.

    Args:
        options: As `parse` returns them.
    """
    _accept_any_text()
    try:
        for name in ("json", "out"):
            if str(getattr(options, name, "")) == "-":
                raise ConfigError(
                    f"--{name} must name a file, got '-', which is not the standard output here; "
                    "name another"
                )
        if getattr(options, "json", None) is not None:
            require_place(options.json)  # before work that can take an hour
        with plain_warnings(f"recsys {options.command}"):
            status: int = _COMMANDS[options.command](options) or 0
        if sys.stdout is not None:  # None if it is closed, as of a daemon
            sys.stdout.flush()
    except RecsysError as error:
        fault = str(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return _UNREAD
        # Buffered writes do not name their file.
        unnamed = getattr(options, "out", None) if error.errno in TOO_MUCH else None
        place = error.filename or unnamed
        fault = f"{place}: {error.strerror}" if place else str(error)
        fault += _HINTS.get(error.errno, "; name another place")
    else:
        return status
    print(f"recsys {options.command}: {fault}", file=sys.stderr)
    return 2


def _accept_any_text(encoding: str | None = None) -> None:
    """Print letters that an encoding lacks as escapes, as to stderr, in place of an error.

    Args:
        encoding: That of the output from now on; None for the one that it has.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # At last it asks for the position, which a pipe in the place of a file does not have.
        with suppress(OSError):
            sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _is_unread() -> bool:
    """Whether nothing reads the output any more, as after `head`; then it goes nowhere."""
    try:
        print(flush=True)  # a flush alone has nothing to write where output is not buffered
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return True
    return False


def _require_data(data: str) -> None:
    """Check that data is synthetic, or a store.

    Raises:
        StoreError: it is neither.
    """
    if not data.startswith(SYNTHETIC_PREFIX):
        read_meta(Path(data))


def _require_model(run: str) -> None:
    """Check that a folder is that of a run that saved its model; warn if the run did not finish.

    Raises:
        ConfigError: it is not.
    """
    folder = RunFolder.open(run)
    folder.require_model()
    status, may_continue = "", True
    if folder.record_file.is_file():
        try:
            record = folder.read_record()
        except ConfigError:  # a damaged record does not concern the model
            return
        status = record["status"]
        may_continue = record.get("checkpoints") is not None and status != "diverged"
    if status != "finished":
        command = f"recsys train --run {as_argument(run)} --resume"
        way_on = f"; continue it by `{command}`" if may_continue else ""
        warnings.warn(
            f"{run} {_ENDS.get(status, 'has not ended')}, and this is the model that it saved when "
            f"it last stopped{way_on}",
            stacklevel=2,
        )


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
    _accept_any_text("utf-8")  # as TOML is
    print(draft.to_toml(), end="")


def _prepare(options: argparse.Namespace) -> None:
    if options.format == "table":
        _prepare_table(options)
        return
    require_files("raw", map(Path, options.raw))

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
    from recsys.datasets.tabular.read import find_files
    from recsys.datasets.tabular.schema import find_schema

    find_files(options.files)

    schema = None if options.schema is None else find_schema(options.schema)
    if options.like is not None:
        read_meta(Path(options.like))

    from recsys.datasets.tabular.prepare import prepare_table

    report = prepare_table(
        options.files,
        options.out,
        schema,
        like=options.like,
        split=options.split,
        show_progress=True,
    )
    parts = ", ".join(f"{name} {size:,}" for name, size in report.splits.items())
    print(
        f"{report.path}: {report.num_rows:,} rows, {report.num_samples:,} samples ({parts}), "
        f"{report.num_embeddings:,} rows in {counted(report.num_tables, 'table')}"
    )
    for part, counts in report.unknown.items():
        found = ", ".join(f"{column} {count:,}" for column, count in counts.items() if count)
        if found:
            print(f"{part}: values without a row of their own, which share row 0: {found}")
    if report.num_lacking:
        print(f"{report.num_lacking:,} negatives were not drawn: no other item was left")
    for finding in report.findings:
        print(f"note: {finding}")


def _train(options: argparse.Namespace) -> int:
    from recsys.train.resume import resumed_config

    is_one_of_several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if options.dry_run and (is_one_of_several or options.resume):
        raise ConfigError(
            "--dry-run is for a new run on one process; leave out "
            f"{'--resume' if options.resume else 'torchrun'}"
        )
    if is_one_of_several and not options.run:
        raise ConfigError("several processes train in one folder; name it by --run DIR")
    run_dir = Path(options.run or f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    if options.resume:
        if not options.run:
            raise ConfigError("--resume continues the run in a folder; name it by --run DIR")
        config = resumed_config(run_dir, options.config, options.set, options.data)
    elif options.checkpoint is not None:
        raise ConfigError("--checkpoint N is for a run to continue; add --resume")
    else:
        config = _config_with_data(options)
        _require_data(config.data)
        RunFolder.require_place(run_dir)

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


def _config_with_data(options: argparse.Namespace) -> TrainConfig:
    """The configuration for data that the command line names, or the file.

    Raises:
        ConfigError: neither does.
    """
    if options.data is not None:
        return load_config(options.config, options.set, data=options.data)
    if "data" not in read_tree(options.config, options.set):
        raise ConfigError("data is missing; name a store, or synthetic:criteo-kaggle")
    return load_config(options.config, options.set)


def _evaluate(options: argparse.Namespace) -> None:
    _require_model(options.run)
    if options.data is not None:
        _require_data(options.data)

    from recsys.report import format_metrics, format_unknown
    from recsys.train.evaluate import evaluate_run, unknown_values

    metrics = {
        split: found.as_dict() for split, found in evaluate_run(options.run, options.data).items()
    }
    unknown = unknown_values(options.run, options.data)
    print("\n".join([format_metrics(metrics), *format_unknown(unknown)]))
    if options.json is not None:
        write_json(options.json, {"metrics": metrics} | ({"unknown": unknown} if unknown else {}))


def _predict(options: argparse.Namespace) -> None:
    _require_model(options.run)
    if not (len(options.data) == 1 and is_store(Path(options.data[0]))):
        from recsys.datasets.tabular.read import find_files

        find_files(options.data)

    from recsys._support.machine import tune_allocator
    from recsys.report import format_unknown
    from recsys.train.predict import predict_run

    tune_allocator()
    report = predict_run(
        options.run,
        options.data,
        options.out,
        batch_size=options.batch_size,
        store=options.store,
    )
    columns = "row, score and label" if report.has_labels else "row and score"
    print(
        f"{report.path}: {counted(report.num_samples, 'prediction')} in {report.seconds:.1f} s "
        f"({report.num_samples / report.seconds:,.0f} samples/s); columns {columns}"
    )
    for line in format_unknown({"data": report.unknown} if report.unknown else {}):
        print(line)


def _export(options: argparse.Namespace) -> None:
    number = options.checkpoint
    if number is not None and options.to != "safetensors":
        raise ConfigError(f"--checkpoint {number} goes with --to safetensors only; leave it out")
    if number is not None and number != "last" and not number.isdecimal():
        raise ConfigError(f"--checkpoint must be a number or 'last', got {number!r}")
    if options.quantize is not None and options.to != "torch-export":
        raise ConfigError(
            f"--quantize {options.quantize} goes with --to torch-export only; leave it out"
        )
    run = RunFolder.open(options.run)
    if options.since is None and number is None:
        _require_model(options.run)

    from recsys.train.export import export_checkpoint, export_run

    if options.since is None and number is None:
        written = export_run(options.run, options.to, options.out, options.quantize)
    else:
        number = None if number in (None, "last") else int(number)
        written = export_checkpoint(run.checkpoints_folder, options.out, number, options.since)
    print(f"wrote {written}")


def _apply(options: argparse.Namespace) -> None:
    require_files("model", map(Path, [options.full, *options.deltas]))

    from recsys.train.export import apply_deltas

    print(f"wrote {apply_deltas(options.full, options.deltas, options.out)}")


def _ablate(options: argparse.Namespace) -> int:
    from recsys.ablate import ablate, load_ablation
    from recsys.report import format_ablation

    config = load_ablation(options.config, options.set)
    for data in {cell.config.data for cell in config.cells}:
        _require_data(data)
    record = ablate(config, options.run)
    print(format_ablation(record))
    print(f"saved in {options.run}/: report.html, table.md, table.csv, ablate.json, cells/")
    return 0 if record["status"] == "finished" else _INTERRUPTED


def _report(options: argparse.Namespace) -> None:
    from recsys.report import write_report

    print(write_report(Path(options.run)))


def _verify(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set, data=options.data)
    _require_data(config.data)

    from recsys.train.trials import BUDGETS, verify_budgets

    found = verify_budgets(config, options.budgets or BUDGETS, options.steps)
    print("\n".join(map(str, found)))
    return int(any(one.differing for one in found))


def parse_samples(text: str, num_samples: int) -> range:
    """The range of samples that `A:B` names; A and B may be left out.

    Args:
        text: Two sample numbers, or two shares of all samples if at least one has a point.
        num_samples: Number of samples.

    Raises:
        ConfigError: the text is neither, or the range is empty or not within the samples.
    """
    found = re.fullmatch(rf"({_NUMBER})?:({_NUMBER})?", text)
    has_shares = "." in text
    if not found or (has_shares and any(float(part or 0) > 1 for part in found.groups())):
        raise ConfigError(
            f"samples must be A:B, two numbers as in 0:1000 or two shares as in 0:0.5, got {text!r}"
        )
    begin, end = (
        default if part is None else int(float(part) * num_samples) if has_shares else int(part)
        for part, default in zip(found.groups(), (0, num_samples), strict=True)
    )
    if not 0 <= begin < end <= num_samples:
        raise ConfigError(
            f"samples {text!r} are {begin} to {end}, but must be a range within the {num_samples} "
            "samples; name others"
        )
    return range(begin, end)


def _profile(options: argparse.Namespace) -> None:
    config = load_config(None, [], data=options.store)
    _require_data(config.data)

    from recsys.embeddings.popularity.counts import PopularityProfile, format_coverages
    from recsys.train.build import open_source

    source = open_source(config, to_train=False)
    samples = parse_samples(options.samples, source.num_samples)
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
    from recsys.embeddings.popularity.files import require_profile

    config = load_config(options.config, options.set)
    parse_bytes(options.budget, "budget")
    require_profile(Path(options.profile))
    require_new(options.out)

    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import plan_hot_rows
    from recsys.train.build import row_optimizer, tables_of

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


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int | None]]] = {
    "inspect": _inspect,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "report": _report,
    "ablate": _ablate,
    "export": _export,
    "apply": _apply,
    "profile": _profile,
    "plan": _plan,
    "verify": _verify,
}
