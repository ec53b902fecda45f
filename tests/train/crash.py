"""Kills a training run with SIGKILL again and again, and compares its model with an unkilled one's.

    python tests/train/crash.py --json benchmarks/results/crash.json     ten runs, twenty kills each

Half of the kills come at a random moment. The others wait for a piece of a checkpoint to appear,
and come up to 30 ms later, while it is being written. Each attempt after the first is `recsys train
--resume`. A run whose schedule keeps the sums of a plain run must end with its model to the last
bit; the others (Hotline, Auto's choice by time) within float32's summation order.

Processes are forked from one that has imported everything and started no thread, so an attempt
begins in milliseconds.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # torch imports it for the first optimizer
from safetensors.torch import load_file

import recsys.cli
from recsys.train import train  # noqa: F401  # imports what a run needs
from tests.records import write_record
from tests.train.checkpoint.trainings import manifest_of, newest, numbers_of

SETTINGS = {
    "synthetic.num_samples": 60_000,
    "synthetic.table_sizes": [5000, 300, 40] * 8 + [20_000, 7],
    "model.embedding_dim": 4,
    "model.dense_arch": [8, 4],
    "model.over_arch": [8, 1],
    "batch_size": 64,
    "optimizer.name": "adagrad",
    "optimizer.lr": 0.05,
    "eval.max_samples": 500,
    "eval.every_steps": 200,
    "checkpoint.every_steps": 9,
    "checkpoint.every_seconds": 0,
    "num_threads": 1,
}
BUDGET = "600KiB"
# Of the ten runs: tier, schedule, depth, and whether the model is equal to the last bit.
RUNS = [
    ("host", "lookahead", 2, True),
    ("resident", "sequential", 0, True),
    ("host", "sequential", 0, True),
    ("host", "hotline", 0, False),
    ("host", "fae", 0, True),
    ("host", "auto", 0, False),
    ("file", "sequential", 0, True),
    ("file", "lookahead", 2, True),
    ("file", "hotline", 0, False),
    ("file", "fae", 0, True),
]


def arguments(folder: Path, tier: str, schedule: str, depth: int, num_samples: int) -> list[str]:
    settings: dict[str, Any] = SETTINGS | {"synthetic.num_samples": num_samples}
    if tier != "resident":
        settings |= {"budget": BUDGET, "cold_tier": tier, "schedule": schedule}
        if depth:
            settings["schedule.lookahead.depth"] = depth
        if schedule == "hotline":
            settings["schedule.hotline.learning_share"] = 0.05
        if schedule in ("hotline", "auto"):
            # Adagrad divides a first gradient by its own size. So one near zero moves a number by
            # the whole rate, up or down as floats are summed, and such runs may part.
            settings |= {"optimizer.name": "sgd", "optimizer.lr": 0.1}
    words = ["train", "synthetic:criteo-kaggle", "--run", str(folder)]
    for key, value in settings.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def attempt(words: list[str], log: Path) -> None:
    """Body of a process: one `recsys train`."""
    os.setpgrp()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os._exit(recsys.cli.main(words))


def pieces(folder: Path) -> set[str]:
    """Folders of pieces that are there now."""
    try:
        return {path.name for path in folder.iterdir() if path.name.startswith(("full", "delta"))}
    except FileNotFoundError:
        return set()


def written_at_kill(folder: Path) -> set[str]:
    """Kinds of the pieces that no checkpoint has: the kill came while they were written."""
    known = {name for each in numbers_of(folder) for name in manifest_of(folder, each)["pieces"]}
    return {name.partition("-")[0] for name in pieces(folder) - known}


def kill_again_and_again(words: list[str], folder: Path, num_kills: int, chance: random.Random):
    """Run, kill, resume; returns what the kills hit."""
    fork = multiprocessing.get_context("fork")
    saved, log = folder / "checkpoints", folder.with_suffix(".log")
    counts = {"kills": 0, "after_first_checkpoint": 0, "during_full": 0, "during_delta": 0}
    last = 0
    while True:
        more = ["--resume"] if folder.exists() else []
        process = fork.Process(target=attempt, args=([*words, *more], log))
        process.start()
        if counts["kills"] < num_kills:
            # Attempts after the first fifth get past their checkpoint, so that the run ends.
            may_be_early = counts["kills"] < num_kills // 5
            while process.is_alive() and not is_past(saved, last, may_be_early=may_be_early):
                time.sleep(0.002)
            before = pieces(saved)
            if counts["kills"] % 2:
                end = time.monotonic() + 2
                while process.is_alive() and not pieces(saved) - before:
                    time.sleep(0.0005)
                    if time.monotonic() > end:
                        break
                time.sleep(chance.uniform(0, 0.03))
            else:
                time.sleep(chance.uniform(0, 0.3))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            counts["kills"] += 1
            found = newest(saved)
            counts["after_first_checkpoint"] += found is not None
            last = found or 0
            for kind in written_at_kill(saved):
                counts[f"during_{kind}"] += 1
            continue
        if process.exitcode != 0:
            raise AssertionError(f"exit code {process.exitcode}:\n{log.read_text()[-3000:]}")
        return counts


def is_past(saved: Path, last: int, *, may_be_early: bool) -> bool:
    """Whether there is a checkpoint newer than `last`; with `may_be_early`, by chance before it."""
    found = newest(saved)
    return (found is not None and found > last) or (may_be_early and random.random() < 0.003)


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of two saved models, relative to the larger number or 1."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    most = 0.0
    for name, values in first.items():
        scale = values.abs().clamp(min=1)
        most = max(most, float(((values - second[name]).abs() / scale).max()))
    return most


def steps_of(folder: Path) -> list[tuple[int, int]]:
    """Steps and samples of the reports in the history; each must come once, in order."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [(line["step"], line["num_samples"]) for line in lines if "train_loss" in line]


