import numpy as np
import pytest
import torch
from torch.nn.functional import embedding_bag

from recsys.batch import JaggedIds
from recsys.config import OptimizerConfig
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.table import TableConfig
from recsys.train.build import build_embeddings

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


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_feature_is_pooled_from_its_table(provider):
    module, _ = build(provider)
    weights = dict(zip(["users", "goods", "friends"], module.table_weights(), strict=True))

    pooled = module(IDS)

    lookups = {
        "user": "users",
        "friend@users": "users",
        "item": "goods",
        "friend@friends": "friends",
    }
    assert pooled.keys() == list(lookups)
    for key, table in lookups.items():
        bags = IDS[key.partition("@")[0]]
        expected = embedding_bag(bags.values(), weights[table], bags.offsets()[:-1], mode="sum")
        torch.testing.assert_close(pooled[key], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_features_are_found_by_name_whatever_their_order(provider):
    module, _ = build(provider)
    order = ["item", "user", "friend"]
    parts = [IDS[key] for key in order]
    sizes = torch.cat([part.lengths() for part in parts])
    shuffled = JaggedIds(
        order,
        torch.cat([part.values() for part in parts]),
        torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
    )

    assert torch.equal(module(shuffled).values(), module(IDS).values())


@pytest.mark.parametrize("num_samples", [0, 4])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_one_hot_ids_are_looked_up_as_by_offsets(provider, num_samples):
    module, _ = build(provider)
    rows = torch.randint(5, (3, num_samples), generator=torch.Generator().manual_seed(0))
    keys = ["item", "user", "friend"]
    by_offsets = JaggedIds(keys, rows.flatten(), torch.arange(rows.numel() + 1))

    pooled = module(JaggedIds.from_one_hot(keys, rows)).values()

    assert len(pooled) == num_samples
    assert torch.equal(pooled, module(by_offsets).values())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_missing_feature_is_named(provider):
    module, _ = build(provider)
    ids = JaggedIds(["user", "item"], torch.tensor([0, 1]), torch.tensor([0, 1, 2]))

    with pytest.raises(KeyError, match=r"features \['friend'\] are missing"):
        module(ids)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_weighted_lookups(provider):
    if provider == "recsys":
        module = HotColdEmbeddingBagCollection(TABLES, is_weighted=True)
    else:
        module, _ = build(provider)
    weights = torch.rand(11)
    weighted = JaggedIds(IDS.keys(), IDS.values(), IDS.offsets(), weights)

    pooled = module(weighted)

    users = module.table_weights()[0]
    expected = weights[0] * users[0] + weights[1] * users[8]
    torch.testing.assert_close(pooled["user"][0], expected, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_scheduler_changes_the_rate_of_the_next_step(provider):
    module, optimizer = build(provider, name="sgd", lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.25, 0.0][step])
    moved = []

    for _ in range(3):
        before = module.table_weights()[1].clone()
        optimizer.zero_grad()
        module(IDS)["item"][1].sum().backward()
        optimizer.step()
        scheduler.step() if len(moved) < 2 else None
        moved.append((before - module.table_weights()[1])[0, 0].item())

    assert moved == pytest.approx([1.0, 0.25, 0.0], abs=1e-6)


def test_rowwise_adagrad_keeps_one_sum_per_row():
    lr, eps = 0.1, 1e-10
    module, optimizer = build("recsys", name="rowwise_adagrad", lr=lr, eps=eps)
    before = module.table_weights()[1].clone()
    gradient = torch.arange(1.0, 9.0)

    (module(IDS)["item"][1] * gradient).sum().backward()
    optimizer.step()

    root = gradient.square().mean().sqrt()
    expected = before[0] - lr * gradient / (root + eps)
    torch.testing.assert_close(module.table_weights()[1][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saver", PROVIDERS)
@pytest.mark.parametrize("loader", PROVIDERS)
def test_rows_saved_by_one_provider_load_into_the_other(saver, loader):
    source, _ = build(saver)
    target, _ = build(loader)
    for weight in target.table_weights():
        weight.detach().zero_()

    target.load_state_dict(source.state_dict())

    for loaded, saved in zip(target.table_weights(), source.table_weights(), strict=True):
        assert torch.equal(loaded, saved)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_state_dict_that_does_not_fit_is_refused(provider):
    module, _ = build(provider)
    state = module.state_dict()
    wrong_shape = state | {"embedding_bags.users.weight": torch.zeros(8, 4)}
    missing = {key: value for key, value in state.items() if "users" not in key}

    with pytest.raises(RuntimeError, match=r"users\.weight"):
        module.load_state_dict(wrong_shape)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(missing)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(state | {"embedding_bags.x.weight": torch.zeros(1)})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_initial_rows_are_uniform_within_the_root_of_one_over_the_rows(provider):
    module, _ = build(provider)

    for weight in module.table_weights():
        bound = len(weight) ** -0.5
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.7 * bound


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("row", [9, -1])
def test_a_row_out_of_range_is_an_error_and_changes_nothing(provider, row):
    module, _ = build(provider)
    values = IDS.values().clone()
    values[0] = row
    before = values.clone()

    with pytest.raises((IndexError, RuntimeError)):
        module(JaggedIds(IDS.keys(), values, IDS.offsets()))

    assert torch.equal(values, before)


def test_sizes_of_a_table_may_be_integers_of_numpy():
    table = TableConfig(name="t", num_embeddings=np.int64(10), embedding_dim=np.int32(4))

    assert HotColdEmbeddingBagCollection([table]).embedding_bags["t"].weight.shape == (10, 4)
