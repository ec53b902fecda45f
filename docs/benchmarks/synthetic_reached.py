"""What a run on synthetic data reached, into JSON beside this file; `make coverage` calls it.

    python docs/benchmarks/synthetic_reached.py DIR

DIR is a run of `recsys train synthetic:criteo-kaggle`. Kept are its configuration, data and
metrics, no timings; `best_auc` is that of the whole test part, the samples the model's AUC is of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recsys.build import open_source
from recsys.config import load_config
from recsys.datasets import SyntheticCriteo

_RESULT = Path(__file__).resolve().parent / "synthetic_reached.json"


def main() -> None:
    """Read the run's record and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    record = json.loads((run / "run.json").read_text())
    source = open_source(load_config(run / "config.toml"))
    if not isinstance(source, SyntheticCriteo):
        parser.error(f"{run} is not a run on synthetic data")
    result = {key: record[key] for key in ("status", "config", "environment", "data", "metrics")}
    result["best_auc"] = source.best_auc()
    _RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
