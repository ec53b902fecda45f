"""Exports trained models with float32 and int8 rows, and writes their AUC and size.

    python docs/benchmarks/quantized.py STORE --json docs/benchmarks/quantized.json

STORE is one that `recsys prepare criteo-kaggle` made. Each model is trained with `recsys train`,
exported with `recsys export --to torch-export --quantize int8`, and read from the `recsys.json` in
the program. The recipe is the one of examples/ablation/models_real.toml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.machine import describe_environment
from recsys.train.exports.program_report import ABOUT
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEEDS = (0, 1, 2)
_DIMS = (16, 64, 128)
_RECIPE = {"batch_size": 1024, "optimizer.name": "adagrad", "optimizer.lr": 0.01}


def measure(store: Path, work: Path, dim: int, seed: int) -> dict[str, Any]:
    """Train a model, export it with int8 rows, and return what the program says of itself."""
    changes = {
        **_RECIPE,
        "seed": seed,
        "model.embedding_dim": dim,
        "model.dense_arch": f"[512, 256, {dim}]",
    }
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    run, program = work / f"{dim}-{seed}", work / f"{dim}-{seed}.pt2"
    _recsys("train", store, "--run", run, *settings)
    _recsys("export", run, "--to", "torch-export", "--quantize", "int8", "--out", program)
    extra = {ABOUT: ""}
    torch.export.load(program, extra_files=extra)
    about = json.loads(extra[ABOUT])
    return {
        "embedding_dim": dim,
        "seed": seed,
        "table_bytes": about["table_bytes"],
        "test": about["test"],
    }


def _recsys(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "recsys", *map(str, arguments)], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path, help="a prepared store of Criteo Kaggle's format")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "command": "python docs/benchmarks/quantized.py STORE",
        "environment": describe_environment(),
        "settings": _RECIPE,
        "models": [],
    }
    with tempfile.TemporaryDirectory(prefix="recsys-quantized-") as work:
        for dim, seed in product(_DIMS, _SEEDS):
            record["models"].append(measure(options.store, Path(work), dim, seed))
            write_json(options.json, record)  # a later fault loses nothing


if __name__ == "__main__":
    main()
