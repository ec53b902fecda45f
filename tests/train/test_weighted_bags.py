"""Training on stores with a weight for each value of a bag, and what refuses them."""

import json
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds, PooledEmbeddings
from recsys.config import load_config
from recsys.datasets.store_writer import Feature
from recsys.embeddings.table import output_names
from recsys.errors import ConfigError
from recsys.train.exports.program import export_program
from recsys.train.judge.evaluation import evaluate_run, open_saved_model
from recsys.train.parts.build import build_model, open_source
from recsys.train.trainer import train
from recsys.train.verify_tiers import format_verification, verify_budgets
from tests.train import resumed_runs
from tests.train.test_models import CUSTOM
from tests.train.test_models import SMALL as SMALL_OF_MODELS
from tests.train.test_table_stores import RUNS, SETTINGS

FEATURES = (
    Feature("user", "user"),
    Feature("tags", "tag", "multi", is_weighted=True),
    Feature("item", "item"),
    Feature("history", "item", "sequence"),
)


@pytest.fixture
def weighted_store(table_store):
    """Writes a store whose feature `tags` has weights, and returns its path."""

    def write(name="store", **options):
        return str(table_store(name, features=FEATURES, **options))

    return write


def run(config, folder):
    return train(config, folder, show_progress=False)


class PlainBags(nn.Module):
    """`nn.EmbeddingBag` with `per_sample_weights`, one for each table."""

    def __init__(self, tables, state):
        super().__init__()
        self.tables = tables
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode="sum",
                    include_last_offset=True,
                    _weight=state[f"embedding_bags.{table.name}.weight"].clone(),
                )
                for table in tables
            }
        )

    def embedding_bag_configs(self):
        return self.tables

    def forward(self, features):
        pooled = [
            self.embedding_bags[table.name](
                features[name].values(), features[name].offsets(), features[name].weights_or_none()
            )
            for table in self.tables
            for name in table.feature_names
        ]
        dims = [each.shape[1] for each in pooled]
        return PooledEmbeddings(output_names(self.tables), dims, torch.cat(pooled, 1))


@pytest.mark.parametrize("provider", ["recsys", "torch", "fbgemm"])
def test_a_step_equals_embedding_bags_with_weights(small_config, weighted_store, provider):
    if provider == "fbgemm":
        pytest.importorskip("fbgemm_gpu", exc_type=ImportError)
    settings = (*SETTINGS, f"embeddings={provider}", "optimizer.name=sgd", "optimizer.lr=0.5")
    config = small_config(*settings, "dense_optimizer.name=sgd", data=weighted_store())
    source = open_source(config)
    (model, optimizers), (plain, _) = build_model(config, source), build_model(config, source)
    arch = plain.model.sparse_arch
    collection = arch.embedding_bag_collection
    arch.embedding_bag_collection = PlainBags(
        collection.embedding_bag_configs(), collection.state_dict()
    )
    of_rows = list(arch.embedding_bag_collection.parameters())
    dense = [each for each in plain.parameters() if all(each is not row for row in of_rows)]
    batch = source.read(np.arange(64))

    loss, _ = model(batch)
    expected, _ = plain(batch)
    unweighted = batch.select(torch.arange(64))
    ids = batch.sparse_features
    ones = torch.ones_like(ids.weights_or_none())
    unweighted.sparse_features = JaggedIds(ids.keys(), ids.values(), ids.offsets(), ones)
    assert abs(plain(unweighted)[0] - expected) > 1e-4
    torch.testing.assert_close(loss, expected)
    for each in optimizers:
        each.zero_grad()
    loss.backward()
    expected.backward()
    for each in optimizers:
        each.step()
    torch.optim.SGD(of_rows, lr=0.5).step()
    torch.optim.SGD(dense, lr=config.resolved_dense_optimizer.lr).step()

    found = model.model.state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.in_ci("adagrad")
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_every_budget_equals_everything_resident(small_config, weighted_store, name):
    config = small_config(
        *SETTINGS,
        f"optimizer.name={name}",
        "model.pooling.item=mean",
        "schedule.name=lookahead",
        data=weighted_store(),
    )

    found = verify_budgets(config)

    assert all(each.ok for each in found), format_verification(found)


