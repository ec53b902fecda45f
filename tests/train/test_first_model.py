"""`init_from`: a run that begins with the model of another one."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from recsys.config import load_config, replace
from recsys.datasets import Schema, Store, write_store
from recsys.errors import ConfigError
from tests.commands import options, recsys, refused
from tests.train.resumed_runs import (
    SETTINGS,
    Killed,
    load_model,
    record_of,
    require_equal,
    require_same_run,
    run,
)

DATA = "synthetic:criteo-kaggle"
TIERED = ("budget=40KiB", "schedule=sequential")
STILL = ("optimizer.name=sgd", "optimizer.lr=0", "epochs=1", "seed=5")


def config_of(*settings, **keys):
    return replace(load_config(None, [*SETTINGS, *settings], data=DATA), **keys)


@pytest.fixture
def first(tmp_path):
    """The folder of a run that has ended."""
    run(config_of("epochs=1"), tmp_path / "first")
    return tmp_path / "first"


@pytest.mark.slow(but=("file",))
@pytest.mark.parametrize(
    "settings",
    [(), (*TIERED, "cold_tier=file"), ("embeddings=torch",)],
    ids=["resident", "file", "torch"],
)
def test_the_first_values_are_those_of_the_other_run(tmp_path, first, settings):
    run(config_of(*STILL, *settings, init_from=str(first)), tmp_path / "run")

    require_equal(load_model(tmp_path / "run"), load_model(first))


def test_rows_are_trained_on_and_a_resumed_run_needs_the_first_one_no_more(
    tmp_path, first, stop_at
):
    config = config_of("epochs=1", init_from=str(first))
    run(config, tmp_path / "whole")
    before = load_model(first)
    stop_at((11, None))
    with pytest.raises(Killed):
        run(config, tmp_path / "run")
    first.rename(tmp_path / "gone")
    run(config, tmp_path / "run", resume=True)

    found = load_model(tmp_path / "run")
    trained = [name for name, values in before.items() if not torch.equal(found[name], values)]
    assert len(trained) >= len(before) - 1  # one table has one row
    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_run_that_does_not_fit_is_refused_by_name(tmp_path, first, dry):
    def refuse(name, *settings, init_from=first):
        settings = options(*SETTINGS, *settings, f"init_from={init_from}")
        assert name in refused("train", DATA, "--run", tmp_path / "run", *dry, *settings)
        assert not (tmp_path / "run").exists()

    refuse("nowhere is not a run", init_from=tmp_path / "nowhere")
    refuse("bias", "model.embedding_dim=4", "model.dense_arch=[8, 4]")
    refuse("features and their tables", "synthetic.table_sizes=[900, 700, 1]")
    (first / "model.safetensors").unlink()
    refuse("saved no model")


def test_a_run_that_did_not_finish_is_reported(tmp_path, first):
    (first / "run.json").write_text(json.dumps(record_of(first) | {"status": "interrupted"}))
    settings = options(*SETTINGS, f"init_from={first}")

    with pytest.warns(UserWarning, match="first is interrupted"):
        recsys("train", DATA, "--run", tmp_path / "run", "--dry-run", *settings)


def test_training_goes_on_with_newer_rows(tmp_path):
    def frame(sites):
        clicks = rng.integers(0, 2, 200)
        return pd.DataFrame({"click": clicks, "site": rng.choice(list(sites), 200)})

    rng = np.random.default_rng(0)
    schema = Schema.from_dict({"label": "click", "categorical": {"site": {}}})
    settings = ("model.embedding_dim=4", "model.dense_arch=[8, 4]", "model.over_arch=[8, 1]")

    def trained(store, name, **keys):
        config = load_config(None, ["num_threads=1", *settings], data=str(tmp_path / store))
        run(replace(config, **keys), tmp_path / name)
        rows = load_model(tmp_path / name)
        return rows["sparse_arch.embedding_bag_collection.embedding_bags.t_site.weight"]

    write_store(frame("abcd"), schema, tmp_path / "store")
    before = trained("store", "run")
    newer = frame("bxd")
    write_store(newer, None, tmp_path / "newer", like=tmp_path / "store", split=True)
    after = trained("newer", "newer_run", init_from=str(tmp_path / "run"))

    is_moved = (after != before).any(1)
    looked_up = np.unique(Store(tmp_path / "newer").sparse)
    assert len(looked_up) == 3  # b, d, and row 0 of x
    assert is_moved.nonzero().flatten().tolist() == looked_up.tolist()

    write_store(newer, schema, tmp_path / "other")
    with pytest.raises(ConfigError, match="values"):
        trained("other", "other_run", init_from=str(tmp_path / "run"))