def crash(
    folder: Path, run: tuple[str, str, int, int], num_kills: int, seed: int
) -> dict[str, Any]:
    """One run with kills, beside one without.

    Args:
        folder: Is made, and removed at the end.
        run: Tier, schedule, depth and number of samples.
        num_kills: How often it is killed.
        seed: Of the moments.
    """
    folder.mkdir()
    plain, killed = folder / "plain", folder / "killed"
    fork = multiprocessing.get_context("fork")
    begin = time.monotonic()
    reference = fork.Process(target=attempt, args=(arguments(plain, *run), folder / "plain.log"))
    reference.start()
    reference.join()
    if reference.exitcode:
        raise AssertionError((folder / "plain.log").read_text()[-3000:])
    counts = kill_again_and_again(arguments(killed, *run), killed, num_kills, random.Random(seed))
    found = {
        "tier": run[0],
        "schedule": run[1],
        **counts,
        "difference": largest_difference(plain, killed),
        "is_history_equal": steps_of(plain) == steps_of(killed),
        "seconds": time.monotonic() - begin,
    }
    shutil.rmtree(folder)
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=len(RUNS), help="the first so many of them")
    parser.add_argument("--samples", type=int, default=SETTINGS["synthetic.num_samples"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    all_found = []
    for seed, (tier, schedule, depth, is_exact) in enumerate(RUNS[: options.runs]):
        with tempfile.TemporaryDirectory() as folder:
            run = tier, schedule, depth, options.samples
            found = crash(Path(folder) / "run", run, options.kills, seed)
        found["is_exact_promised"] = is_exact
        all_found.append(found)
        sys.stderr.write(f"{found}\n")
        is_equal = found["difference"] == 0 if is_exact else found["difference"] < 1e-4
        if not is_equal or not found["is_history_equal"]:
            raise AssertionError(f"differs: {found}")
    if options.json is not None:
        settings = SETTINGS | {"synthetic.num_samples": options.samples}
        write_record(options.json, "make crash", settings=settings, runs=all_found)


if __name__ == "__main__":
    main()
