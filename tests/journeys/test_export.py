"""Journey 5: a trained model leaves as tensors, as a program, and as what has changed."""

import json

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors import safe_open

from recsys.datasets import Store
from tests.commands import options, recsys
from tests.journeys.journey import NUM_ROWS, SMALL, SYNTHETIC, criteo_lines, require_equal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store of Criteo data and a run on it."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "raw.txt").write_text("\n".join(criteo_lines(0)) + "\n")
    store, run = folder / "store", folder / "run"
    recsys("prepare", "criteo-kaggle", folder / "raw.txt", "--out", store)
    recsys("train", store, "--run", run, *options(*SMALL))
    return store, run


def checkpoint_of(file):
    """The number of the checkpoint whose model a file has, or leads to."""
    with safe_open(file, "pt") as opened:
        return opened.metadata()["checkpoint"]


def scores_of(program_file, store):
    """The probabilities that a program computes, with PyTorch alone, for all samples of a store."""
    extra = {"recsys.json": ""}
    program = torch.export.load(program_file, extra_files=extra).module()
    num_features = len(json.loads(extra["recsys.json"])["features"])
    batch = Store(store).read(np.arange(NUM_ROWS))
    ids = batch.sparse_features.values().view(num_features, NUM_ROWS).T.long()
    return program(batch.dense_features, ids).sigmoid().detach().numpy()


def test_a_safetensors_file_has_the_tensors_of_the_model(trained, tmp_path):
    _, run = trained

    recsys("export", run, "--to", "safetensors", "--out", tmp_path / "model")

    require_equal(tmp_path / "model", run)


@pytest.mark.parametrize(("quantize", "most"), [([], 1e-6), (["--quantize", "int8"], 0.02)])
def test_a_program_predicts_as_the_run_does(trained, tmp_path, quantize, most):
    store, run = trained
    program, predicted = tmp_path / "model.pt2", tmp_path / "scores.parquet"

    recsys("export", run, "--to", "torch-export", *quantize, "--out", program)
    recsys("predict", run, store, "--out", predicted)

    expected = parquet.read_table(predicted)["score"].to_numpy()
    difference = np.abs(scores_of(program, store) - expected).max()
    assert difference < most
    assert bool(quantize) == (difference > 1e-6)


def test_a_checkpoint_and_the_deltas_after_it_are_the_model_of_the_end(tmp_path):
    run, files = tmp_path / "run", [tmp_path / name for name in ("full", "delta1", "delta2")]
    saves = ("checkpoint.every_steps=20", "checkpoint.every_seconds=0")
    train = ("train", "synthetic:criteo-kaggle", "--run", run, *options(*SYNTHETIC, *saves))

    recsys(*train)
    recsys("export", run, "--to", "safetensors", "--checkpoint", "last", "--out", files[0])
    require_equal(files[0], run)
    for epochs, delta in enumerate(files[1:], 2):
        recsys(*train, "--resume", *options(f"epochs={epochs}"))
        recsys("export", run, "--since", checkpoint_of(files[epochs - 2]), "--out", delta)
    recsys("apply", *files, "--out", tmp_path / "applied")

    require_equal(tmp_path / "applied", run)
    with pytest.raises(AssertionError):
        require_equal(files[0], run)
