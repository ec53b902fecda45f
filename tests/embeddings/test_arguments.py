"""An optimizer or a plan of another type is refused by name, before anything is made."""

import numpy as np
import pytest
import torch

import recsys
from recsys.embeddings import (
    SGD,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)
from recsys.errors import ConfigError

TABLES = [TableConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("f",))]
MAKERS = {
    "bag": lambda **more: HotColdEmbeddingBag(9, 4, **more),
    "embedding": lambda **more: HotColdEmbedding(9, 4, **more),
    "bags": lambda **more: HotColdEmbeddingBagCollection(TABLES, **more),
    "embeddings": lambda **more: HotColdEmbeddingCollection(TABLES, **more),
}
BAG = torch.nn.EmbeddingBag(9, 4)
MAKERS["from_torch"] = lambda optimizer, **_: HotColdEmbeddingBag.from_torch(
    BAG, optimizer=optimizer
)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("optimizer", "shown"),
    [
        ("sgd", "got 'sgd'"),
        (SGD, "got the class SGD instead of an object of it"),
        (torch.optim.SGD, "got the class SGD instead of an object of it"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "got an object of type SGD"),
        (0.1, "got an object of type float"),
    ],
)
def test_what_is_no_formula_is_refused_with_the_way_out(name, optimizer, shown):
    with pytest.raises(TypeError, match=r"such as recsys\.embeddings\.SGD\(lr=0\.1\)") as found:
        MAKERS[name](optimizer=optimizer)

    assert shown in str(found.value)
    assert "torch optimizers go to recsys.accelerate(model, optimizer=...)" in str(found.value)


def test_no_folder_is_made_for_what_is_no_formula(tmp_path):
    with pytest.raises(TypeError, match="got 'sgd'"):
        HotColdEmbeddingBag(
            9, 4, optimizer="sgd", budget=64, cold_tier="file", cold_path=tmp_path / "rows"
        )

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("optimizer", "shown"), [("sgd", "got 'sgd'"), (torch.optim.SGD, "got the class SGD instead")]
)
def test_accelerate_refuses_names_and_classes(optimizer, shown):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4))

    with pytest.raises(TypeError, match=shown):
        recsys.accelerate(model, optimizer=optimizer, always=True)


@pytest.mark.parametrize("name", ["bag", "embedding", "bags", "embeddings"])
def test_a_budget_that_is_a_fraction_is_refused(name):
    with pytest.raises(ValueError, match="budget must be a number of bytes such as 256MiB"):
        MAKERS[name](optimizer=SGD(lr=0.1), budget=0.5)


@pytest.mark.parametrize("name", ["bag", "embedding", "bags", "embeddings"])
def test_the_name_of_a_file_in_place_of_a_plan_is_refused(name):
    with pytest.raises(TypeError, match=r"plan must be a HotPlan, got str; HotPlan\.load reads"):
        MAKERS[name](optimizer=SGD(lr=0.1), plan="plan.npz")


@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.1)])
def test_ids_that_are_no_tensor_are_refused_with_the_way_out(optimizer):
    with pytest.raises(TypeError, match=r"ids must be a tensor, got list; .*torch.tensor\(ids\)"):
        HotColdEmbedding(9, 4, optimizer=optimizer)([1, 2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"feature_names": "user"},
        {"feature_names": ("user", "user")},
        {"feature_names": (1,)},
        {"num_embeddings": 10.5},
        {"num_embeddings": "10"},
        {"num_embeddings": True},
        {"embedding_dim": 0},
    ],
)
def test_a_table_of_other_types_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"table 't': .* got "):
        TableConfig(**{"name": "t", "num_embeddings": 10, "embedding_dim": 4} | wrong)


def test_sizes_of_a_table_may_be_integers_of_numpy():
    table = TableConfig(name="t", num_embeddings=np.int64(10), embedding_dim=np.int32(4))

    assert HotColdEmbeddingBagCollection([table]).embedding_bags["t"].weight.shape == (10, 4)


def test_a_table_without_memory_is_refused():
    bag = HotColdEmbeddingBag(9, 4, mode="sum", optimizer=SGD(lr=0.1))
    bag.weight.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match=r"shape \(9, 4\) must have memory, and .* 0 bytes"):
        bag(torch.tensor([[1]]))


def test_rows_that_are_not_contiguous_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"got strides \(1, 9\); use weight.contiguous\(\)"):
        HotColdEmbedding(9, 4, _weight=torch.rand(4, 9).t(), optimizer=SGD(lr=0.1))
