"""Every `model.name` in training: it learns, is saved, evaluated, verified, and ranked."""

import sys

import numpy as np
import pytest
import torch

from recsys.config import load_config, replace
from recsys.datasets.store import Store
from recsys.datasets.store_writer import Feature
from recsys.errors import ConfigError
from recsys.models import DLRM
from recsys.train.build import build_model, open_source
from recsys.train.evaluate import evaluate_run, open_saved_model
from recsys.train.trainer import train
from recsys.train.trials import verify_budgets
from tests.train.judged_stores import write_store

SMALL = (
    "model.embedding_dim=4",
    "model.dense_arch=[8, 4]",
    "model.over_arch=[8, 1]",
    "batch_size=16",
    "optimizer.name=adagrad",
    "optimizer.lr=0.1",
    "num_threads=1",
)
MODELS = {
    "dlrm": ("model.name=dlrm",),
    "masked_transformer": (
        "model.interaction=masked_transformer",
        "model.interaction.masked_transformer.kept=2",
    ),
    "dcn_v2": ("model.name=dcn_v2", "model.dcn_v2.low_rank_dim=3"),
    "deepfm": ("model.name=deepfm",),
    "din": ("model.name=din", "model.din.attention=[6]"),
    "tbsm": ("model.name=tbsm", "model.tbsm.num_steps=3", "model.tbsm.tower=[6, 5]"),
}
POOLED = "pooled = self.embeddings(batch.sparse_features).values()"
CUSTOM = """
import torch


class Sum(torch.nn.Module):
    {attribute}

    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.dense = torch.nn.Linear(num_dense, 1)

    def forward(self, batch):
        {pool}
        return self.dense(batch.dense_features) + pooled.sum(1, keepdim=True)
"""


@pytest.fixture(params=MODELS)
def settings(request):
    return [*SMALL, *MODELS[request.param]]


def run(config, folder):
    return train(config, folder, show_progress=False)


@pytest.mark.in_ci("deepfm", "masked_transformer")
def test_a_saved_model_evaluates_as_at_the_end_of_its_run(settings, table_store, tmp_path):
    config = load_config(None, settings, data=str(table_store()), epochs=3)

    record = run(config, tmp_path / "run")
    found = evaluate_run(tmp_path / "run")

    assert record["status"] == "finished"
    for split in ("test", "validation"):
        expected = record["metrics"][split]
        assert found[split].as_dict()["auc"] == expected["auc"]
        assert found[split].as_dict()["logloss"] == pytest.approx(expected["logloss"])


def test_every_parameter_learns(settings, table_store):
    config = load_config(None, settings, data=str(table_store()))
    source = open_source(config)
    model, optimizers = build_model(config, source)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    for begin in range(0, 96, 16):
        loss, _ = model(source.read(np.arange(begin, begin + 16)))
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()

    same = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    # Not each of the few ReLUs lives.
    assert not [name for name in same if "bias" not in name]


@pytest.mark.in_ci("lookahead-tbsm", "lookahead-masked_transformer")
@pytest.mark.parametrize("name", ["din", "tbsm", "dcn_v2", "masked_transformer"])
@pytest.mark.parametrize("schedule", ["sequential", "lookahead"])
def test_every_budget_gives_the_same_bits(table_store, name, schedule):
    settings = [*SMALL, *MODELS[name], f"schedule={schedule}"]
    config = load_config(None, settings, data=str(table_store()))

    found = verify_budgets(config)

    assert not any(each.differing for each in found), found
    assert found[0].tiers is not None


@pytest.mark.in_ci("hotline-din", "observe.staleness.window=33-din", "fae-tbsm")
@pytest.mark.parametrize("name", ["din", "tbsm"])
@pytest.mark.parametrize(
    "more",
    [
        ("schedule=hotline", "budget=12KiB"),
        ("schedule=fae", "budget=12KiB"),
        (
            "skip.observe.staleness.window=33",
            "skip.observe.staleness.patience=1",
            "epochs=3",
        ),
        ("skip.random_drop.share=0.3",),
        (
            "skip.importance.share=0.3",
            "skip.importance.warm_up=10",
            "skip.importance.guard.every=0",
        ),
    ],
    ids=lambda more: more[0],
)
def test_sequences_train_with_every_schedule_and_policy(table_store, tmp_path, name, more):
    settings = [*SMALL, *MODELS[name], *more]

    record = run(load_config(None, settings, data=str(table_store())), tmp_path / "run")

    assert record["status"] == "finished"
    assert 0 < record["metrics"]["validation"]["logloss"] < 2


def test_models_of_samples_rank_items(tmp_path):
    store = write_store(tmp_path / "store", is_ranked=True)
    settings = [*SMALL, "model.name=din", "eval.ranking_k=5"]

    record = run(load_config(None, settings, data=str(store.path)), tmp_path / "run")

    assert record["metrics"]["test"]["num_rankings"] > 0
    assert 0 < record["metrics"]["test"]["recall_at_k"] < 1


