"""The commands and their options: one table, which `recsys --help` prints at once.

Imports nothing that takes long.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from recsys._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXAMPLES", "GROUPS", "TRAIN_EXAMPLES", "Command", "build_parsers", "parse"]


_Option = tuple[tuple[str, ...], dict[str, Any]]  # what `add_argument` takes


class Command(NamedTuple):
    """A command.

    Attributes:
        help: The line that `recsys --help` prints.
        options: Its options and arguments; a list has some of which exactly one is given.
        formats: Its own commands, by name.
    """

    help: str
    options: tuple[_Option | list[_Option], ...] = ()
    formats: Mapping[str, Command] = MappingProxyType({})


def _option(*names: str, **settings: Any) -> _Option:
    return names, settings


def shares(text: str) -> tuple[float, float]:
    """The two ends of `A:B`; raises ValueError unless 0 <= A < B <= 1."""
    begin, end = (
        float(part or default) for part, default in zip(text.split(":"), "01", strict=True)
    )
    if not 0 <= begin < end <= 1:
        raise ValueError(text)
    return begin, end


def number_or_last(text: str) -> int | str:
    """The number of a checkpoint, or "last"; raises ValueError for anything else."""
    return text if text == "last" else int(text)


_RAW = "tab-separated text, plain or gzip"
_FILES = "CSV or TSV (plain, .gz, .zst), Parquet, or a folder of such files"
_STORE = "a store, or synthetic:criteo-kaggle"
_RUN: Final = _option("run", metavar="DIR", help="folder of a run")
_FILE: Final = _option("--out", required=True, metavar="FILE", help="new file")
_NPZ: Final = _option("--out", required=True, type=Path, metavar="FILE", help="new .npz file")
_FOLDER: Final = _option("--out", required=True, metavar="STORE", help="new folder")
_CONFIG: Final = _option("--config", type=Path, metavar="FILE.toml", help="configuration file")
_SET: Final = _option(
    "--set",
    action="append",
    default=[],
    metavar="KEY=VALUE",
    help="set one configuration key; may be repeated (`recsys train --help` lists the keys)",
)

# The commands, under each heading of `recsys --help`.
GROUPS: Final[dict[str, dict[str, Command]]] = {
    "data": {
        "inspect": Command(
            "guess the schema of a table and print it as TOML, to edit",
            (
                _option("files", nargs="+", metavar="FILE", help=_FILES),
                _option("--label", default="", metavar="COLUMN", help="the column of labels"),
                _option(
                    "--group",
                    default="",
                    metavar="COLUMN",
                    help="the column of groups, such as users",
                ),
                _option(
                    "--item",
                    default="",
                    metavar="COLUMN",
                    help="the column of items, for data without a label",
                ),
                _option(
                    "--quote",
                    default='"',
                    metavar="CHARACTER",
                    help='encloses fields of text (default: "); empty for none',
                ),
                _option(
                    "--ignore",
                    nargs="+",
                    default=[],
                    metavar="COLUMN",
                    help="columns to leave out",
                ),
                _option(
                    "--no-header",
                    nargs="+",
                    default=[],
                    metavar="NAME",
                    help="the first line is data; the columns have these names",
                ),
            ),
        ),
        "prepare": Command(
            "prepare a store from files",
            formats={
                "criteo-kaggle": Command(
                    "raw text of the Criteo Kaggle challenge",
                    (_option("raw", nargs="+", metavar="RAW", help=_RAW), _FOLDER),
                ),
                "criteo-1tb": Command(
                    "days of Criteo 1TB",
                    (
                        _option("raw", nargs="+", metavar="DAY", help=f"{_RAW}; oldest day first"),
                        _option(
                            "--max-ind-range",
                            type=int,
                            metavar="N",
                            help="take ids modulo N, as facebookresearch/dlrm",
                        ),
                        _FOLDER,
                    ),
                ),
                "table": Command(
                    "tables of any columns, by a schema",
                    (
                        _option("files", nargs="+", metavar="FILE", help=_FILES),
                        [
                            _option(
                                "--schema",
                                metavar="SCHEMA",
                                help="a TOML file, such as `recsys inspect` prints; or the "
                                "name of a known data set",
                            ),
                            _option(
                                "--like",
                                metavar="STORE",
                                help="number values as in STORE, unknown ones as row 0; all "
                                "rows are for test",
                            ),
                        ],
                        _option(
                            "--split",
                            action="store_true",
                            help="with --like: divide the rows as the schema of STORE says, to "
                            "train on them",
                        ),
                        _FOLDER,
                    ),
                ),
            },
        ),
    },
    "training": {
        "train": Command(
            "train a model, evaluate it and save it",
            (
                _option(
                    "data",
                    nargs="?",
                    metavar="STORE",
                    help=f"{_STORE}; default: data of --config, or with --resume that of the run",
                ),
                _CONFIG,
                _SET,
                _option(
                    "--run", metavar="DIR", help="new folder for results; default runs/<date-time>"
                ),
                _option(
                    "--resume",
                    action="store_true",
                    help="continue the run in DIR from its newest checkpoint; --config and --set "
                    "change keys",
                ),
                _option(
                    "--checkpoint",
                    type=int,
                    metavar="N",
                    help="with --resume: continue from checkpoint N",
                ),
                _option(
                    "--dry-run",
                    action="store_true",
                    help="check the run, tell what it will take of memory and disk, and write "
                    "nothing",
                ),
            ),
        ),
        "evaluate": Command(
            "measure the quality of a saved model",
            (
                _RUN,
                _option("--data", metavar="STORE", help="default: the data of the run"),
                _option("--json", type=Path, metavar="FILE", help="also write the metrics to FILE"),
            ),
        ),
        "report": Command(
            "write an HTML page about a run or an ablation",
            (_option("run", metavar="DIR", help="folder of a run or an ablation"),),
        ),
        "ablate": Command(
            "train variations with several seeds and tabulate them",
            (
                _option(
                    "config",
                    type=Path,
                    metavar="CONFIG.toml",
                    help="configuration file with a table [ablate]",
                ),
                _SET,
                _option(
                    "--run",
                    required=True,
                    metavar="DIR",
                    help="folder for results; the folder of a stopped ablation is continued",
                ),
            ),
        ),
        "verify": Command(
            "check that training at several budgets equals training with every row resident",
            (
                _option("data", metavar="STORE", help="a store, or synthetic data, as for train"),
                _CONFIG,
                _SET,
                _option(
                    "--budgets",
                    nargs="+",
                    metavar="BUDGET",
                    help="sizes such as 256MiB, or names; default: floor half",
                ),
                _option("--steps", type=int, metavar="N", help="most steps; default: one epoch"),
            ),
        ),
    },
    "a trained model": {
        "predict": Command(
            "predict samples with a saved model",
            (
                _RUN,
                _option(
                    "data",
                    nargs="+",
                    metavar="DATA",
                    help="a store; or files like those that the run's store was prepared from, "
                    "such as CSV or Parquet, with or without the label",
                ),
                _option("--out", type=Path, required=True, metavar="FILE.parquet", help="new file"),
                _option(
                    "--batch-size",
                    type=int,
                    default=8192,
                    metavar="B",
                    help="samples per forward pass",
                ),
                _option(
                    "--store", metavar="STORE", help="for files: the run's store, if it was moved"
                ),
            ),
        ),
        "recommend": Command(
            "write the items with the highest scores for each user",
            (
                _RUN,
                _option(
                    "--users",
                    nargs="+",
                    required=True,
                    metavar="FILE",
                    help=f"{_FILES}, with the column of groups",
                ),
                _option("--out", type=Path, required=True, metavar="FILE.parquet", help="new file"),
                _option("--top", type=int, default=20, metavar="K", help="items for each user"),
                _option(
                    "--with-seen",
                    action="store_true",
                    help="also items that the user has chosen before",
                ),
                _option(
                    "--batch-size",
                    type=int,
                    default=8192,
                    metavar="B",
                    help="items, or pairs of user and item, per forward pass",
                ),
                _option(
                    "--store",
                    metavar="STORE",
                    help="the run's store, if it was moved, or one with newer rows of the users, "
                    "prepared --like it",
                ),
            ),
        ),
        "export": Command(
            "write a model, or the rows that changed, for other programs",
            (
                _RUN,
                [
                    _option(
                        "--to",
                        choices=("safetensors", "torch-export"),
                        help="its tensors, without pickle, or a program that runs with "
                        "PyTorch alone",
                    ),
                    _option(
                        "--since",
                        type=int,
                        metavar="N",
                        help="only what changed from checkpoint N to the newest one, as "
                        "safetensors",
                    ),
                ],
                _option(
                    "--checkpoint",
                    type=number_or_last,
                    metavar="N",
                    help="with --to safetensors: the model of this checkpoint, or of the 'last' "
                    "one",
                ),
                _option(
                    "--quantize",
                    choices=("int8",),
                    help="with --to torch-export: round rows to int8, with a scale for each row",
                ),
                _FILE,
            ),
        ),
        "apply": Command(
            "write the model that results from a whole one and deltas",
            (
                _option("full", metavar="FULL", help="export --to safetensors --checkpoint N"),
                _option("deltas", nargs="+", metavar="DELTA", help="export --since N, in order"),
                _FILE,
            ),
        ),
    },
    "fast memory": {
        "profile": Command(
            "count lookups per row, and print the coverage of the most popular rows",
            (
                _option("store", metavar="STORE", help=_STORE),
                _NPZ,
                _option(
                    "--samples",
                    type=shares,
                    default=(0, 1),
                    metavar="A:B",
                    help="samples to count, as shares (0:0.5); the coverage is measured on the "
                    "samples after B; default: all",
                ),
            ),
        ),
        "plan": Command(
            "choose the hot rows for a budget, and print the coverage of several budgets",
            (
                _option("profile", metavar="PROFILE", help="file written by `recsys profile`"),
                _option(
                    "--budget",
                    required=True,
                    metavar="SIZE",
                    help="fast memory, such as 256MiB or 2GiB",
                ),
                _NPZ,
                _option(
                    "--config",
                    type=Path,
                    metavar="FILE.toml",
                    help="configuration of the training that will use the plan",
                ),
                _option(
                    "--set",
                    action="append",
                    default=[],
                    metavar="KEY=VALUE",
                    help="set one key of that configuration; model.embedding_dim, optimizer.name "
                    "and batch_size matter; may be repeated",
                ),
            ),
        ),
    },
}
EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train synthetic:criteo-kaggle --set budget=256MiB

  recsys inspect clicks.csv > schema.toml
  recsys prepare table clicks.csv --schema schema.toml --out store
  recsys train store --run run --set optimizer.name=adagrad --set optimizer.lr=0.03
  recsys predict run clicks.csv --out scores.parquet

`recsys COMMAND --help` lists the options of a command."""

