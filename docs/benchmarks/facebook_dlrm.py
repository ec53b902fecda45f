"""Compares the script of facebookresearch/dlrm with a copy that has one added line; writes JSON.

    git clone https://github.com/facebookresearch/dlrm
    pip install scikit-learn tensorboard onnx
    python docs/benchmarks/facebook_dlrm.py dlrm --json docs/benchmarks/facebook_dlrm.json

The cloned script is not changed. A temporary copy in the same folder calls
`recsys.accelerate(dlrm, optimizer=optimizer)` after it makes the optimizer. Both run in turn with
mini-batches of 128, Kaggle's table sizes capped at a million rows, and random data with one id per
table and sample. The result is the ms/it that the script prints. Before that, `recsys.verify`
trains the script's model class for 20 steps: in float32 with each step from the same state, to rtol
1e-5; in float64 as one run, to 1e-9. RWSAdagrad is left out in float64, because its state is always
float32.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import recsys
from recsys._support.machine import describe_environment
from recsys.bench.parts.harness import ratio, rows_by_provider, summarize
from recsys.datasets.criteo.shape import KAGGLE_TABLE_SIZES
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from recsys.bench.parts.harness import Row

_SCRIPT, _CHANGED = "dlrm_s_pytorch.py", "dlrm_s_pytorch_accelerated.py"
_ANCHOR = "    ### main loop ###\n"
_LINE = "    import recsys; print(recsys.accelerate(dlrm, optimizer=optimizer))\n"
_OPTIMIZERS = ("sgd", "adagrad", "rwsadagrad")
_BATCH_SIZE, _NUM_BATCHES, _PRINTED_EVERY = 128, 300, 50
_NUM_UNTIMED = 2  # first printed times to skip: the first iterations load kernels
_MAX_ROWS = 1_000_000
_DIM, _BOTTOM, _TOP = 16, (13, 512, 256, 64, 16), (512, 256, 1)
_NUM_STEPS = 20


def measure(folder: Path, num_runs: int) -> list[Row]:
    """Measure ms/it of the original script and of the copy, in turn."""
    text = (folder / _SCRIPT).read_text()
    if text.count(_ANCHOR) != 1:
        raise SystemExit(
            f"{folder / _SCRIPT} must contain {_ANCHOR.strip()!r} once; is it another version?"
        )
    changed = folder / _CHANGED
    changed.write_text(text.replace(_ANCHOR, _LINE + _ANCHOR))
    rows = []
    try:
        for optimizer in _OPTIMIZERS:
            found: dict[str, list[float]] = {"torch": [], "recsys": []}
            for _ in range(num_runs):
                found["torch"].append(_milliseconds(folder, _SCRIPT, optimizer))
                found["recsys"].append(_milliseconds(folder, _CHANGED, optimizer))
            case = f"B={_BATCH_SIZE},D={_DIM},optimizer={optimizer}"
            rows += rows_by_provider(
                bench="facebook_dlrm", case=case, metric="time", unit="ms", values=found
            )
            rows.append(
                ratio(
                    bench="facebook_dlrm",
                    case=case,
                    provider="recsys",
                    metric="speed_over_torch",
                    values=found["recsys"],
                    baseline=found["torch"],
                )
            )
    finally:
        changed.unlink()
    return rows


def _milliseconds(folder: Path, script: str, optimizer: str) -> float:
    """The mean of the printed times, without the first ones."""
    sizes = "-".join(str(min(size, _MAX_ROWS)) for size in KAGGLE_TABLE_SIZES)
    options = {
        "arch-sparse-feature-size": _DIM,
        "arch-mlp-bot": "-".join(map(str, _BOTTOM)),
        "arch-mlp-top": "-".join(map(str, _TOP)),
        "arch-embedding-size": sizes,
        "data-generation": "random",
        "num-indices-per-lookup": 1,
        "num-indices-per-lookup-fixed": 1,
        "mini-batch-size": _BATCH_SIZE,
        "num-batches": _NUM_BATCHES,
        "print-freq": _PRINTED_EVERY,
        "loss-function": "bce",
        "round-targets": True,
        "learning-rate": 0.1,
        "optimizer": optimizer,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, script, *arguments, "--print-time"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = [float(each) for each in re.findall(r"([0-9.]+) ms/it", done.stdout)]
    if done.returncode or len(printed) <= _NUM_UNTIMED:
        raise SystemExit(f"{script} failed:\n{done.stdout}{done.stderr}")
    return float(np.mean(printed[_NUM_UNTIMED:]))


def compare(folder: Path) -> list[Row]:
    """Compare the script's model class with its accelerated copy: largest errors over tolerance."""
    sys.path.insert(0, str(folder))
    rows = []
    for optimizer in _OPTIMIZERS:
        for dtype in (torch.float32, torch.float64):
            if (optimizer, dtype) == ("rwsadagrad", torch.float64):
                continue
            found = _verify(optimizer, dtype)
            if not found.ok:
                raise SystemExit(str(found))
            errors = [each.largest_error for each in found.comparisons.values()]
            name = str(dtype).removeprefix("torch.")
            rows.append(
                summarize(
                    bench="facebook_dlrm",
                    case=f"B={_BATCH_SIZE},optimizer={optimizer},dtype={name},steps={_NUM_STEPS}",
                    provider="recsys",
                    metric="largest_error_over_tolerance",
                    unit="1",
                    values=[max(errors)],
                )
            )
    return rows


def _verify(optimizer: str, dtype: torch.dtype) -> Any:
    import dlrm_s_pytorch as script  # type: ignore[import-not-found]
    from optim.rwsadagrad import RWSAdagrad  # type: ignore[import-not-found]

    np.random.seed(0)  # noqa: NPY002  # the class draws its weights with numpy
    sizes = [min(size, 20_000) for size in KAGGLE_TABLE_SIZES]
    pairs = len(sizes) * (len(sizes) + 1) // 2
    model: nn.Module = script.DLRM_Net(
        _DIM,
        np.array(sizes),
        np.array(_BOTTOM),
        np.array((pairs + _DIM, *_TOP)),
        arch_interaction_op="dot",
        sigmoid_top=len(_TOP) - 1,
    ).to(dtype)
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rwsadagrad": RWSAdagrad,
    }
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(_NUM_STEPS):
        ids = [torch.randint(0, size, (_BATCH_SIZE,), generator=generator) for size in sizes]
        dense = torch.rand(_BATCH_SIZE, _BOTTOM[0], generator=generator, dtype=dtype)
        labels = torch.rand(_BATCH_SIZE, 1, generator=generator, dtype=dtype).round()
        batches.append((dense, torch.arange(_BATCH_SIZE).expand(len(sizes), -1), ids, labels))

    def loss(model: nn.Module, batch: Sequence[Any]) -> torch.Tensor:
        dense, offsets, ids, labels = batch
        return torch.nn.functional.binary_cross_entropy(model(dense, offsets, ids), labels)

    return recsys.verify(
        model,
        batches,
        loss=loss,
        optimizer=partial(kinds[optimizer], lr=0.1),
        steps=_NUM_STEPS,
    )


def main() -> None:
    """Compare, measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a clone of facebookresearch/dlrm")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--num-runs", type=int, default=6, help="runs of each script")
    options = parser.parse_args()
    folder = options.folder.resolve()
    rows = [*compare(folder), *measure(folder, options.num_runs)]
    record = {
        "command": "python docs/benchmarks/facebook_dlrm.py dlrm",
        "environment": describe_environment(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.json, record)


if __name__ == "__main__":
    main()
