"""What journeys share: small raw data, and how runs are compared."""

import json

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

SMALL = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "optimizer.name=adagrad",
    "optimizer.lr=0.1",
    "batch_size=64",
    "num_threads=1",
)
SYNTHETIC = (*SMALL, "synthetic.num_samples=2000", "synthetic.table_sizes=[900, 700, 1, 800]")
NUM_ROWS = 2000


def record_of(run):
    """The record of a run."""
    return json.loads((run / "run.json").read_text())


def history_of(run):
    """The reports and evaluations of a run."""
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def num_lines(run):
    """How many of these there are by now."""
    file = run / "history.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def auc_of(run):
    """The test AUC that a run has recorded."""
    return record_of(run)["metrics"]["test"]["auc"]


def require_equal(found, expected):
    """Require two saved models, files or runs, to be equal to the last bit."""
    ours, theirs = (
        load_file(path / "model.safetensors" if path.is_dir() else path)
        for path in (found, expected)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def auc(labels, scores):
    """The AUC, from its definition; a tie counts half."""
    labels, scores = np.asarray(labels, bool), np.asarray(scores)
    pairs = scores[labels][:, None] - scores[~labels][None]
    return float(((pairs > 0) + (pairs == 0) / 2).mean())


def draw_labels(rng, logits):
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(int)


def criteo_lines(seed):
    """Lines of raw Criteo data whose labels depend on two columns; some fields are empty."""
    rng = np.random.default_rng(seed)
    integers = rng.integers(0, 100, (NUM_ROWS, 13))
    categories = rng.zipf(1.3, (NUM_ROWS, 26)) % 300
    labels = draw_labels(rng, 3 * np.sin(categories[:, :2]).sum(1) + integers[:, 0] / 50 - 1)
    for label, numbers, names in zip(labels, integers, categories, strict=True):
        fields = [*map(str, numbers), *(f"{name:08x}" for name in names)]
        fields[rng.integers(5, 39)] = ""
        yield "\t".join([str(label), *fields])


def clicks(seed):
    """A table of clicks, in order of time, whose labels depend on user, site and tags."""
    rng = np.random.default_rng(seed)
    users, sites = rng.integers(0, 100, NUM_ROWS), rng.integers(0, 8, NUM_ROWS)
    tags = [rng.integers(0, 6, number) for number in rng.integers(0, 4, NUM_ROWS)]
    effects = np.array([np.sin(3 * of_row).sum() for of_row in tags])
    return pa.table(
        {
            "click": draw_labels(rng, 2 * np.sin(users) + 2 * np.sin(sites) + effects),
            "user_id": 1000 + users,
            "time": 1_700_000_000 + 60 * np.arange(NUM_ROWS),
            "site": [f"{'abcdefgh'[site]}.example" for site in sites],
            "price": (rng.random(NUM_ROWS) * 90).round(2),
            "tags": ["|".join(f"tag{tag}" for tag in of_row) for of_row in tags],
        }
    )


def sessions(seed):
    """Clicks in order: of 250 sessions, in which an item mostly tells the next one."""
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, 200, 250)]
    for _ in range(7):
        is_told = rng.random(250) < 0.9
        items.append(np.where(is_told, (3 * items[-1] + 1) % 200, rng.integers(0, 200, 250)))
    return pa.table({"session": np.tile(np.arange(250), 8), "item": np.concatenate(items)})
