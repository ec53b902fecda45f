"""Trains a DLRM on one process and on several, and writes the AUC of both, over ten seeds.

    python docs/benchmarks/several_processes.py STORE --json docs/benchmarks/several_processes.json

STORE is a store of the real Criteo sample. The recipe is that of
examples/ablation/models_real.toml, with a budget.
Every process has one thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys._support.machine import describe_environment
from recsys.train.run_files.run_folder import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEEDS = range(10)
_SETTINGS = (
    "batch_size=1024",
    "optimizer.name=adagrad",
    "optimizer.lr=0.01",
    "num_threads=1",
    "budget=24MiB",
    "save_model=false",
)


def measure(store: Path, work: Path, num_processes: int, seed: int) -> dict[str, Any]:
    """Train once, and read the record of the run."""
    run = work / f"{num_processes}-{seed}"
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_processes)]
    settings = [option for each in (*_SETTINGS, f"seed={seed}") for option in ("--set", each)]
    arguments = ["recsys", "train", str(store), "--run", str(run), *settings]
    separator = ["--"] if num_processes > 1 else []
    subprocess.run([*launcher, "-m", *separator, *arguments], check=True)
    record = read_json(run / "run.json")
    record["config"]["data"] = record["data"]["name"] = "criteo_kaggle_137k"
    kept = ("config", "data", "environment", "metrics", "processes", "tiers")
    return {"num_processes": num_processes, "seed": seed, **{key: record[key] for key in kept}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all runs and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "command": "python docs/benchmarks/several_processes.py STORE",
        "environment": describe_environment(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="recsys-several-processes-") as work:
        for seed in _SEEDS:
            for num_processes in (1, 2):
                store = options.store.resolve()
                record["runs"].append(measure(store, Path(work), num_processes, seed))
                write_json(options.json, record)  # a later fault loses nothing


if __name__ == "__main__":
    main()
