"""Predictions of a saved model, beside the training that made it.

    train      reads the training split of a store and trains on it
    predict    reads the whole store, predicts its samples, and writes a Parquet file

Both have Kaggle's tables, the same store and mini-batches of 8192. Each run has its own process,
and both take a turn in each round. Training is timed by its own clock: reading and steps alone,
without opening, evaluating and saving. Prediction is timed from the open model to the written file.

    tables=resident    training keeps all rows in RAM
    tables=file        training keeps all rows in files, and 512 MiB of them in RAM

Prediction maps the tables of the saved model in both. Its memory is the peak of what is not mapped
from a file.

    ranking    ranks all items for each group, as an evaluation of user-item pairs does

Its store has a user, an item with a genre, and a history; the model has the default sizes.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from model import samples
from turns import (
    Row,
    bench_arguments,
    in_own_process,
    prepare_process,
    process_memory,
    ratio,
    rows_by_provider,
    show_rows,
    summarize,
    take_turns,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BATCH_SIZE = 8192
_BLOCK_SAMPLES = 1 << 16
_TIERS: dict[str, dict[str, str]] = {
    "resident": {},
    "file": {"cold_tier": "file", "budget": "512MiB"},
}


def bench_predict(
    *, num_samples: int, num_rounds: int, table_sizes: Sequence[int]
) -> Iterator[Row]:
    """Measure samples per second of training and of prediction, and the memory of prediction.

    Args:
        num_samples: Samples of the store.
        num_rounds: Turns of each.
        table_sizes: Rows per table; Kaggle's if empty.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as name:
        folder = Path(name)
        store = folder / "store"
        in_own_process(_write_store, store, num_samples, tuple(table_sizes))
        for tier, settings in _TIERS.items():
            config = {"data": str(store), "batch_size": _BATCH_SIZE, **settings}
            case = f"B={_BATCH_SIZE},D=16,tables={tier},samples={num_samples}"
            yield from _measure(case, folder / tier, config, num_rounds)


def _write_store(path: Path, num_samples: int, table_sizes: tuple[int, ...]) -> None:
    """Write synthetic samples to a store, in their order, as `recsys prepare` would."""
    from recsys.datasets.store_writer import StoreWriter

    source = samples(num_samples, table_sizes)
    with StoreWriter(path) as writer:
        for start in range(0, num_samples, _BLOCK_SAMPLES):
            numbers = np.arange(start, min(start + _BLOCK_SAMPLES, num_samples))
            batch = source.read(numbers)
            counts = np.rint(np.expm1(batch.dense_features.numpy().astype(np.float64)))
            rows = batch.sparse_features.values().numpy().reshape(-1, len(numbers)).T
            writer.append(
                batch.labels.numpy().astype(np.int8), counts.astype(np.int32), rows.astype(np.int32)
            )
        writer.finish(
            dense_names=[f"int_{feature}" for feature in range(source.num_dense)],
            splits=source.splits,
            about={"convention": "classic", "sources": []},
            table_sizes=source.table_sizes,
        )


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
    return [
        *rows_by_provider("predict", case, "throughput", "samples/s", rates),
        summarize("predict", case, "predict", "peak_memory", "bytes", peaks),
        ratio(
            "predict",
            case,
            "predict",
            "speed_over_training",
            values=seconds["predict"],
            baseline=seconds["train"],
        ),
    ]


