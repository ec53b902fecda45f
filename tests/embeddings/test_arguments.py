"""An optimizer or a plan of another type is refused by name, before anything is made."""

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
        recsys.accelerate(model, optimizer=optimizer)


@pytest.mark.parametrize("name", ["bag", "embedding", "bags", "embeddings"])
def test_a_budget_that_is_a_fraction_is_refused(name):
    with pytest.raises(ValueError, match="budget must be a number of bytes such as 256MiB"):
        MAKERS[name](optimizer=SGD(lr=0.1), budget=0.5)


@pytest.mark.parametrize("name", ["bag", "embedding", "bags", "embeddings"])
def test_the_name_of_a_file_in_place_of_a_plan_is_refused(name):
    with pytest.raises(TypeError, match=r"plan must be a HotPlan, got str; HotPlan\.load reads"):
        MAKERS[name](optimizer=SGD(lr=0.1), plan="plan.npz")
