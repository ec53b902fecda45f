"""What tests of resumed runs share: short runs that are stopped, continued and compared."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from recsys.config import replace
from recsys.train.build import build_model, choose_plan, open_source
from recsys.train.checkpoint import load_checkpoint
from recsys.train.progress import Progress
from recsys.train.trainer import train

TIMES = ("train_seconds", "samples_per_second")
# 15 steps an epoch; a report every step, so each checkpoint is between two reports or at one.
SETTINGS = (
    "synthetic.num_samples=1050",
    "synthetic.table_sizes=[900, 700, 1, 800]",
    "batch_size=64",
    "epochs=2",
    "optimizer.name=adagrad",
    "checkpoint.every_steps=4",
    "checkpoint.every_seconds=0",
    "num_threads=1",
)
TIERED = ("budget=24KiB", "batch_size=64")


class Killed(BaseException):
    """As a kill: no code of the run expects it."""


@pytest.fixture
def stop_at(monkeypatch):
    """Stops runs after these steps, each in turn; a signal, or `Killed` for None."""

    def plan(*stops):
        add, left = Progress.add, list(stops)

        def add_and_stop(progress, *step):
            add(progress, *step)
            if left and progress.num_steps == left[0][0]:
                what = left.pop(0)[1]
                if what is None:
                    raise Killed
                signal.raise_signal(what)

        monkeypatch.setattr(Progress, "add", add_and_stop)

    return plan


def run(config, folder, **options):
    return train(config, folder, show_progress=False, **options)


def run_and_resume(config, folder, stops, stop_at, *changed):
    """Until it is finished, with one of the other configurations after each stop, if there are."""
    stop_at(*stops)
    configs = [config, *changed] if changed else [config] * (1 + len(stops))
    for number, each in enumerate(configs):
        try:
            record = run(each, folder, resume=number > 0)
        except Killed:
            continue
    assert record["status"] == "finished"
    return record


def history(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def last_state(config, folder):
    """The optimizers' state and the run's, in the last checkpoint."""
    config = replace(config, cold_tier="host", cold_path="")
    source = open_source(config)
    model, optimizers = build_model(config, source, choose_plan(config, source))
    state = load_checkpoint(folder / "checkpoints", model=model.model, optimizers=optimizers)
    return [optimizer.state_dict() for optimizer in optimizers], state


def require_same(found, expected, place=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            require_same(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            require_same(found[number], value, f"{place}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), place
    else:
        assert found == expected, place


def require_same_run(config, found, expected, *, has_checkpoints=True):
    require_same(load_file(found / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert history(found) == history(expected)
    if not has_checkpoints:
        return
    (optimizers, state), (expected_optimizers, expected_state) = (
        last_state(config, folder) for folder in (found, expected)
    )
    require_same(optimizers, expected_optimizers)
    require_same(state["loader"], expected_state["loader"])
    require_same(state["progress"], expected_state["progress"])


CASES = {
    "resident": (),
    "sequential": (*TIERED, "schedule=sequential"),
    "lookahead": (*TIERED, "schedule.lookahead.depth=4"),
    "file": (*TIERED, "cold_tier=file"),
    "rates": ("lr_schedule.warmup_steps=9", "lr_schedule.decay=cosine", "eval.every_steps=5"),
    "adam": (*TIERED, "optimizer.name=adam", "optimizer.lr=0.01"),
    "rowwise": (*TIERED, "optimizer.name=rowwise_adagrad"),
    "permuted": ("permutation_seed=1", "seed=3"),
    "torch": ("embeddings=torch",),
    "auto": (*TIERED, "batch_size=32", "schedule=auto"),
    "fae": ("schedule=fae", "budget=20KiB", "batch_size=64", "schedule.fae.rate=20"),
    "fae at a fixed rate": (
        *("schedule=fae", "budget=20KiB", "batch_size=64"),
        "schedule.fae.adaptive=false",
    ),
}
