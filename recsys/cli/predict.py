"""The command that predicts with a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.counted import counted
from recsys.cli.checks import require_model
from recsys.datasets.store_meta import is_store
from recsys.datasets.tabular.reading.paths import find_files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

__all__ = ["add_predict_options"]


def add_predict_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `predict` its options."""
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


def _predict(options: argparse.Namespace) -> int:
    require_model(options.run)
    if not (len(options.data) == 1 and is_store(Path(options.data[0]))):
        find_files(options.data)

    from recsys._support.machine import tune_allocator
    from recsys.report import format_unknown
    from recsys.train.judge.predict import predict_run

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
