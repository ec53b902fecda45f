"""The commands that prepare stores and convert them for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.counted import counted
from recsys._support.files import require_files
from recsys.cli.table import add_table_format
from recsys.datasets.criteo import CONVENTIONS
from recsys.datasets.interchange import FORMATS
from recsys.datasets.splits import SPLITS
from recsys.datasets.store_meta import read_meta

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from recsys.datasets.criteo.flow import PrepareReport

__all__ = ["add_data_options"]

_RAW_HELP = "tab-separated text, plain, gzip or zst"


def add_data_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `prepare` and `convert` their options."""
    prepare = commands["prepare"]
    formats = prepare.add_subparsers(dest="format", required=True, metavar="FORMAT")

    kaggle = formats.add_parser("criteo-kaggle", help="raw text of the Criteo Kaggle challenge")
    kaggle.add_argument("raw", nargs="+", metavar="RAW", help=_RAW_HELP)
    kaggle.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default=CONVENTIONS[0],
        help="conventions of facebookresearch/dlrm, or of TorchRec's npy files",
    )
    kaggle.set_defaults(run_command=_prepare_kaggle)

    days = formats.add_parser("criteo-1tb", help="days of Criteo 1TB; continues a stopped run")
    days.add_argument("day", nargs="+", metavar="DAY", help=f"{_RAW_HELP}; oldest day first")
    days.add_argument(
        "--max-ind-range", type=int, metavar="N", help="take ids modulo N, as facebookresearch/dlrm"
    )
    days.set_defaults(run_command=_prepare_1tb)
    for parser in (kaggle, days):
        parser.add_argument(
            "--skip-bad-lines", action="store_true", help="leave out bad lines; count and list them"
        )

    npz = formats.add_parser("classic-npz", help="the processed file of facebookresearch/dlrm")
    npz.add_argument("file", metavar="FILE.npz", help="compressed or uncompressed")
    npz.set_defaults(run_command=_prepare_npz)

    npy = formats.add_parser("torchrec-npy", help="TorchRec's npy files")
    npy.add_argument(
        "prefix",
        nargs="+",
        metavar="PREFIX",
        help="one day: PREFIX_dense.npy, PREFIX_sparse.npy, PREFIX_labels.npy; oldest day first",
    )
    npy.add_argument(
        "--table-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="take the ids of each sparse column modulo its N; default: ids are rows",
    )
    npy.set_defaults(run_command=_prepare_npy)
    for parser in (kaggle, days, npz, npy):
        parser.add_argument("--out", required=True, metavar="STORE", help="new folder")

    add_table_format(formats)

    convert = commands["convert"]
    convert.add_argument("store", metavar="STORE", help="a prepared store")
    convert.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="the processed file of facebookresearch/dlrm, or TorchRec's npy files",
    )
    convert.add_argument(
        "--out", required=True, metavar="OUT", help="new file, or prefix of new npy files"
    )
    convert.add_argument(
        "--split",
        choices=SPLITS,
        help="for npy files: write only this split; default: all samples",
    )
    convert.set_defaults(run_command=_convert)


def _prepare_kaggle(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.raw))

    from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle

    report = prepare_criteo_kaggle(
        options.raw,
        options.out,
        convention=options.convention,
        skip_bad_lines=options.skip_bad_lines,
    )
    _print_report(report)
    return 0


def _prepare_1tb(options: argparse.Namespace) -> int:
    require_files("raw", map(Path, options.day))

    from recsys.datasets.criteo.days import prepare_criteo_1tb

    report = prepare_criteo_1tb(
        options.day,
        options.out,
        max_ind_range=options.max_ind_range,
        skip_bad_lines=options.skip_bad_lines,
    )
    _print_report(report)
    if report.num_files_before:
        print(f"{report.num_files_before} of {len(options.day)} days were prepared before")
    return 0


def _prepare_npz(options: argparse.Namespace) -> int:
    require_files("npz", [Path(options.file)])

    from recsys.datasets.classic_npz import read_classic_npz

    return _print_store(read_classic_npz(options.file, options.out))


def _prepare_npy(options: argparse.Namespace) -> int:
    from recsys.datasets.torchrec_npy import read_torchrec_npy

    # A prefix is a path, relative to the current folder or absolute.
    store = read_torchrec_npy(".", options.prefix, options.out, table_sizes=options.table_sizes)
    return _print_store(store)


def _convert(options: argparse.Namespace) -> int:
    read_meta(Path(options.store))

    from recsys.datasets.convert import convert_store

    files = convert_store(options.store, options.to, options.out, split=options.split)
    print(f"wrote {', '.join(map(str, files))}")
    return 0


def _print_report(report: PrepareReport) -> None:
    print(
        f"{report.path}: {report.num_samples:,} samples, "
        f"{report.num_rows:,} distinct ids in 26 columns"
    )
    if report.bad_lines is not None:
        print(f"left out {report.num_bad_lines:,} bad lines, listed in {report.bad_lines}")


def _print_store(path: Path) -> int:
    from recsys.datasets.store import Store

    store = Store(path)
    num_rows = sum(store.table_sizes.values())
    print(
        f"{path}: {store.num_samples:,} samples, {num_rows:,} rows in "
        f"{counted(len(store.table_sizes), 'table')}"
    )
    return 0
