"""Training on stores whose features share tables, have bags, or have no dense features."""

import signal

import numpy as np
import pytest
import torch
from torch.nn import functional

from recsys.batch import feature_tables, features_by_table, has_bags
from recsys.cli import main
from recsys.config import ModelConfig
from recsys.datasets.store import Store
from recsys.datasets.synthetic import SyntheticCriteo
from recsys.embeddings import PopularityProfile, plan_hot_rows
from recsys.errors import BudgetTooSmall
from recsys.train.build import build_loader, build_model, open_source, tables_of
from recsys.train.evaluate import evaluate_run
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train
from recsys.train.trials import verify_budgets
from tests.train import resumed_runs

BATCH_SIZE = 16
SETTINGS = (f"batch_size={BATCH_SIZE}", "num_threads=1", "optimizer.lr=0.5")
TABLES = {"item": 400, "user": 90, "tag": 12}


def run(config, folder):
    return train(config, folder, show_progress=False)


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
    store = Store(table_store())

    assert feature_tables(store) == {
        "user": "user",
        "tags": "tag",
        "item": "item",
        "history": "item",
    }
    assert features_by_table(store) == {
        "item": ("item", "history"),
        "user": ("user",),
        "tag": ("tags",),
    }
    assert has_bags(store)


def test_tables_of_other_sources_have_one_feature_each():
    source = SyntheticCriteo(num_samples=21, table_sizes=[5, 3])

    assert feature_tables(source) == {"cat_0": "cat_0", "cat_1": "cat_1"}
    assert features_by_table(source) == {"cat_0": ("cat_0",), "cat_1": ("cat_1",)}
    assert not has_bags(source)


