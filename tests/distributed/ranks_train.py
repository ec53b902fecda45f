"""Runs of `recsys train` on the ranks of the tests."""

import errno
import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_cases import error_of

from recsys.config import load_config
from recsys.datasets import SyntheticCriteo
from recsys.train import Callback, train

SETTINGS = (
    "synthetic.num_samples=1600",  # 22 steps an epoch
    # The third has fewer rows than there are ranks.
    "synthetic.table_sizes=[100,2000,1,60,7,8,50,30,3,90,80,70,60,50,40,30,20,10,50,40,30,20,10,9,8,7]",
    "batch_size=64",
    "optimizer.name=adagrad",
    "optimizer.lr=0.02",
    "model.embedding_dim=8",
    "model.dense_arch=[16,8]",
    "model.over_arch=[16,1]",
    "num_threads=1",
    "checkpoint.every_seconds=0",
)


class Wide(torch.nn.Module):
    """A linear model of all vectors side by side."""

    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.linear = torch.nn.Linear(8 * len(embeddings.output_keys()), 1)

    def forward(self, batch):
        return self.linear(self.embeddings(batch.sparse_features).values())


class Dropping(Wide):
    """As `Wide`, with dropout: each process draws as many numbers as it has samples."""

    def forward(self, batch):
        vectors = self.embeddings(batch.sparse_features).values()
        return self.linear(torch.nn.functional.dropout(vectors, training=self.training))


def run_training(
    run, settings=(), resume=False, checkpoint=None, base=SETTINGS, data="synthetic:criteo-kaggle"
):
    """Trains a run; returns what its record has of it."""
    config = load_config(None, [*base, *settings], data=data)
    record = train(config, run, resume=resume, checkpoint=checkpoint, show_progress=False)
    kept = ("status", "metrics", "processes", "tiers", "schedule", "resumed")
    return {key: record[key] for key in kept} | {"num_steps": record["throughput"]["num_steps"]}


def trains_a_run(rank, world, **arguments):
    found = run_training(**arguments)
    dist.barrier()  # the first rank has written the files
    return found


class Stops(Callback):
    """Asks to end training after the evaluation at a step, or raises an error at a report."""

    def __init__(self, stop=None, fail=None):
        self.stop, self.fail, self.calls = stop, fail, []

    def on_report(self, report):
        if report["step"] == self.fail:
            raise KeyError("a callback")

    def on_validation_end(self, evaluation):
        self.calls.append(evaluation["step"])
        return evaluation["step"] == self.stop


def has_callbacks(rank, world, run, settings, resume=False, given=None, **options):
    """Trains with a callback on one rank, or on all.

    Args:
        given: The rank that has it; None for all.
        options: Of `Stops`.
    """
    config = load_config(None, [*SETTINGS, *settings], data="synthetic:criteo-kaggle")
    callback = Stops(**options)
    callbacks = [callback] if given in (rank, None) else []
    record = train(config, run, resume=resume, callbacks=callbacks, show_progress=False)
    dist.barrier()
    return {
        "calls": callback.calls,
        "num_steps": record["throughput"]["num_steps"],
        "metrics": record["metrics"],
        "stopped_early": record["stopped_early"],
    }


def is_given_others(rank, world, of_last, **arguments):
    """What each rank says if the last one is given other arguments of `run_training`."""
    if rank == world - 1:
        arguments |= of_last
    return error_of(lambda: run_training(**arguments))


def writes_to_two_folders(rank, world, runs):
    """Trains with a run folder for each rank."""
    run_training(runs[rank], ["checkpoint.every_steps=9"])


def has_other_data(rank, world, run):
    """What each rank says if the data of the last one, under the same name, is other data."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(SyntheticCriteo, "fingerprint", "other")
        return error_of(lambda: run_training(run))


def loses_a_checkpoint(rank, world, run, cut_rank, **arguments):
    """As `trains_a_run`, but the newest checkpoint is gone, as after a crash of one rank."""
    folder = Path(run) / "checkpoints"
    if rank == cut_rank:
        newest = max(folder.glob("0*.json"))
        newest.unlink()
        (folder / f"delta-{newest.stem}-1" / "piece.json").unlink()
    dist.barrier()
    return trains_a_run(rank, world, run=run, **arguments)


@contextmanager
def one_changed_sample(change):
    """Change the mini-batch that has sample 1000, given the mini-batch and the sample's place."""
    read = SyntheticCriteo.read

    def reads(source, samples):
        batch = read(source, samples)
        for place in (samples == 1000).nonzero()[0].tolist():
            change(batch, place)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyntheticCriteo, "read", reads)
        yield


def has_a_bad_id(rank, world, run):
    """An id of one sample is invalid; its mini-batch is taken ahead."""

    def change(batch, place):
        batch.sparse_features.values()[place] = 10**6

    with one_changed_sample(change):
        run_training(run, ["budget=60KiB", "eval.every_steps=40"])


def has_a_bad_number(rank, world, run):
    """The error if a dense feature of one sample is nan, the record, and what was warned of."""

    def change(batch, place):
        batch.dense_features[place, 5] = float("nan")

    with one_changed_sample(change), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        error = error_of(
            lambda: run_training(run, ["eval.every_steps=999", "schedule.lookahead.depth=2"])
        )
    dist.barrier()
    record = json.loads((Path(run) / "run.json").read_text())
    return {
        "error": error,
        "record": {key: record[key] for key in ("status", "metrics")},
        "num_steps": record["throughput"]["num_steps"],
        "warnings": [str(each.message) for each in seen if each.category is UserWarning],
    }


def has_full_disks(rank, world, failing, **arguments):
    """As `trains_a_run`, but each rank cannot write the checkpoints with some numbers.

    Args:
        failing: The first number, and the one after the last, by rank.
    """
    replace, (begin, end) = os.replace, failing[rank]

    def fails(old, new):
        folder = Path(new).parent.name
        if Path(new).name == "piece.json" and begin <= int(folder.split("-")[1]) < end:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", fails)
        return trains_a_run(rank, world, **arguments)
