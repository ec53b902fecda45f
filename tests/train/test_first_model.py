"""`init_from`: a run that begins with the model of another one."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from recsys.config import load_config, replace
from recsys.datasets import Schema, write_store
from recsys.datasets.store import Store
from recsys.errors import ConfigError
from recsys.train.run_folder import RunFolder
from recsys.train.trials import dry_run
from tests.train.resumed_runs import (
    SETTINGS,
    require_same,
    require_same_run,
    run,
    run_and_resume,
    stop_at,  # noqa: F401  # a fixture
)

DATA = "synthetic:criteo-kaggle"
TIERED = ("budget=40KiB", "schedule=sequential")
STILL = ("optimizer.name=sgd", "optimizer.lr=0", "epochs=1", "seed=5")


def config_of(*settings, **keys):
    return replace(load_config(None, [*SETTINGS, *settings], data=DATA), **keys)


def model_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def first(tmp_path):
    """The folder of a run that has ended."""
    run(config_of("epochs=1"), tmp_path / "first")
    return tmp_path / "first"


@pytest.mark.in_ci("file")
@pytest.mark.parametrize(
    "settings",
    [
        (),
        TIERED,
        (*TIERED, "cold_tier=file"),
        ("embeddings=torch",),
    ],
    ids=["resident", "host", "file", "torch"],
)
def test_the_first_values_are_those_of_the_other_run(tmp_path, first, settings):
    run(config_of(*STILL, *settings, init_from=str(first)), tmp_path / "run")

    require_same(model_of(tmp_path / "run"), model_of(first))


def test_rows_are_trained_on(tmp_path, first):
    run(config_of("epochs=1", init_from=str(first)), tmp_path / "run")
    again = replace(config_of("epochs=1", *TIERED), init_from=str(first))
    run(again, tmp_path / "tiered")

    found, before = model_of(tmp_path / "run"), model_of(first)
    assert not any(
        torch.equal(found[name], before[name]) for name in before if len(found[name]) > 1
    )
    require_same(model_of(tmp_path / "tiered"), found)


@pytest.mark.outside_ci
def test_a_resumed_run_needs_the_first_one_no_more(tmp_path, first, stop_at):  # noqa: F811
    config = config_of(*TIERED, init_from=str(first))
    run(config, tmp_path / "whole")
    copied = replace(config, init_from=str(shutil.copytree(first, tmp_path / "copied")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "load_model", once_only(tmp_path / "copied"))
        run_and_resume(copied, tmp_path / "resumed", [(11, None)], stop_at)

    require_same_run(config, tmp_path / "resumed", tmp_path / "whole")


def once_only(folder):
    """`load_model`, after which the folder is gone."""
    load_model = RunFolder.load_model

    def load_and_remove(*arguments):
        load_model(*arguments)
        shutil.rmtree(folder)

    return load_and_remove


@pytest.mark.in_ci("dry")
@pytest.mark.parametrize("start", [run, dry_run], ids=["run", "dry run"])
def test_a_run_that_does_not_fit_is_refused_by_name(tmp_path, first, start):
    def refused(message, *settings, init_from=first):
        with pytest.raises(ConfigError, match=message):
            start(config_of(*settings, init_from=str(init_from)), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused("nowhere is not a run", init_from=tmp_path / "nowhere")
    refused("bias is .* in the model; init_from needs a run with the same", "model.embedding_dim=4")
    refused("its features by table must be those of the run", "synthetic.table_sizes=[900, 700, 1]")
    (first / "model.safetensors").unlink()
    refused("its run saved no model")


def test_a_run_that_did_not_finish_is_told(tmp_path, first):
    record = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))

    with pytest.warns(UserWarning, match="first is 'interrupted', not 'finished', and this run"):
        dry_run(config_of(init_from=str(first)), tmp_path / "run")


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
        return model_of(tmp_path / name)[
            "sparse_arch.embedding_bag_collection.embedding_bags.t_site.weight"
        ]

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
