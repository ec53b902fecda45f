"""Trains the public DLRM recipe on Criteo Kaggle, from the raw file to the AUC, in Python.

    python examples/train_criteo.py path/to/train.txt.gz    # or nothing, for synthetic samples

The same as `make train`. A raw file is prepared once, and again when it has changed; its store lies
beside the runs. `--adagrad` is the second recipe of docs/benchmarks.md: Adagrad 0.01, B=1024.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.config import OptimizerConfig, SyntheticConfig, TrainConfig
from recsys.datasets import prepare_criteo_kaggle
from recsys.train import train

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", nargs="?", type=Path, help="train.txt or .gz of the challenge")
    parser.add_argument(
        "--out", type=Path, default=Path("criteo"), help="folder for stores and runs"
    )
    parser.add_argument("--samples", type=int, default=1_000_000, help="synthetic samples")
    parser.add_argument("--adagrad", action="store_true")
    parser.add_argument("--budget", default="", help="fast memory for rows, such as 256MiB")
    options = parser.parse_args(arguments)

    data = "synthetic:criteo-kaggle"
    if options.raw is not None:
        data = str(options.out / store_name(options.raw))
        if not Path(data).exists():
            prepare_criteo_kaggle([options.raw], data)
    optimizer = OptimizerConfig(name="sgd", lr=0.1)
    if options.adagrad:
        optimizer = OptimizerConfig(name="adagrad", lr=0.01)
    config = TrainConfig(  # what is not said is the recipe: D=16, its MLPs, one epoch
        data=data,
        optimizer=optimizer,
        batch_size=1024 if options.adagrad else 128,
        budget=options.budget,
        synthetic=SyntheticConfig(num_samples=options.samples),
    )

    options.out.mkdir(parents=True, exist_ok=True)
    run = Path(tempfile.mkdtemp(prefix="run-", dir=options.out))  # each run has a folder of its own
    record = train(config, run)

    test = record["metrics"]["test"]
    print(f"test AUC {test['auc']:.4f} (standard error {test['auc_standard_error']:.4f})")
    print(f"test logloss {test['logloss']:.4f}")
    print(f"{record['throughput']['samples_per_second']:,.0f} samples/s in training")
    print(f"saved in {run}")


def store_name(raw: Path) -> str:
    """Of the store of a raw file: another one for another file, or a later version of it."""
    version = f"{raw.resolve()} {raw.stat().st_size} {raw.stat().st_mtime_ns}"
    return f"{raw.name}-{zlib.crc32(version.encode()):08x}"


if __name__ == "__main__":
    main()
