"""The command that prepares stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.files import require_files
from recsys.cli.table import add_table_format

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from recsys.datasets.criteo.prepare import PrepareReport

__all__ = ["add_data_options"]

_RAW_HELP = "tab-separated text, plain or gzip"


def add_data_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `prepare` its options."""
    prepare = commands["prepare"]
    formats = prepare.add_subparsers(dest="format", required=True, metavar="FORMAT")

    kaggle = formats.add_parser("criteo-kaggle", help="raw text of the Criteo Kaggle challenge")
    kaggle.add_argument("raw", nargs="+", metavar="RAW", help=_RAW_HELP)
    kaggle.set_defaults(run_command=_prepare_kaggle)

    days = formats.add_parser("criteo-1tb", help="days of Criteo 1TB")
    days.add_argument("day", nargs="+", metavar="DAY", help=f"{_RAW_HELP}; oldest day first")
    days.add_argument(
        "--max-ind-range", type=int, metavar="N", help="take ids modulo N, as facebookresearch/dlrm"
    )
    days.set_defaults(run_command=_prepare_1tb)
    for parser in (kaggle, days):
        parser.add_argument("--out", required=True, metavar="STORE", help="new folder")

    add_table_format(formats)


def _prepare_kaggle(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.raw))

    from recsys.datasets.criteo.prepare import prepare_criteo_kaggle

    _print_report(prepare_criteo_kaggle(options.raw, options.out))
    return 0


def _prepare_1tb(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.day))

    from recsys.datasets.criteo.prepare import prepare_criteo_1tb

    _print_report(prepare_criteo_1tb(options.day, options.out, max_ind_range=options.max_ind_range))
    return 0


def _print_report(report: PrepareReport) -> None:
    print(
        f"{report.path}: {report.num_samples:,} samples, "
        f"{report.num_rows:,} distinct ids in 26 columns"
    )