def _train(run_dir: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Train a model; without `save_model` in the settings, its folder is removed."""
    from recsys.config import load_config
    from recsys.train import train

    is_kept = settings.get("save_model", False)
    config = load_config(**{"save_model": False, **settings, "eval": {"max_samples": 2048}})
    throughput = train(config, run_dir, show_progress=False)["throughput"]
    if not is_kept:
        shutil.rmtree(run_dir)
    return {"seconds_per_sample": throughput["train_seconds"] / throughput["num_samples"]}


def _predict(run_dir: Path, settings: dict[str, Any]) -> dict[str, float]:
    from recsys.train.predict import predict_run

    prepare_process()  # as `recsys predict` does, and as training does
    out = run_dir.parent / f"scores-{time.monotonic_ns()}.parquet"
    peak = [0.0]
    threading.Thread(target=_watch_memory, args=(peak,), daemon=True).start()
    written, _ = predict_run(run_dir, [settings["data"]], out, batch_size=settings["batch_size"])
    out.unlink()
    return {
        "seconds_per_sample": written.seconds / written.num_rows,
        "peak_memory_bytes": peak[0],
    }


def bench_ranking(*, num_groups: int, num_items: int, num_runs: int) -> Iterator[Row]:
    """Measure the seconds in which a model of default sizes ranks all items for each group."""
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as name:
        store = Path(name) / "store"
        _write_pairs(store, num_groups, num_items)
        for model in ("dlrm", "din"):
            settings = {"data": str(store), "model": {"name": model}, "eval": {"ranking_groups": 0}}
            seconds = [in_own_process(_rank, settings) for _ in range(num_runs)]
            case = f"groups={num_groups},items={num_items},model={model},D=16"
            yield summarize("ranking", case, "recsys", "time", "s", seconds)


def _write_pairs(path: Path, num_groups: int, num_items: int) -> None:
    """Write a store whose test part is a positive of each group; each has a history of 20 items."""
    from recsys.datasets.store_writer import Feature, StoreWriter

    rng, num_samples = np.random.default_rng(0), 3 * num_groups
    users = np.tile(np.arange(num_groups, dtype=np.int32), 3)
    items = rng.integers(1, num_items, num_samples, np.int32)
    genres = np.arange(num_items, dtype=np.int32) % 40
    features = (
        Feature("user", "user"),
        Feature("item", "item"),
        Feature("genre", "genre"),
        Feature("history", "item", "sequence"),
    )
    with StoreWriter(path, dense_transform="none", features=features, has_groups=True) as writer:
        writer.append(
            np.ones(num_samples, np.int8),
            np.zeros((num_samples, 1), np.float32),
            np.stack([users, items, genres[items]], 1),
            bag_values=rng.integers(1, num_items, 20 * num_samples, np.int32),
            bag_lengths=np.full((num_samples, 1), 20),
            groups=users,
        )
        writer.finish(
            dense_names=["age"],
            splits={
                part: range(number * num_groups, (number + 1) * num_groups)
                for number, part in enumerate(("train", "validation", "test"))
            },
            about={
                "convention": "table",
                "sources": [],
                "ranking": {"item": "item", "item_features": ["genre"]},
                "histories": {"history": "item"},
            },
            table_sizes={"user": num_groups, "item": num_items, "genre": 40},
            catalog=genres[:, None],
        )


def _rank(settings: dict[str, Any]) -> float:
    from recsys.config import load_config
    from recsys.train.build import build_model, open_source
    from recsys.train.evaluate import evaluate, with_ranking

    prepare_process()
    config = load_config(**settings)
    source = open_source(config)
    model, _ = build_model(config, source)
    found = evaluate(model, source, "test", config, is_ranked=False)
    begin = time.perf_counter()
    with_ranking(found, model, source, "test", config)
    return time.perf_counter() - begin


def _watch_memory(peak: list[float]) -> None:
    """Keep the largest resident memory of this process that is not mapped from files."""
    while True:
        peak[0] = max(peak[0], process_memory().get("RssAnon", math.nan))
        time.sleep(0.01)


def main() -> None:
    """Run it from the command line."""
    options = bench_arguments(__doc__).parse_args()
    ranking = bench_ranking(
        num_groups=20 if options.quick else 1000,
        num_items=100 if options.quick else 12_000,
        num_runs=1 if options.quick else 3,
    )
    predict = bench_predict(
        num_samples=50_000 if options.quick else 2_000_000,
        num_rounds=1 if options.quick else 6,
        table_sizes=[1000] * 26 if options.quick else (),
    )
    show_rows(chain(ranking, predict), options)


if __name__ == "__main__":
    main()
