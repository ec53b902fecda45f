"""The command line: every command parses its options and calls one function of the library.

A command checks keys and paths before it imports that function, so that a mistake is told at once:
PyTorch takes seconds to import.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recsys._support.files import TOO_MUCH, require_files, require_place
from recsys._support.sizes import counted
from recsys._support.user_warnings import plain_warnings
from recsys.cli.checks import require_data, require_model
from recsys.cli.data import add_data_options
from recsys.cli.help import TRAIN_EXAMPLES, outline
from recsys.cli.output import INTERRUPTED, accept_any_text
from recsys.cli.popularity import add_popularity_options
from recsys.config import TrainConfig, format_keys, load_config, read_tree
from recsys.datasets.store_writer import is_store
from recsys.datasets.tabular.read import find_files
from recsys.errors import ConfigError, RecsysError
from recsys.train.exports import FORMATS, QUANTIZATIONS
from recsys.train.run_files.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["build_parser", "run"]

_UNREAD = 141  # what shells report for a program whose output nothing reads
_SET: Final[dict[str, Any]] = {
    "action": "append",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "set one configuration key; may be repeated (`recsys train --help` lists the keys)",
}


def run(arguments: Sequence[str]) -> int:
    """As `recsys.cli.main`, with every option known."""
    options = _parse(arguments)
    accept_any_text()
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
            status: int = options.run_command(options)
        if sys.stdout is not None:  # None if it is closed, as of a daemon
            sys.stdout.flush()
    except RecsysError as error:
        print(f"recsys {options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return _UNREAD
        place = error.filename
        if not place and error.errno in TOO_MUCH:  # buffered writes do not name their file
            place = getattr(options, "out", None)
        reason = f"{place}: {error.strerror}" if place else str(error)
        if error.errno == errno.EMFILE:
            reason += "; raise the limit of open files, as by `ulimit -n 4096`"
        elif error.errno is not None:  # the system's; errors of recsys name a way out themselves
            reason += "; free some space, or" if error.errno in TOO_MUCH - {errno.EFBIG} else ";"
            reason += " name another place"
        print(f"recsys {options.command}: {reason}", file=sys.stderr)
        return 2
    return status


def _is_unread() -> bool:
    """Whether nothing reads the output any more, as after `head`; then it goes nowhere."""
    try:
        print(flush=True)  # a flush alone has nothing to write where output is not buffered
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return True
    return False


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; words that no option takes end the process, with those of the command."""
    parser, commands = _build()
    options, left = parser.parse_known_args(arguments)
    if left:
        keys = "; configuration keys are given by --set KEY=VALUE" if "set" in options else ""
        commands[options.command].error(f"unrecognized arguments: {' '.join(left)}{keys}")
    return options


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    return _build()[0]


def _build() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """That parser, and the parsers of the commands, by name."""
    parser, commands = outline()
    add_data_options(commands)
    add_popularity_options(commands)
    _add_run_options(commands)
    return parser, commands


