"""`recsys bench predict`: predictions of a saved model, beside the training that made it.

    train      reads the training split of a store and trains on it
    predict    reads the whole store, predicts its samples, and writes a Parquet file

Both have Kaggle's tables, the same store and mini-batches of 8192. Each run has its own process,
and both take a turn in each round. Training is timed by its own clock: reading and steps alone,
without opening, evaluating and saving. Prediction is timed from the open model to the written file.

    tables=resident    training keeps all rows in RAM
    tables=file        training keeps all rows in files, and `BUDGET` of them in RAM

Prediction maps the tables of the saved model in both. Its memory is the peak of what is not mapped
from a file.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from recsys._support.machine import tune_allocator
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, summarize, take_turns
from recsys.bench.parts.process_memory import AnonymousMemory
from recsys.bench.parts.scratch import scratch_folder
from recsys.bench.parts.worker import in_own_process
from recsys.bench.synthetic import write_store
from recsys.config import load_config
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.datasets.tabular.reading.optional_pyarrow import import_pyarrow
from recsys.train.judge.predict import predict_run
from recsys.train.trainer import train

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["BUDGET", "bench_predict"]

BUDGET = "512MiB"
_BATCH_SIZE = 8192
_TIERS: dict[str, dict[str, str]] = {
    "resident": {},
    "file": {"cold_tier": "file", "budget": BUDGET},
}


def bench_predict(
    *,
    num_samples: int,
    num_rounds: int,
    batch_size: int = _BATCH_SIZE,
    table_sizes: Sequence[int] = (),
) -> list[Row]:
    """Measure samples per second of training and of prediction, and the memory of prediction.

    Args:
        num_samples: Samples of the store.
        num_rounds: Turns of each.
        batch_size: B.
        table_sizes: Rows per table; Kaggle's if empty.

    Raises:
        MissingDependency: pyarrow is not installed.
    """
    import_pyarrow()  # before a model is trained
    rows = []
    with scratch_folder() as folder:
        store = folder / "store"
        in_own_process(_write_store, store, num_samples, tuple(table_sizes))
        for tier, settings in _TIERS.items():
            config = {"data": str(store), "batch_size": batch_size, **settings}
            case = f"B={batch_size},D=16,tables={tier},samples={num_samples}"
            rows += _measure(case, folder / tier, config, num_rounds)
    return rows


def _write_store(path: Path, num_samples: int, table_sizes: tuple[int, ...]) -> None:
    sizes = table_sizes or KAGGLE_TABLE_SIZES
    write_store(SyntheticCriteo(num_samples=num_samples, table_sizes=sizes), path)


def _measure(case: str, folder: Path, config: dict[str, Any], num_rounds: int) -> list[Row]:
    folder.mkdir()
    saved = folder / "saved"
    in_own_process(_train, saved, {**config, "save_model": True})
    turns = take_turns(
        {
            "train": partial(in_own_process, _train, folder / "again", config),
            "predict": partial(in_own_process, _predict, saved, config),
        },
        num_rounds,
        num_warm_up_rounds=0,  # each process warms up itself
    )
    shutil.rmtree(folder)
    seconds = {
        name: [turn["seconds_per_sample"] for turn in found] for name, found in turns.items()
    }
    rates = {name: [1 / each for each in spent] for name, spent in seconds.items()}
    peaks = [turn["peak_memory_bytes"] for turn in turns["predict"]]
    ratio_of = partial(ratio, "predict", case, "predict")
    return [
        *rows_by_provider("predict", case, "throughput", "samples/s", rates),
        summarize("predict", case, "predict", "peak_memory", "bytes", peaks),
        ratio_of("speed_over_training", values=seconds["predict"], baseline=seconds["train"]),
    ]


def _train(run_dir: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Train a model; without `save_model` in the settings, its folder is removed."""
    is_kept = settings.get("save_model", False)
    config = load_config(**{"save_model": False, **settings, "eval": {"max_samples": 2048}})
    throughput = train(config, run_dir, show_progress=False)["throughput"]
    if not is_kept:
        shutil.rmtree(run_dir)
    return {"seconds_per_sample": throughput["train_seconds"] / throughput["num_samples"]}


def _predict(run_dir: Path, settings: dict[str, Any]) -> dict[str, float]:
    tune_allocator()  # as `recsys predict` does, and as training does
    out = run_dir.parent / f"scores-{time.monotonic_ns()}.parquet"
    memory = AnonymousMemory()
    report = predict_run(run_dir, [settings["data"]], out, batch_size=settings["batch_size"])
    out.unlink()
    return {
        "seconds_per_sample": report.seconds / report.num_samples,
        "peak_memory_bytes": memory.peak,
    }
