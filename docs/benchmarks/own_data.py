"""Trains on tables that are not Criteo's, and writes how good the models are beside simple ones.

    python docs/benchmarks/own_data.py SAMPLES --json docs/benchmarks/own_data.json

Each data set is prepared by its named schema with `recsys prepare table`, trained with `recsys
train`, and read from `run.json`, over three seeds. SAMPLES has these files:

    avazu_10k/train.csv.gz                         first rows of Kaggle's Avazu challenge
    movielens_1m_implicit/ml1m_implicit.parquet    MovieLens 1M as pairs
    gowalla/gowalla.parquet                        Gowalla check-ins as pairs
    session_clicks/NAME.parquet                    clicks of sessions in order

Clicks on ads are compared with logistic regression on the same columns, one-hot; its regularization
is chosen on the validation part. Rankings are compared with popularity. Settings of training were
chosen by hand on the validation parts of Avazu, MovieLens and Gowalla; all rankings share theirs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from recsys._support.machine import describe_environment
from recsys.datasets import Store
from recsys.train.metrics.metrics import evaluate_logits
from recsys.train.run_files.run_folder import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEEDS = (0, 1, 2)
_REGULARIZATION = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # sklearn's C
_CLICKS = {
    "batch_size": 128,
    "optimizer.name": "adagrad",
    "optimizer.lr": 0.01,
}
_RANKING = {
    "batch_size": 2048,
    "epochs": 4,
    "optimizer.name": "rowwise_adagrad",
    "optimizer.lr": 0.05,
    "model.embedding_dim": 64,
    "model.dense_arch": "[64]",
    "model.over_arch": "[16,1]",
    "eval.every_steps": 1_000_000,  # at the end alone
}
# By data set: the file, the named schema, and settings of training.
_DATA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "avazu": ("avazu_10k/train.csv.gz", "avazu", _CLICKS),
    "movielens": ("movielens_1m_implicit/ml1m_implicit.parquet", "movielens", _RANKING),
    "gowalla": ("gowalla/gowalla.parquet", "gowalla", _RANKING),
    **{
        name: (f"session_clicks/{name}.parquet", "session_clicks", _RANKING)
        for name in ("diginetica", "tmall", "nowplaying", "retailrocket")
    },
}


def measure(samples: Path, work: Path, name: str) -> dict[str, Any]:
    """Prepare a data set, train on it, and compare the models with a simple one."""
    file, schema, settings = _DATA[name]
    options = ["--schema", schema, "--out", name]
    _recsys(work, "prepare", "table", samples / file, *options)
    runs = []
    for seed in _SEEDS:
        changes = [f"{key}={value}" for key, value in {**settings, "seed": seed}.items()]
        options = [option for change in changes for option in ("--set", change)]
        _recsys(work, "train", name, "--run", f"{name}-{seed}", *options)
        record = read_json(work / f"{name}-{seed}" / "run.json")
        runs.append({key: record[key] for key in ("config", "data", "metrics", "throughput")})
    found: dict[str, Any] = {"name": name, "schema": schema, "settings": settings, "runs": runs}
    if schema == "avazu":
        found["logistic_regression"] = logistic_regression(Store(work / name))
    return found


def logistic_regression(store: Store) -> dict[str, Any]:
    """Metrics on the test part of a logistic regression on one-hot columns."""
    sizes = np.array(list(store.table_sizes.values()))
    ends = np.cumsum(sizes)
    parts = {}
    for split, numbers in store.splits.items():
        rows = store.sparse[numbers.start : numbers.stop] + (ends - sizes)
        places = np.arange(0, rows.size + 1, rows.shape[1])
        ones = np.ones(rows.size, np.float32)
        matrix = csr_matrix((ones, rows.ravel(), places), (len(rows), int(ends[-1])))
        parts[split] = (matrix, store.labels[numbers.start : numbers.stop])
    models = {}
    for strength in _REGULARIZATION:
        model = LogisticRegression(C=strength, max_iter=1000).fit(*parts["train"])
        logits, labels = model.decision_function(parts["validation"][0]), parts["validation"][1]
        models[strength] = (evaluate_logits(logits.astype(np.float32), labels).logloss, model)
    strength = min(models, key=lambda each: models[each][0])
    logits = models[strength][1].decision_function(parts["test"][0])
    metrics = evaluate_logits(logits.astype(np.float32), parts["test"][1])
    return {"C": strength, "metrics": {"test": metrics.as_dict()}}


def _recsys(folder: Path, *arguments: object) -> None:
    """Run a command in a folder, so that records name files without their path."""
    command = [sys.executable, "-m", "recsys", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all data sets and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("samples", type=Path, help="the folder of the data sets")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(_DATA), default=list(_DATA))
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "command": "python docs/benchmarks/own_data.py SAMPLES",
        "environment": describe_environment(),
        "data_sets": [],
    }
    with tempfile.TemporaryDirectory(prefix="recsys-own-data-") as work:
        for name in options.only:
            record["data_sets"].append(measure(options.samples.resolve(), Path(work), name))
            write_json(options.json, record)  # a later fault loses nothing


if __name__ == "__main__":
    main()
