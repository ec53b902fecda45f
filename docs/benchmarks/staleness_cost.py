"""Writes what a staleness tracker costs: counts, a window's end, and a running sum for comparison.

    python docs/benchmarks/staleness_cost.py --out FILE [--steps 1000]

Trains the rows of Kaggle's 26 tables (embedding_dim 16, SGD) on synthetic samples. Times are of the
calling thread on the processor, in microseconds per step, so other processes disturb them little.
The running sum is what an update kernel would do instead of snapshots: look up the place of every
updated row, and add the row's change to a sum.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys._support.machine import describe_environment
from recsys.datasets import SyntheticCriteo
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.lookup.fused_lookup import Part
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.staleness.settings import Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from recsys.batch import JaggedIds

DIM = 16
SAMPLED_EVERY = 16  # mini-batches


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both batch sizes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    environment = describe_environment()
    cases = [measure(size, options.steps, options.windows) for size in (128, 2048)]
    command = f"python docs/benchmarks/staleness_cost.py --steps {options.steps}"
    result = {
        "command": f"{command} --windows {options.windows}",
        "environment": environment,
        "cases": cases,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(batch_size: int, steps: int, windows: int) -> dict[str, Any]:
    """Train, and measure the parts of a tracker's work."""
    source = SyntheticCriteo(num_samples=max(7, batch_size * steps * windows))
    model = make_model(source)
    settings = Staleness(window=steps)
    tracker = StalenessTracker(model, settings, share=0.2)
    group = tracker._groups[0].group
    marks = tracker._followed[0].marks
    times: dict[str, list[float]] = {}
    marks.count = timed(marks.count, times.setdefault("count", []))  # type: ignore[method-assign]
    lookups = lookups_of(len(source.table_sizes))
    place_of_row = np.full(sum(marks.sizes), -1, np.int32)
    sums = np.zeros((tracker._followed[0].max_rows, DIM), np.float32)
    first_rows = marks.first_rows.astype(np.int64)[:-1, None]
    for number in range(steps * windows):
        begin = number * batch_size
        batch = source.read(np.arange(begin, begin + batch_size))
        features = batch.sparse_features
        values = features.values()
        if number % SAMPLED_EVERY == 0:
            bags = Bags.from_tensors(
                values, features.offsets(), None, batch_size, is_mean=False, is_one_hot=True
            )
            parts = [Part(group, lookups, bags)]
            tracker.use_flags_of(number)
            timed(tracker.all_stale, times.setdefault("all_stale", []))(parts, batch_size)
            sampled = torch.arange(0, batch_size, max(1, batch_size // 64))
            timed(tracker.add_inputs, times.setdefault("add_inputs", []))(
                begin, parts, batch_size, sampled
            )
        timed(tracker.begin_step, times.setdefault("begin_step", []))(number)
        timed(train, times.setdefault("step", []))(model, features)
        is_end = (number + 1) % steps == 0
        name = "window_end" if is_end else "end_step"
        timed(tracker.end_step, times.setdefault(name, []))(begin + batch_size)
        if is_end:
            place_of_row.fill(-1)
            followed = tracker._followed[0].history["row"]
            place_of_row[followed] = np.arange(len(followed))
        rows = np.unique(values.numpy().reshape(-1, batch_size) + first_rows)
        changes = np.ones((len(rows), DIM), np.float32)
        timed(add_changes, times.setdefault("running_sum", []))(place_of_row, rows, changes, sums)
    found = {name: 1e6 * float(np.median(each[len(each) // 4 :])) for name, each in times.items()}
    per_step = (
        found["count"] / settings.count_every
        + found["begin_step"]
        + found["end_step"]
        + found["window_end"] / steps
    )
    sampling = (found["all_stale"] + found["add_inputs"]) / SAMPLED_EVERY
    snapshots = found["window_end"] / steps
    return {
        "batch_size": batch_size,
        "window": steps,
        "num_followed": [each["num_followed"] for each in tracker.report()["windows"]],
        "tracker_bytes": tracker.num_bytes,
        "microseconds": found,
        "per_step": {"tracker": per_step, "sampling": sampling, "snapshots": snapshots},
    }


def make_model(source: SyntheticCriteo) -> HotColdEmbeddingBagCollection:
    """The tables, all in memory."""
    tables = [
        TableConfig(name=name, embedding_dim=DIM, num_embeddings=size, feature_names=(name,))
        for name, size in source.table_sizes.items()
    ]
    return HotColdEmbeddingBagCollection(tables=tables, optimizer=SGD(lr=0.1))


def lookups_of(num_tables: int) -> Lookups:
    """One lookup per table."""
    numbers = np.arange(num_tables, dtype=np.uint64)
    return Lookups(tables=numbers, positions=numbers, columns=numbers * DIM, width=DIM * num_tables)


def train(model: HotColdEmbeddingBagCollection, features: JaggedIds) -> None:
    """One step of the rows, without a dense part."""
    pooled = model(features).values()
    pooled.backward(torch.full_like(pooled, 1e-3))


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Note how long each call keeps the calling thread."""

    def call(*arguments: Any) -> Any:
        begin = thread_time()
        found = function(*arguments)
        times.append(thread_time() - begin)
        return found

    return call


@kernel
def add_changes(
    place_of_row: NDArray[np.int32],
    rows_U: NDArray[np.int64],  # noqa: N803
    changes_UD: NDArray[np.float32],  # noqa: N803
    sums: NDArray[np.float32],
) -> None:
    """Add the changes of followed rows to their sums."""
    for number in range(len(rows_U)):
        place = place_of_row[rows_U[number]]
        if place >= 0:
            for d in range(changes_UD.shape[1]):
                sums[place, d] += changes_UD[number, d]


if __name__ == "__main__":
    main()
