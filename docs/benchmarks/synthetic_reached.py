"""Writes the quality that a run on synthetic data reached; `make coverage` calls this.

    python docs/benchmarks/synthetic_reached.py DIR --out FILE

DIR is a run of `recsys train synthetic:criteo-kaggle`. FILE is JSON with its configuration, data
and metrics, without times. `best_auc` is the best possible AUC on the samples of the test split.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.config import load_config
from recsys.datasets import SyntheticCriteo
from recsys.train.parts.build import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the run's record and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    record = json.loads((options.run / "run.json").read_text())
    source = open_source(load_config(options.run / "config.toml"))
    if not isinstance(source, SyntheticCriteo):
        parser.error(f"{options.run} is not a run on synthetic data")
    result = {key: record[key] for key in ("status", "config", "environment", "data", "metrics")}
    result["best_auc"] = source.best_auc(len(source.splits["test"]))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
