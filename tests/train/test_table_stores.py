"""Training on stores whose features share tables, have bags, or have no dense features."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from recsys.batch import feature_tables, features_by_table, has_bags
from recsys.config import replace
from recsys.datasets import Store, SyntheticCriteo
from recsys.embeddings import PopularityProfile
from tests.commands import options, recsys
from tests.train.resumed_runs import load_model, run

BATCH_SIZE = 16
SETTINGS = (f"batch_size={BATCH_SIZE}", "num_threads=1", "optimizer.lr=0.5")
TABLES = {"item": 400, "user": 90, "tag": 12}


def rows_of(store, sample):
    """The rows that a sample looks up, by feature, read from the arrays on the disk."""
    ends = np.concatenate([[0], store.bag_ends.reshape(-1)])
    bags = {
        name: store.bag_values[ends[2 * sample + number] : ends[2 * sample + number + 1]].tolist()
        for number, name in enumerate(["tags", "history"])
    }
    user, item = store.sparse[sample].tolist()
    return {"user": [user], "tags": bags["tags"], "item": [item], "history": bags["history"]}


def test_features_know_their_tables(table_store):
    store, plain = Store(table_store()), SyntheticCriteo(num_samples=21, table_sizes=[5, 3])

    tables = {"user": "user", "tags": "tag", "item": "item", "history": "item"}
    assert feature_tables(store) == tables
    features = {"item": ("item", "history"), "user": ("user",), "tag": ("tags",)}
    assert features_by_table(store) == features
    assert feature_tables(plain) == {"cat_0": "cat_0", "cat_1": "cat_1"}
    assert features_by_table(plain) == {"cat_0": ("cat_0",), "cat_1": ("cat_1",)}
    assert (has_bags(store), has_bags(plain)) == (True, False)


class PlainModel:
    """The model of a run in plain PyTorch, with dense gradients, read from the store's arrays."""

    def __init__(self, state, store):
        self.store = store
        self.state = {name: value.requires_grad_() for name, value in state.items()}

    def logits(self, samples):
        rows = [rows_of(self.store, sample) for sample in samples]
        vectors = [torch.from_numpy(self.store.dense[samples])]
        for layer in range(2):
            vectors[0] = self.linear(f"dense_arch.model._mlp.{layer}._linear", vectors[0]).relu()
        for name, table in (
            ("item", "item"),
            ("history", "item"),
            ("user", "user"),
            ("tags", "tag"),
        ):
            key = f"sparse_arch.embedding_bag_collection.embedding_bags.t_{table}.weight"
            vectors.append(torch.stack([self.state[key][of[name]].sum(0) for of in rows]))
        stacked = torch.stack(vectors, 1)
        products = stacked @ stacked.transpose(1, 2)
        first, second = torch.triu_indices(5, 5, offset=1)
        hidden = torch.cat([vectors[0], products[:, first, second]], 1)
        hidden = self.linear("over_arch.model.0._mlp.0._linear", hidden).relu()
        return self.linear("over_arch.model.1", hidden)[:, 0]

    def linear(self, key, inputs):
        return functional.linear(inputs, self.state[f"{key}.weight"], self.state[f"{key}.bias"])

    def step(self, samples, lr, dense_lr):
        losses = functional.binary_cross_entropy_with_logits(
            self.logits(samples), torch.from_numpy(self.store.labels[samples]).float(),
            reduction="none",
        )  # fmt: skip
        weighted = losses * torch.from_numpy(self.store.weights[samples])
        (weighted.sum() / BATCH_SIZE).backward()  # a smaller mini-batch counts by its share
        with torch.no_grad():
            for name, value in self.state.items():
                value.sub_((lr if "embedding_bags" in name else dense_lr) * value.grad)
                value.grad = None


@pytest.mark.parametrize("provider", ["recsys", "torch"])
def test_training_equals_plain_pytorch(small_config, table_store, tmp_path, provider):
    data = table_store()
    settings = (*SETTINGS, f"embeddings={provider}", "shuffle=false")
    config, store = small_config(*settings, data=str(data)), Store(data)
    still = ("optimizer.lr=0", "dense_optimizer.lr=0")
    run(small_config(*settings, *still, data=str(data)), tmp_path / "first")
    plain = PlainModel(load_model(tmp_path / "first"), store)

    run(config, tmp_path / "run")

    train_part = store.splits["train"]
    for begin in range(0, len(train_part), BATCH_SIZE):
        samples = np.array(train_part[begin : begin + BATCH_SIZE])
        plain.step(samples, 0.5, config.resolved_dense_optimizer.lr)
    for name, value in load_model(tmp_path / "run").items():
        torch.testing.assert_close(value, plain.state[name].detach(), rtol=1e-4, atol=1e-5)


def test_a_profile_counts_the_lookups_of_all_features_of_a_table(table_store):
    store = Store(table_store())
    samples = range(20, 650)
    rows = [rows_of(store, sample) for sample in samples]

    profile = PopularityProfile.count(store, samples)

    for table, features in profile.features.items():
        looked_up = [row for of in rows for feature in features for row in of[feature]]
        counts = np.bincount(looked_up, minlength=TABLES[table])
        np.testing.assert_array_equal(profile.counts(table), counts)


def test_a_plan_made_by_the_commands_changes_no_number(
    small_config, small_settings, table_store, tmp_path
):
    data, profile, plan = table_store(), tmp_path / "profile.npz", tmp_path / "plan.npz"
    recsys("profile", data, "--out", profile)
    command = ["plan", profile, "--budget", "6KiB", "--out", plan]
    recsys(*command, *small_settings, *options(*SETTINGS))

    resident = small_config(*SETTINGS, data=str(data))
    planned = run(replace(resident, plan=str(plan)), tmp_path / "planned")

    assert planned["tiers"] is not None
    assert planned["metrics"] == run(resident, tmp_path / "resident")["metrics"]
