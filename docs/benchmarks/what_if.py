"""Trains runs that differ in budget, depth and cold tier, and predicts each from one of them.

    python docs/benchmarks/what_if.py STORE --json docs/benchmarks/what_if.json [--runs DIR]

STORE is a store of the real Criteo sample. The runs take turns, for three rounds, each in a process
of its own with one thread. Of each, the run with the median speed counts: its record is the
measurement, and that of a base is all that the predictions know. `--runs DIR` keeps the folders of
the runs; runs that are there already are not trained again, so a second call only predicts.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recsys._support.machine import describe_environment, set_num_threads
from recsys.config import load_config
from recsys.train.run_files.run_folder import write_json
from recsys.train.trainer_process import train_in_own_process
from recsys.what_if.changes import MeasuredRun, change_to
from recsys.what_if.predict import WhatIf
from recsys.what_if.table import describe_predictions, format_predictions

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_THREADS = 1
_COMMON = (
    f"num_threads={_NUM_THREADS}",
    "save_model=false",
    "eval.max_samples=256",
)
# By name: the settings of all runs; those of each run, from near the floor to half of everything.
_SETTINGS: Final[dict[str, tuple[list[str], dict[str, list[str]]]]] = {
    "D=16, B=128": (
        ["model.embedding_dim=16", "batch_size=128"],
        {
            "host": ["budget=3MiB"],
            "file": ["budget=3MiB", "cold_tier=file"],
            "budget": ["budget=10MiB"],
            "depth": ["budget=3MiB", "schedule.depth=8"],
            "sequential": ["budget=3MiB", "schedule.name=sequential"],
            "file-sequential": ["budget=3MiB", "cold_tier=file", "schedule.name=sequential"],
        },
    ),
    "D=64, B=1024": (
        ["model.embedding_dim=64", "batch_size=1024"],
        {
            "host": ["budget=9MiB"],
            "file": ["budget=9MiB", "cold_tier=file"],
            "file-sequential": ["budget=9MiB", "cold_tier=file", "schedule.name=sequential"],
            "file-budget": ["budget=36MiB", "cold_tier=file"],
        },
    ),
}
_BASES = ("host", "file")


def train_all(store: str, folder: Path, num_rounds: int) -> None:
    """Train every run that is not in a folder yet, in turns."""
    for number in range(num_rounds):
        for name, (settings, runs) in _SETTINGS.items():
            for run, changes in runs.items():
                path = _path(folder, name, run, number)
                if not (path / "run.json").is_file():
                    config = load_config(None, [*_COMMON, *settings, *changes], data=store)
                    train_in_own_process(config, path, show_progress=False)


def predict_all(folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Predict every run from every base of its setting."""
    found = []
    for name, (_, runs) in _SETTINGS.items():
        measured = {run: _median(folder, name, run, num_rounds) for run in runs}
        for base in _BASES:
            start = measured[base]
            what_if = WhatIf(start)
            others = [each for run, each in measured.items() if run != base]
            predictions = [what_if.predict(change_to(start, each)) for each in others]
            described = describe_predictions(start, predictions, {})
            print(f"{name}, {base}\n{format_predictions(described)}\n")  # noqa: T201
            for each in described["predictions"]:
                del each["beside"]
            del described["run"], described["refused"]
            found.append({"name": f"{name}, {base}", **described})
    return found


def _median(folder: Path, name: str, run: str, num_rounds: int) -> MeasuredRun:
    """The run of median speed among those of all rounds."""
    runs = [MeasuredRun.open(_path(folder, name, run, number)) for number in range(num_rounds)]
    return sorted(runs, key=lambda each: each.samples_per_second)[num_rounds // 2]


def _path(folder: Path, name: str, run: str, number: int) -> Path:
    return folder / name.replace(", ", "-").replace("=", "") / f"{run}-{number}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="a prepared store of Criteo Kaggle's format")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--runs", type=Path, help="keep the folders of runs here")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = options.runs or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="recsys-what-if-"))
        )
        train_all(options.store, folder, options.rounds)
        set_num_threads(_NUM_THREADS)
        found = predict_all(folder, options.rounds)
    record = {
        "command": "python docs/benchmarks/what_if.py STORE",
        "environment": describe_environment(),
        "num_rounds": options.rounds,
        "settings": found,
    }
    write_json(options.json, record)


if __name__ == "__main__":
    main()
