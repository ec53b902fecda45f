"""The losses of `examples/frameworks`, plain and on a budget, and by how much they differ.

A framework that is not installed is left out, by name. An example is named after its framework.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from turns import bench_arguments, rows_by_provider, show_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turns import Row

_FOLDER = Path(__file__).resolve().parents[1] / "examples" / "frameworks"
_BUDGET = "128KiB"
_PACKAGES = {  # of each example
    "plain_loop": "torch",
    "lightning_fit": "lightning",
    "hf_accelerate": "accelerate",
    "torchrec_dlrm": "torchrec",
    "deepctr_fit": "deepctr-torch",
}


def bench_frameworks() -> Iterator[Row]:
    """Run every example without recsys, and on a budget."""
    for example, package in _PACKAGES.items():
        try:
            framework = f"{package} {version(package)}"
        except PackageNotFoundError:
            print(f"{example}: left out, because {package} is not installed", file=sys.stderr)
            continue
        train = import_module(example).train
        plain, ours = train(None), train(_BUDGET)
        largest = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
        case = f"example={example},framework={framework},budget={_BUDGET},steps={len(plain)}"
        rows = partial(rows_by_provider, "frameworks", case, unit="1")
        yield from rows("last_loss", values={"plain": plain[-1:], "recsys": ours[-1:]})
        yield from rows("largest_difference", values={"recsys": [largest]})


def main() -> None:
    """Run it from the command line."""
    options = bench_arguments(__doc__).parse_args()
    sys.path.insert(0, str(_FOLDER))
    show_rows(bench_frameworks(), options)


if __name__ == "__main__":
    main()