def _add_run_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give the commands about runs their options."""
    train = commands["train"]
    train.formatter_class = argparse.RawDescriptionHelpFormatter
    train.epilog = (
        "keys that most runs set, for --set and for the TOML file:\n"
        f"{format_keys(TrainConfig, common=True)}\n\n{TRAIN_EXAMPLES}\n"
        f"every key:\n{format_keys(TrainConfig)}"
    )
    train.add_argument(
        "data",
        nargs="?",
        metavar="STORE",
        help="a store, or synthetic:criteo-kaggle; default: data of --config, "
        "or with --resume that of the run",
    )
    train.add_argument("--config", type=Path, metavar="FILE.toml", help="configuration file")
    train.add_argument("--set", **_SET)
    train.add_argument(
        "--run", metavar="DIR", help="new folder for results; default runs/<date-time>"
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in DIR from its newest checkpoint; --config and --set change keys",
    )
    train.add_argument(
        "--checkpoint", type=int, metavar="N", help="with --resume: continue from checkpoint N"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check the run, tell what it will take of memory and disk, and write nothing",
    )
    train.set_defaults(run_command=_train)

    evaluate = commands["evaluate"]
    evaluate.add_argument("run", metavar="DIR", help="folder of a run")
    evaluate.add_argument("--data", metavar="STORE", help="default: the data of the run")
    evaluate.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the metrics to FILE"
    )
    evaluate.set_defaults(run_command=_evaluate)

    predict = commands["predict"]
    predict.add_argument("run", metavar="DIR", help="folder of a run")
    predict.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="a store; or files like those that the run's store was prepared from, such as CSV or "
        "Parquet, with or without the label",
    )
    predict.add_argument("--out", type=Path, required=True, metavar="FILE.parquet", help="new file")
    predict.add_argument(
        "--batch-size", type=int, default=8192, metavar="B", help="samples per forward pass"
    )
    predict.add_argument(
        "--store", metavar="STORE", help="for files: the run's store, if it was moved"
    )
    predict.set_defaults(run_command=_predict)

    export = commands["export"]
    export.add_argument("run", metavar="DIR", help="folder of a run")
    what = export.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--to",
        choices=FORMATS,
        help="its tensors, without pickle, or a program that runs with PyTorch alone",
    )
    what.add_argument(
        "--since",
        type=int,
        metavar="N",
        help="only what changed from checkpoint N to the newest one, as safetensors",
    )
    export.add_argument(
        "--checkpoint",
        metavar="N",
        help="with --to safetensors: the model of this checkpoint, or of the 'last' one",
    )
    export.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="with --to torch-export: round rows to int8, with a scale for each row",
    )
    export.add_argument("--out", required=True, metavar="FILE", help="new file")
    export.set_defaults(run_command=_export)

    apply = commands["apply"]
    apply.add_argument("full", metavar="FULL", help="export --to safetensors --checkpoint N")
    apply.add_argument("deltas", nargs="+", metavar="DELTA", help="export --since N, in order")
    apply.add_argument("--out", required=True, metavar="FILE", help="new file")
    apply.set_defaults(run_command=_apply)

    verify = commands["verify"]
    verify.add_argument("data", metavar="STORE", help="a store, or synthetic data, as for train")
    verify.add_argument("--config", type=Path, metavar="FILE.toml", help="configuration file")
    verify.add_argument("--set", **_SET)
    verify.add_argument(
        "--budgets",
        nargs="+",
        metavar="BUDGET",
        help="sizes such as 256MiB, or names; default: floor twice-floor half everything",
    )
    verify.add_argument("--steps", type=int, metavar="N", help="most steps; default: one epoch")
    verify.set_defaults(run_command=_verify)

    ablate = commands["ablate"]
    ablate.add_argument(
        "config", type=Path, metavar="CONFIG.toml", help="configuration file with a table [ablate]"
    )
    ablate.add_argument("--set", **_SET)
    ablate.add_argument(
        "--run",
        required=True,
        metavar="DIR",
        help="folder for results; the folder of a stopped ablation is continued",
    )
    ablate.set_defaults(run_command=_ablate)

    report = commands["report"]
    report.add_argument("run", metavar="DIR", help="folder of a run or an ablation")
    report.set_defaults(run_command=_report)


def _train(options: argparse.Namespace) -> int:
    from recsys.train.loop.resume import resumed_config
    from recsys.train.ranks.launched import is_launched

    if options.dry_run and (is_launched() or options.resume):
        raise ConfigError(
            "--dry-run is for a new run on one process; leave out "
            f"{'--resume' if options.resume else 'torchrun'}"
        )
    if is_launched() and not options.run:
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
        require_data(config.data)
        RunFolder.require_place(run_dir)

    if options.dry_run:
        from recsys.train.dry_run import dry_run

        print(dry_run(config, run_dir))
        return 0
    from recsys.report import format_run
    from recsys.train.trainer import train

    record = train(config, run_dir, resume=options.resume, checkpoint=options.checkpoint)
    if not is_launched() or os.environ["RANK"] == "0":
        print(format_run(record, run_dir))
    return INTERRUPTED if record["status"] == "interrupted" else 0


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


def _evaluate(options: argparse.Namespace) -> int:
    require_model(options.run)
    if options.data is not None:
        require_data(options.data)

    from recsys.report import format_metrics, format_unknown
    from recsys.train.evaluate import evaluate_run, unknown_values

    metrics = {
        split: found.as_dict() for split, found in evaluate_run(options.run, options.data).items()
    }
    unknown = unknown_values(options.run, options.data)
    print("\n".join([format_metrics(metrics), *format_unknown(unknown)]))
    if options.json is not None:
        write_json(options.json, {"metrics": metrics} | ({"unknown": unknown} if unknown else {}))
    return 0


def _predict(options: argparse.Namespace) -> int:
    require_model(options.run)
    if not (len(options.data) == 1 and is_store(Path(options.data[0]))):
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
    return 0


def _export(options: argparse.Namespace) -> int:
    number = options.checkpoint
    if number is not None and options.to != "safetensors":
        raise ConfigError(f"--checkpoint {number} goes with --to safetensors only; leave it out")
    if number is not None and number != "last" and not number.isdecimal():
        raise ConfigError(f"--checkpoint must be a number or 'last', got {number!r}")
    if options.quantize is not None and options.to != "torch-export":
        raise ConfigError(
            f"--quantize {options.quantize} goes with --to torch-export only; leave it out"
        )
    RunFolder.open(options.run)
    if options.since is None and number is None:
        require_model(options.run)

    from recsys.train.exports.export import export_run, export_run_checkpoint, export_run_delta

    if options.quantize is not None:
        from recsys.train.exports.program import export_program

        written = export_program(options.run, options.out, options.quantize)
    elif options.since is not None:
        written = export_run_delta(options.run, options.out, options.since)
    elif number is not None:
        written = export_run_checkpoint(
            options.run, options.out, None if number == "last" else int(number)
        )
    else:
        written = export_run(options.run, options.to, options.out)
    print(f"wrote {written}")
    return 0


def _apply(options: argparse.Namespace) -> int:
    require_files("model", map(Path, [options.full, *options.deltas]))

    from recsys.train.exports.deltas import apply_deltas

    print(f"wrote {apply_deltas(options.full, options.deltas, options.out)}")
    return 0


def _ablate(options: argparse.Namespace) -> int:
    from recsys.ablate import ablate, load_ablation
    from recsys.report import format_ablation

    config = load_ablation(options.config, options.set)
    for data in {cell.config.data for cell in config.cells}:
        require_data(data)
    record = ablate(config, options.run)
    print(format_ablation(record))
    print(f"saved in {options.run}/: report.html, table.md, table.csv, ablate.json, cells/")
    return 0 if record["status"] == "finished" else INTERRUPTED


def _report(options: argparse.Namespace) -> int:
    from recsys.report import write_report

    print(write_report(Path(options.run)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set, data=options.data)
    require_data(config.data)

    from recsys.train.verify_tiers import BUDGETS, format_verification, verify_budgets

    found = verify_budgets(config, options.budgets or BUDGETS, options.steps)
    print(format_verification(found))
    return 0 if all(each.ok for each in found) else 1