class PlainModel:
    """The model of a run in plain PyTorch, with dense gradients, read from the store's arrays."""

    def __init__(self, model, store):
        self.store = store
        self.state = {
            name: value.detach().clone().requires_grad_()
            for name, value in model.model.state_dict().items()
        }

    def logits(self, samples):
        rows = [rows_of(self.store, sample) for sample in samples]
        vectors = [torch.from_numpy(self.store.dense[samples])]
        for layer in range(2):
            key = f"dense_arch.model._mlp.{layer}._linear"
            weight, bias = self.state[f"{key}.weight"], self.state[f"{key}.bias"]
            vectors[0] = functional.linear(vectors[0], weight, bias).relu()
        for name, table in (
            ("item", "item"),
            ("history", "item"),
            ("user", "user"),
            ("tags", "tag"),
        ):
            weight = self.state[
                f"sparse_arch.embedding_bag_collection.embedding_bags.t_{table}.weight"
            ]
            vectors.append(torch.stack([weight[of[name]].sum(0) for of in rows]))
        stacked = torch.stack(vectors, 1)
        products = stacked @ stacked.transpose(1, 2)
        first, second = torch.triu_indices(5, 5, offset=1)
        hidden = torch.cat([vectors[0], products[:, first, second]], 1)
        key = "over_arch.model.0._mlp.0._linear"
        hidden = functional.linear(
            hidden, self.state[f"{key}.weight"], self.state[f"{key}.bias"]
        ).relu()
        key = "over_arch.model.1"
        return functional.linear(hidden, self.state[f"{key}.weight"], self.state[f"{key}.bias"])[
            :, 0
        ]

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
    config = small_config(
        *SETTINGS, f"embeddings={provider}", "shuffle=false", data=str(table_store())
    )
    store = open_source(config)
    plain = PlainModel(build_model(config, store)[0], store)

    run(config, tmp_path / "run")

    train_part = store.splits["train"]
    for begin in range(0, len(train_part), BATCH_SIZE):
        samples = np.array(train_part[begin : begin + BATCH_SIZE])
        plain.step(samples, 0.5, config.resolved_dense_optimizer.lr)
    trained = build_model(config, store)[0].model
    RunFolder.open(tmp_path / "run").load_model(trained)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, plain.state[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.in_ci("sgd-0")
@pytest.mark.parametrize("num_dense", [2, 0])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_every_budget_equals_everything_resident(small_config, table_store, name, num_dense):
    config = small_config(
        *SETTINGS,
        f"optimizer.name={name}",
        f"dense_optimizer.name={name}",
        data=str(table_store(num_dense=num_dense)),
    )

    found = verify_budgets(config)

    assert not any(each.differing for each in found), found
    assert all(each.tiers is not None for each in found)


def test_the_floor_is_the_least_that_bags_and_shared_tables_need(small_config, table_store):
    config = small_config(*SETTINGS, data=str(table_store()))
    [floor] = verify_budgets(config, ["floor"])

    with pytest.raises(BudgetTooSmall, match=str(floor.budget_bytes)):
        verify_budgets(config, [str(floor.budget_bytes - 1)])


STALENESS = (
    "share=0.3",
    "staleness.window=34",
    "staleness.min_updates=2",
    "staleness.patience=1",
    "staleness.count_every=1",
)
PAPER = (
    "budget=8KiB",
    "batch_size=8",
    "schedule=fae",
    "schedule.fae.rate=100",
    "schedule.fae.adaptive=false",
    "skip.paper.first_snapshot=2",
    "skip.paper.window_share=0.3",
    "skip.paper.sample_share=0.3",
)
RUNS = {
    "resident": (),
    "look ahead": ("budget=6KiB", "schedule=lookahead"),
    "files": ("budget=6KiB", "cold_tier=file"),
    "hotline": ("budget=6KiB", "schedule=hotline"),
    "fae": ("budget=6KiB", "schedule=fae"),
    "subsample": ("epochs=4", *(f"skip.subsample.{key}" for key in STALENESS)),
    "freeze_rows": ("epochs=4", *(f"skip.freeze_rows.{key}" for key in STALENESS)),
    "importance": ("epochs=4", "skip.importance.share=0.4", "skip.importance.warm_up=0"),
    "paper": PAPER,
}


@pytest.mark.in_ci("files-2", "fae-2", "subsample-2", "paper-2", "resident-0")
@pytest.mark.parametrize("num_dense", [2, 0])
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.filterwarnings("ignore:staleness|the guard never compares")
def test_saved_models_evaluate_as_they_did_at_the_end(
    small_config, table_store, tmp_path, case, num_dense
):
    data = table_store(num_dense=num_dense, has_weights=num_dense > 0)
    config = small_config(*SETTINGS, *RUNS[case], data=str(data))

    record = run(config, tmp_path / "run")

    assert record["status"] == "finished"
    found = evaluate_run(tmp_path / "run")["test"].as_dict()
    assert found == record["metrics"]["test"]
    if config.skip.kind in ("subsample", "freeze_rows", "importance"):
        skipped = record["skipped"]
        assert skipped["num_skipped"] + skipped["num_lookups_left_out"] > 0


@pytest.mark.in_ci("fae")
@pytest.mark.parametrize("case", ["resident", "look ahead", "fae"])
def test_a_resumed_run_is_the_uninterrupted_one(small_config, table_store, tmp_path, stop_at, case):
    data = str(table_store())
    settings = (*SETTINGS, "epochs=2", "checkpoint.every_steps=4", "checkpoint.every_seconds=0")
    config = small_config(*settings, *RUNS[case], data=data)
    resumed_runs.run(config, tmp_path / "whole")

    stops = [(7, None), (13, signal.SIGINT), (50, None)]
    resumed_runs.run_and_resume(config, tmp_path / "run", stops, stop_at)

    resumed_runs.require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_a_profile_counts_the_lookups_of_all_features_of_a_table(table_store):
    store = Store(table_store())
    samples = range(20, 650)
    rows = [rows_of(store, sample) for sample in samples]

    profile = PopularityProfile.count(store, samples)

    for table, features in profile.features.items():
        looked_up = [row for of in rows for feature in features for row in of[feature]]
        counts = np.bincount(looked_up, minlength=TABLES[table])
        np.testing.assert_array_equal(profile.counts(table), counts)
    bases = dict(zip(TABLES, np.cumsum([0, *TABLES.values()]), strict=False))
    hot = set(profile.ranked_rows(28).tolist())
    is_hot = [
        all(
            bases[table] + row in hot
            for feature, table in feature_tables(store).items()
            for row in of[feature]
        )
        for of in rows
    ]
    assert profile.coverage(28, store, samples).hot_sample_share == np.mean(is_hot)
    assert 0 < sum(is_hot) < len(is_hot)


def test_samples_of_a_plan_are_hot_if_all_rows_of_all_features_are_pinned(table_store):
    store = Store(table_store())
    profile = PopularityProfile.count(store)
    tables = tables_of(store.table_sizes, profile.features, ModelConfig(embedding_dim=4))
    plan = plan_hot_rows(profile, tables, "6KiB", window_lookups=BATCH_SIZE)
    pinned = {
        table.removeprefix("t_"): set(plan.pinned_rows(table).tolist()) for table in plan.tables
    }

    found = plan.find_hot_samples(store, range(700))

    expected = [
        all(
            set(rows) <= pinned[feature_tables(store)[feature]]
            for feature, rows in rows_of(store, sample).items()
        )
        for sample in range(700)
    ]
    assert found.tolist() == expected
    assert 0 < sum(expected) < 700


def test_a_plan_made_by_the_commands_changes_no_number(
    small_config, small_settings, table_store, tmp_path
):
    data, profile, plan = table_store(), tmp_path / "profile.npz", tmp_path / "plan.npz"
    batch = [part for setting in SETTINGS for part in ("--set", setting)]
    assert main(["profile", str(data), "--out", str(profile)]) == 0
    command = ["plan", str(profile), "--budget", "6KiB", "--out", str(plan)]
    assert main([*command, *small_settings, *batch]) == 0

    planned = run(small_config(*SETTINGS, f"plan={plan}", data=str(data)), tmp_path / "planned")
    resident = run(small_config(*SETTINGS, data=str(data)), tmp_path / "resident")

    assert planned["tiers"] is not None
    assert planned["metrics"] == resident["metrics"]


def test_a_loader_gives_every_sample_its_own_bags(small_config, table_store):
    config = small_config(*SETTINGS, data=str(table_store()))
    store = open_source(config)
    expected = sorted(map(str, (rows_of(store, sample) for sample in store.splits["train"])))

    found = []
    for batch in build_loader(config, store, None):
        ids = batch.sparse_features
        for sample in range(ids.stride()):
            one = ids.select(torch.tensor([sample]))
            found.append(str({name: one[name].values().tolist() for name in ids.keys()}))  # noqa: SIM118

    assert sorted(found) == expected
