"""Runs examples/frameworks without recsys and on a budget, and compares their losses.

    python docs/benchmarks/frameworks.py --json docs/benchmarks/frameworks.json

A framework that is not installed is left out, by name.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recsys._support.machine import describe_environment
from recsys.train.run_files.run_folder import write_json

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
_BUDGET = "128KiB"
_EXAMPLES = {  # the example, and the package that it needs
    "plain_loop": "torch",
    "lightning_fit": "lightning",
    "hf_accelerate": "accelerate",
    "torchrec_dlrm": "torchrec",
    "deepctr_fit": "deepctr-torch",
}


def compare(example: str) -> dict[str, Any]:
    """The last losses of an example, and the largest difference of any two."""
    train = import_module(example).train
    plain, tiered = train(None), train(_BUDGET)
    return {
        "num_losses": len(plain),
        "last_loss": plain[-1],
        "last_loss_with_recsys": tiered[-1],
        "largest_difference": max(abs(a - b) for a, b in zip(plain, tiered, strict=True)),
    }


def main() -> None:
    """Write what `compare` finds for every framework that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    sys.path.insert(0, str(_FOLDER))
    rows: list[dict[str, Any]] = []
    for example, package in _EXAMPLES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            sys.stderr.write(f"{example}: left out, because {package} is not installed\n")
            continue
        rows.append({"example": example, "package": package, "version": found} | compare(example))
    record = {
        "command": f"python docs/benchmarks/frameworks.py --json {path}",
        "environment": describe_environment(),
        "budget": _BUDGET,
        "rows": rows,
    }
    write_json(path, record)


if __name__ == "__main__":
    main()
