"""The parts of a run: its loader, and the embeddings of both providers."""

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.config import OptimizerConfig
from recsys.embeddings import TableConfig
from recsys.errors import ConfigError
from recsys.train.build import build_embeddings, build_loader, open_source

PROVIDERS = ["recsys", "torch"]
TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4, feature_names=("user", "friend")),
    TableConfig(name="goods", num_embeddings=5, embedding_dim=8, feature_names=("item",)),
    TableConfig(name="friends", num_embeddings=9, embedding_dim=4, feature_names=("friend",)),
]
# user: [0, 8], [], [3]   friend: [3], [3, 3, 1], []   item: [4], [0], [2, 2]
IDS = JaggedIds(
    ["user", "friend", "item"],
    torch.tensor([0, 8, 3, 3, 3, 3, 1, 4, 0, 2, 2]),
    torch.tensor([0, 2, 2, 3, 4, 7, 7, 8, 9, 11]),
)


def build(provider, **optimizer):
    torch.manual_seed(0)
    return build_embeddings(provider, TABLES, OptimizerConfig(**optimizer))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_may_train_in_the_order_of_the_data(small_config, shuffle):
    config = small_config(f"shuffle={str(shuffle).lower()}", "seed=3")
    source = open_source(config)
    expected = source.read(np.arange(len(source.splits["train"])))

    for _ in range(2):  # epochs
        batches = list(build_loader(config, source, None))

        found = torch.cat([batch.dense_features for batch in batches])
        assert torch.equal(found, expected.dense_features) == (not shuffle)


@pytest.mark.parametrize(("name", "lr"), [("sgd", 0.5), ("adagrad", 0.1), ("adam", 0.1)])
def test_providers_draw_and_update_alike(name, lr):
    results = {}
    for provider in PROVIDERS:
        module, optimizer = build(provider, name=name, lr=lr)
        for step in range(3):
            pooled = module(IDS).values()
            optimizer.zero_grad()
            (
                pooled * torch.arange(1.0, pooled.numel() + 1).view_as(pooled) * (step + 1)
            ).sum().backward()
            optimizer.step()
        results[provider] = module.state_dict()

    assert next(iter(results["torch"])) == "embedding_bags.users.weight"
    for others in results.values():
        assert list(others) == list(results["torch"])
        for key, expected in results["torch"].items():
            torch.testing.assert_close(others[key], expected, rtol=1e-5, atol=1e-6)


def test_what_torch_has_no_form_of_is_refused_by_name():
    mean = TableConfig(name="t", num_embeddings=9, embedding_dim=4, pooling="mean")

    for tables, name in (([mean], "pooling"), (TABLES * 2, "names")):
        with pytest.raises(ValueError, match=name):
            build_embeddings("torch", tables, OptimizerConfig())
    with pytest.raises(ConfigError, match="rowwise_adagrad"):
        build("torch", name="rowwise_adagrad")
