"""Measures what a last mini-batch of few samples does to a model.

    python docs/benchmarks/last_batch.py STORE --json docs/benchmarks/last_batch.json

STORE is one that `recsys prepare criteo-kaggle` made. Models are trained for an epoch of whole
mini-batches, and evaluated on the test split. Then they take one step more, on a few samples: with
the mean of their losses, as every other step, or with that mean times their share of a whole
mini-batch, so that a sample counts as much as any other. Both are compared with no such step.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from recsys._support.machine import describe_environment, set_num_threads
from recsys.config import TrainConfig, load_config
from recsys.datasets.loader import BatchLoader
from recsys.train.judge.evaluation import evaluate_split
from recsys.train.parts.build import build_model, open_source
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEEDS = range(10)
_SIZES = (1, 37)
_METRICS = ("auc", "logloss", "calibration")
# The defaults, and the recipe of the long runs in docs/slipstream.md.
_RECIPES: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "adagrad": {"batch_size": 2048, "optimizer.name": "adagrad", "optimizer.lr": 0.01},
}


def measure(config: TrainConfig, num_last: int, is_scaled: bool) -> dict[str, Any]:
    """Metrics after an epoch of whole mini-batches and a last one of `num_last` samples.

    Args:
        config: The configuration.
        num_last: Samples of the last mini-batch; 0: there is none.
        is_scaled: Whether its loss is multiplied by its share of a whole mini-batch.
    """
    source = open_source(config)
    model, optimizers = build_model(config, source)
    loader = BatchLoader(source, "train", config.batch_size, shuffle=True, seed=config.seed)
    for batch in loader:
        is_last = len(batch) < config.batch_size
        if is_last and num_last == 0:
            break
        used = batch.select(torch.arange(min(num_last, len(batch)))) if is_last else batch
        loss, _ = model(used)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss * (len(used) / config.batch_size if is_last and is_scaled else 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = evaluate_split(model, source, "test", config.eval.batch_size).as_dict()
    return {name: found[name] for name in _METRICS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every recipe with every seed and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="a prepared store of Criteo Kaggle's format")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--num-threads", type=int, default=0)
    options = parser.parse_args(arguments)
    set_num_threads(options.num_threads)
    record: dict[str, Any] = {
        "command": f"python docs/benchmarks/last_batch.py {options.store}",
        "environment": describe_environment(),
        "runs": [],
    }
    for (name, recipe), seed in product(_RECIPES.items(), _SEEDS):
        changes = [f"{key}={value}" for key, value in {**recipe, "seed": seed}.items()]
        config = load_config(None, changes, data=options.store)
        run = {"recipe": name, "seed": seed, "none": measure(config, 0, False)}
        for size in _SIZES:
            run[f"{size}"] = measure(config, size, False)
            run[f"{size}-scaled"] = measure(config, size, True)
        record["runs"].append(run)
        write_json(options.json, record)  # a later fault loses nothing


if __name__ == "__main__":
    main()