TRAIN_EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train store --run run --set model.embedding_dim=32 --set optimizer.lr=0.05
  recsys train store --set budget=256MiB --set cold_tier=file
  recsys train store --set budget=256MiB --dry-run
  recsys train --run run --resume --set epochs=2
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; a mistake in them ends the process with status 2.

    Args:
        arguments: The command, and what follows it; help if there is none.
    """
    parser, commands = build_parsers()
    if arguments[:1] == ["train"] and {"-h", "--help"} & set(arguments):
        from recsys.config import TrainConfig, format_keys  # takes a fifth of a second

        commands["train"].epilog = (
            "keys that most runs set, for --set and for the TOML file:\n"
            f"{format_keys(TrainConfig, common=True)}\n\n{TRAIN_EXAMPLES}\n"
            f"every key:\n{format_keys(TrainConfig)}"
        )
    options, left = parser.parse_known_args(arguments or ["--help"])
    if left:
        keys = "; configuration keys are given by --set KEY=VALUE" if "set" in options else ""
        commands[options.command].error(f"unrecognized arguments: {' '.join(left)}{keys}")
    return options


def build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands and their options, and the parsers of the commands, by name."""
    groups = (
        "\n".join([f"{heading}:", *(f"  {name:<10}{of.help}" for name, of in commands.items())])
        for heading, commands in GROUPS.items()
    )
    parser = argparse.ArgumentParser(
        prog="recsys",
        description="Train recommendation models whose embedding tables outgrow the fast memory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n\n".join([*groups, EXAMPLES]),
    )
    parser.add_argument("--version", action="version", version=f"recsys {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    return parser, {
        name: _fill(parsers.add_parser(name), command)
        for commands in GROUPS.values()
        for name, command in commands.items()
    }


def _fill(parser: argparse.ArgumentParser, command: Command) -> argparse.ArgumentParser:
    """Give a parser the options of a command, and its own commands."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for option in command.options:
        if isinstance(option, list):
            group = parser.add_mutually_exclusive_group(required=True)
            for names, settings in option:
                group.add_argument(*names, **settings)
        else:
            names, settings = option
            parser.add_argument(*names, **settings)
    if command.formats:
        formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
        for name, inner in command.formats.items():
            _fill(formats.add_parser(name, help=inner.help), inner)
    return parser
