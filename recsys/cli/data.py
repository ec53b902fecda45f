"""The commands for data: `inspect` and `prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.files import require_files
from recsys._support.sizes import counted
from recsys.cli.output import accept_any_text
from recsys.datasets.store_writer import read_meta
from recsys.datasets.tabular.read import find_files, import_pyarrow

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from recsys.datasets.criteo import PrepareReport
    from recsys.datasets.tabular.prepare import TableReport

__all__ = ["add_data_options"]

_RAW_HELP = "tab-separated text, plain or gzip"
_FILES_HELP = "CSV or TSV (plain, .gz, .zst), Parquet, or a folder of such files"


def add_data_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `inspect` and `prepare` their options."""
    inspect = commands["inspect"]
    inspect.add_argument("files", nargs="+", metavar="FILE", help=_FILES_HELP)
    for name, metavar, default, text in (
        ("label", "COLUMN", "", "the column of labels"),
        ("group", "COLUMN", "", "the column of groups, such as users"),
        ("item", "COLUMN", "", "the column of items, for data without a label"),
        ("quote", "CHARACTER", '"', 'encloses fields of text (default: "); empty for none'),
    ):
        inspect.add_argument(f"--{name}", default=default, metavar=metavar, help=text)
    for name, metavar, text in (
        ("ignore", "COLUMN", "columns to leave out"),
        ("no-header", "NAME", "the first line is data; the columns have these names"),
    ):
        inspect.add_argument(f"--{name}", nargs="+", default=[], metavar=metavar, help=text)
    inspect.set_defaults(run_command=_inspect)

    prepare = commands["prepare"]
    formats = prepare.add_subparsers(dest="format", required=True, metavar="FORMAT")

    kaggle = formats.add_parser("criteo-kaggle", help="raw text of the Criteo Kaggle challenge")
    kaggle.add_argument("raw", nargs="+", metavar="RAW", help=_RAW_HELP)

    days = formats.add_parser("criteo-1tb", help="days of Criteo 1TB")
    days.add_argument("day", nargs="+", metavar="DAY", help=f"{_RAW_HELP}; oldest day first")
    days.add_argument(
        "--max-ind-range", type=int, metavar="N", help="take ids modulo N, as facebookresearch/dlrm"
    )
    table = formats.add_parser("table", help="tables of any columns, by a schema")
    table.add_argument("files", nargs="+", metavar="FILE", help=_FILES_HELP)
    rules = table.add_mutually_exclusive_group(required=True)
    rules.add_argument(
        "--schema",
        metavar="SCHEMA",
        help="a TOML file, such as `recsys inspect` prints; or the name of a known data set",
    )
    rules.add_argument(
        "--like",
        metavar="STORE",
        help="number values as in STORE, unknown ones as row 0; all rows are for test",
    )
    table.add_argument(
        "--split",
        action="store_true",
        help="with --like: divide the rows as the schema of STORE says, to train on them",
    )
    for parser, command in (
        (kaggle, _prepare_kaggle),
        (days, _prepare_1tb),
        (table, _prepare_table),
    ):
        parser.set_defaults(run_command=command)
        parser.add_argument("--out", required=True, metavar="STORE", help="new folder")


def _prepare_kaggle(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.raw))

    from recsys.datasets.criteo import prepare_criteo_kaggle

    _print_report(prepare_criteo_kaggle(options.raw, options.out))
    return 0


def _prepare_1tb(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.day))

    from recsys.datasets.criteo import prepare_criteo_1tb

    _print_report(prepare_criteo_1tb(options.day, options.out, max_ind_range=options.max_ind_range))
    return 0


def _print_report(report: PrepareReport) -> None:
    print(
        f"{report.path}: {report.num_samples:,} samples, "
        f"{report.num_rows:,} distinct ids in 26 columns"
    )


def _prepare_table(options: argparse.Namespace) -> int:
    find_files(options.files)

    from recsys.datasets.tabular.schema import find_schema

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
    _print_table_report(report)
    return 0


def _print_table_report(report: TableReport) -> None:
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


def _inspect(options: argparse.Namespace) -> int:
    find_files(options.files)
    import_pyarrow()

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
    accept_any_text("utf-8")  # as TOML is
    print(draft.to_toml(), end="")
    return 0