@pytest.mark.in_ci("look ahead", "hotline", "freeze_rows")
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.filterwarnings("ignore:staleness|the guard never compares")
def test_saved_models_evaluate_as_they_did_at_the_end(small_config, weighted_store, tmp_path, case):
    config = small_config(*SETTINGS, *RUNS[case], data=weighted_store())

    record = run(config, tmp_path / "run")

    assert record["status"] == "finished"
    assert evaluate_run(tmp_path / "run")["test"].as_dict() == record["metrics"]["test"]
    weighted = [each["name"] for each in record["data"]["features"] if each.get("is_weighted")]
    assert weighted == ["tags"]


def test_weights_change_what_is_learned(small_config, weighted_store, table_store, tmp_path):
    plain = str(table_store("plain"))

    with_weights = run(small_config(*SETTINGS, data=weighted_store()), tmp_path / "run of weighted")
    without = run(small_config(*SETTINGS, data=plain), tmp_path / "run of plain")

    assert with_weights["metrics"]["test"]["logloss"] != without["metrics"]["test"]["logloss"]
    for folder, other in (("weighted", plain), ("plain", weighted_store("again"))):
        with pytest.raises(ConfigError, match="the features with weights must be those of the run"):
            evaluate_run(tmp_path / f"run of {folder}", other)


@pytest.mark.outside_ci
def test_a_resumed_run_is_the_uninterrupted_one(small_config, weighted_store, tmp_path, stop_at):
    settings = (*SETTINGS, "epochs=2", "checkpoint.every_steps=4", "checkpoint.every_seconds=0")
    config = small_config(*settings, *RUNS["look ahead"], data=weighted_store())
    resumed_runs.run(config, tmp_path / "whole")

    resumed_runs.run_and_resume(config, tmp_path / "run", [(7, None), (13, signal.SIGINT)], stop_at)

    resumed_runs.require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("name", ["din", "tbsm", "looked_up:Sum"])
def test_models_that_do_not_pool_refuse_weights(weighted_store, tmp_path, monkeypatch, name):
    module = CUSTOM.format(attribute="unpooled = True", pool="pooled = self.embeddings")
    (tmp_path / "looked_up.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "looked_up", raising=False)
    config = load_config(None, [*SMALL_OF_MODELS, f"model.name={name}"], data=weighted_store())

    with pytest.raises(ConfigError, match=f"model.name '{name}'"):
        run(config, tmp_path / "run")

    assert not (tmp_path / "run").exists()


@pytest.mark.outside_ci
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_program_takes_weights(small_config, weighted_store, tmp_path, quantize):
    data = weighted_store(has_weights=False)
    config = small_config(*SETTINGS, "model.pooling.tag=mean", data=data)
    run(config, tmp_path / "run")

    export_program(tmp_path / "run", tmp_path / "model.pt2", quantize)

    extra = {"recsys.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert json.loads(extra["recsys.json"])["inputs"][1:] == [
        {"name": "values", "shape": ["N"], "dtype": "int64"},
        {"name": "offsets", "shape": ["F * B + 1"], "dtype": "int64"},
        {"name": "weights", "shape": ["N"], "dtype": "float32"},
    ]
    _, source, model = open_saved_model(tmp_path / "run")
    close = {"rtol": 1e-6, "atol": 1e-6} if quantize is None else {"rtol": 0, "atol": 0.05}
    for size in (1, 7, 300):
        batch = source.read(np.arange(5, 5 + size))
        features = batch.sparse_features
        inputs = features.values(), features.offsets(), features.weights_or_none()
        with torch.no_grad():
            _, (_, expected, _) = model(batch)
        torch.testing.assert_close(program(batch.dense_features, *inputs), expected, **close)
