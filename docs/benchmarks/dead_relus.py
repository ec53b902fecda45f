"""Counts dead ReLUs at the end of the bottom MLP, early in the runs of slipstream_goal*.toml.

    python docs/benchmarks/dead_relus.py --json docs/benchmarks/dead_relus.json

A ReLU is dead if it is 0 for every sample of a mini-batch. Models are trained without skipping, as
those configurations say, for some steps only: with the tables of recsys and of PyTorch, and with
learning rates that rise at first.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recsys._support.machine import describe_environment, set_num_threads
from recsys.ablate.config import load_ablation
from recsys.datasets.loader import BatchLoader
from recsys.train.parts.build import build_model, open_source
from recsys.train.parts.learning_rates import build_schedulers
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.config import TrainConfig

_EXAMPLES = Path(__file__).parents[2] / "examples" / "ablation"
_SEEDS = (10, 14, 20, 22)  # 14 and 22 end at an AUC of 0.726 without skipping
_STEPS = (0, 20, 120)
# Changes of the configuration.
_CASES: Final[dict[str, dict[str, Any]]] = {
    "recsys": {},
    "torch": {"embeddings": "torch"},
    "recsys, warm-up": {"warmup_steps": 100},
}


def count(config: TrainConfig) -> dict[str, int]:
    """Dead ReLUs after some steps, by the number of steps."""
    source = open_source(config)
    model, optimizers = build_model(config, source)
    loader = BatchLoader(source, "train", config.batch_size, shuffle=config.shuffle)
    schedulers = build_schedulers(config.lr_schedule, optimizers, len(loader))
    seen: list[Tensor] = []
    bottom: Any = model.model.dense_arch
    hook = bottom.register_forward_hook(lambda _, __, output: seen.append(output))
    found = {}
    for step, batch in enumerate(loader):
        loss, _ = model(batch)
        if step in _STEPS:
            found[str(step)] = int((seen[-1] <= 0).all(0).sum())
        if step == _STEPS[-1]:
            hook.remove()
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        seen.clear()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Count for some seeds and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--num-threads", type=int, default=0)
    options = parser.parse_args(arguments)
    set_num_threads(options.num_threads)
    record: dict[str, Any] = {
        "command": "python docs/benchmarks/dead_relus.py",
        "environment": describe_environment(),
        "runs": [],
    }
    for name in ("slipstream_goal", "slipstream_goal_35"):
        for cell in load_ablation(_EXAMPLES / f"{name}.toml").cells():
            if cell.variation != "none" or cell.seed not in _SEEDS:
                continue
            run: dict[str, Any] = {"seed": cell.seed, "width": cell.config.model.embedding_dim}
            for case, changes in _CASES.items():
                config = cell.config
                if "warmup_steps" in changes:
                    config = replace(config, lr_schedule=replace(config.lr_schedule, **changes))
                else:
                    config = replace(config, **changes)
                run[case] = count(config)
                gc.collect()  # tables of 2 GB, which hold on to each other
            record["runs"].append(run)
            write_json(options.json, record)  # a later fault loses nothing


if __name__ == "__main__":
    main()
