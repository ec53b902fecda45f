"""What tests of runs share: short runs that are stopped, continued, evaluated and compared."""

import json
import pkgutil
import signal
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file

from recsys.train import Callback, train
from tests.commands import recsys
from tests.train.checkpoint.trainings import manifest_of, newest, require_equal

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
CASES = {
    "resident": (),
    "sequential": (*TIERED, "schedule=sequential"),
    "lookahead": (*TIERED, "schedule.lookahead.depth=4"),
    "file": (*TIERED, "cold_tier=file"),
    "rates": ("lr_schedule.warmup_steps=9", "lr_schedule.decay=cosine", "eval.every_steps=5"),
    "adam": (*TIERED, "optimizer.name=adam", "optimizer.lr=0.01"),
    "permuted": ("permutation_seed=1", "seed=3"),
    "torch": ("embeddings=torch",),
    "auto": (*TIERED, "batch_size=32", "schedule=auto"),
    "fae": ("schedule=fae", "budget=20KiB", "batch_size=64", "schedule.fae.rate=20"),
}


class Killed(BaseException):
    """As a kill: no code of the run expects it."""


def kill(*_, **__):
    raise Killed


class Stops(Callback):
    """Stops runs at their reports after these steps, each in turn: by a signal, or `Killed`."""

    left = ()

    def on_report(self, report):
        while self.left and report["step"] >= self.left[0][0]:
            (_, what), *self.left = self.left
            if what is None:
                raise Killed
            signal.raise_signal(what)


STOPS = Stops()


@pytest.fixture
def stop_at():
    """Stops runs after these steps, each in turn: by a signal, or as a kill for None."""

    def plan(*stops):
        STOPS.left = stops

    yield plan
    STOPS.left = ()


def run(config, folder, *, callbacks=(), **options):
    return train(config, folder, show_progress=False, callbacks=[*callbacks, STOPS], **options)


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


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def load_model(folder):
    return load_file(folder / "model.safetensors")


def history(folder):
    """The lines of the history, without times."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def evaluated(folder, *options):
    """The metrics of the saved model, by `recsys evaluate`."""
    file = folder.with_name(f"{folder.name}-metrics.json")
    recsys("evaluate", folder, *options, "--json", file)
    return json.loads(file.read_text())["metrics"]


def rows_of(checkpoints, pieces):
    """By array and number, the rows that the pieces of a checkpoint have and that are not zero."""
    found = defaultdict(dict)
    for block in (file for name in pieces for file in sorted((checkpoints / name).glob("block*"))):
        tensors = load_file(block)
        for key, numbers in tensors.items():
            for name in (key.removesuffix(".rows"),) if key.endswith(".rows") else ():
                for array in (each for each in tensors if each.split("/")[0] == name):
                    rows = tensors[array]
                    first = int(numbers[0])
                    places = range(first, first + len(rows)) if len(numbers) == 1 else numbers
                    found[array] |= dict(zip(map(int, places), rows, strict=True))
    return {
        array: {number: row for number, row in rows.items() if row.any()}
        for array, rows in found.items()
    }


def last_state(folder):
    """Rows, optimizers and state of the newest checkpoint of a run, read from its files."""
    saved = folder / "checkpoints"
    number = newest(saved)
    state = torch.load(saved / f"delta-{number:08}" / "state.pt", weights_only=True)
    rows = rows_of(saved, manifest_of(saved, number)["pieces"])
    return rows, state["optimizers"], state["state"]["state"]


def require_same_run(found, expected, *, has_checkpoints=True):
    """Require two runs to have the same model, history and last checkpoint."""
    require_equal(load_model(found), load_model(expected))
    assert history(found) == history(expected)
    if not has_checkpoints:
        return
    (*ours, state), (*theirs, expected_state) = (last_state(each) for each in (found, expected))
    require_equal(ours, theirs)
    for part in ("loader", "progress"):
        require_equal(state[part], expected_state[part])


def before_each(monkeypatch, name, act):
    """Call `act` with the arguments of each call of a function of the run, before it."""
    function = pkgutil.resolve_name(name)

    def call(*arguments, **options):
        act(*arguments, **options)
        return function(*arguments, **options)

    monkeypatch.setattr(name.replace(":", "."), call)