def test_a_class_of_the_users_ranks_items_whatever_its_parts_are_called(tmp_path, monkeypatch):
    code = CUSTOM.format(attribute="pass", pool=POOLED).replace("self.dense", "self.head")
    (tmp_path / "my_models.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    store = write_store(tmp_path / "store", is_ranked=True)
    settings = [*SMALL, "model.name=my_models:Sum", "eval.ranking_k=5"]

    record = run(load_config(None, settings, data=str(store.path)), tmp_path / "run")

    assert record["metrics"]["test"]["num_rankings"] > 0
    sys.modules.pop("my_models")


def test_tables_may_have_dims_and_poolings_of_their_own(table_store, tmp_path):
    more = ["model.table_dims.user=2", "model.table_dims.tag=8", "model.pooling.tag=mean"]
    config = load_config(None, [*SMALL, *more], data=str(table_store()))

    record = run(config, tmp_path / "run")
    found = verify_budgets(config)
    _, _, model = open_saved_model(tmp_path / "run")

    assert (
        evaluate_run(tmp_path / "run")["test"].as_dict()["auc"] == record["metrics"]["test"]["auc"]
    )
    assert not any(each.differing for each in found), found
    bags = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    assert {each.name: (each.embedding_dim, each.pooling) for each in bags} == {
        "t_item": (4, "sum"),
        "t_user": (2, "sum"),
        "t_tag": (8, "mean"),
    }


@pytest.mark.parametrize(
    ("attribute", "pool"),
    [
        ("pass", POOLED),
        (
            "unpooled = True",
            "rows = self.embeddings(batch.sparse_features)\n"
            "        pooled = torch.cat([rows['user'].values(), rows['item'].values()], 1)",
        ),
    ],
    ids=["pooled", "rows"],
)
def test_a_class_of_the_users_trains_and_is_evaluated(
    table_store, tmp_path, monkeypatch, attribute, pool
):
    (tmp_path / "my_models.py").write_text(CUSTOM.format(attribute=attribute, pool=pool))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    path = list(sys.path)
    config = load_config(None, [*SMALL, "model.name=my_models:Sum"], data=str(table_store()))

    record = run(replace(config, epochs=3), tmp_path / "run")
    found = evaluate_run(tmp_path / "run")

    assert sys.path == path
    assert found["test"].as_dict()["auc"] == record["metrics"]["test"]["auc"]
    sys.modules.pop("my_models")


LOOKED_UP = CUSTOM.format(attribute="unpooled = True", pool="pooled = torch.ones(3, 3)")
NO_HISTORY = (Feature("user", "user"), Feature("tags", "tag", "multi"), Feature("item", "item"))
# Code of the user, settings, and the name in the error.
REFUSALS = [
    ("", ["model.name=nowhere:Sum"], "module nowhere"),
    ("", ["model.name=own_code:Missing"], "Missing"),
    ("import json", ["model.name=own_code:json"], "json"),
    ("import torch\nclass M(torch.nn.Module):\n    pass", ["model.name=own_code:M"], r"M\("),
    (LOOKED_UP, ["model.name=own_code:Sum", "model.table_dims.user=8"], "own_code:Sum"),
    (LOOKED_UP, ["model.name=own_code:Sum", "model.pooling.user=mean"], "own_code:Sum"),
    ("", ["model.name=din", "embeddings=torch"], "embeddings"),
    ("", ["model.table_dims.users=8"], "model.table_dims.users"),
    (
        "",
        [
            "model.interaction=masked_transformer",
            "model.interaction.masked_transformer.num_heads=3",
        ],
        "num_heads",
    ),
]


@pytest.mark.parametrize(("code", "settings", "name"), REFUSALS)
def test_a_model_that_cannot_be_built_is_refused_by_name(
    table_store, tmp_path, monkeypatch, code, settings, name
):
    (tmp_path / "own_code.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    config = load_config(None, [*SMALL, *settings], data=str(table_store()))

    with pytest.raises(ConfigError, match=name):
        build_model(config, open_source(config))
    sys.modules.pop("own_code", None)


def test_data_without_a_history_are_refused_by_name(table_store):
    data = str(table_store(features=NO_HISTORY))
    config = load_config(None, [*SMALL, "model.name=din"], data=data)

    with pytest.raises(ConfigError, match=r"model\.name 'din'"):
        build_model(config, open_source(config))


def test_logits_of_another_shape_are_refused(table_store, tmp_path, monkeypatch):
    code = CUSTOM.format(attribute="pass", pool="pooled = torch.ones(len(batch), 3)")
    (tmp_path / "own_code.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    config = load_config(None, [*SMALL, "model.name=own_code:Sum"], data=str(table_store()))
    source = open_source(config)
    model, _ = build_model(config, source)
    for result in (torch.ones(5, 2), (torch.ones(5),)):
        monkeypatch.setattr(model.model, "forward", lambda _, result=result: result)
        with pytest.raises(ValueError, match="Sum: forward"):
            model(source.read(np.arange(5)))
    sys.modules.pop("own_code", None)


def test_histories_are_the_sequences_that_share_a_table_with_a_candidate(table_store):
    assert Store(table_store()).histories == {"history": "item"}
    features = (
        Feature("user", "user"),
        Feature("tags", "tag"),
        Feature("past", "item", "sequence"),
    )
    assert Store(table_store("other", features=features)).histories == {}


def test_dlrm_stays_the_model_it_was(table_store):
    config = load_config(None, list(SMALL), data=str(table_store()))

    model, _ = build_model(config, open_source(config))

    assert type(model.model) is DLRM
    assert set(model.model.state_dict()) == {
        *(
            f"sparse_arch.embedding_bag_collection.embedding_bags.t_{table}.weight"
            for table in ("item", "user", "tag")
        ),
        *(
            f"{layer}.{kind}"
            for layer in (
                "dense_arch.model._mlp.0._linear",
                "dense_arch.model._mlp.1._linear",
                "over_arch.model.0._mlp.0._linear",
                "over_arch.model.1",
            )
            for kind in ("weight", "bias")
        ),
    }
