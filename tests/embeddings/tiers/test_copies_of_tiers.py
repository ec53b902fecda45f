"""A copy of a module in two tiers computes what the original does, and refuses what it refuses."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adam
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers.slots import Slots
from recsys.errors import BudgetTooSmall

NUM_ROWS = 300
TABLES = [
    TableConfig(name="users", num_embeddings=NUM_ROWS, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=NUM_ROWS, embedding_dim=8),
]

each_copy = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
each_optimizer = pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adam(lr=0.1)])
# Bytes of all rows and their state fit "all rows", which leaves too little for as many slots.
BAG_BUDGETS = {"few rows": 3000, "all rows": 4850}
COLLECTION_BUDGETS = {"few rows": 9000, "all rows": 14_500}


def tier_options(tier, path):
    return {"cold_tier": tier, "cold_path": path / "rows" if tier == "file" else None}


def outcome(module, ids):
    """The sum of what is pooled, or the error."""
    try:
        pooled = module(ids)
        pooled = pooled if isinstance(pooled, torch.Tensor) else pooled.values()
        pooled.square().sum().backward()
        return pooled.sum().item()
    except BudgetTooSmall as error:
        return str(error)


@each_copy
@each_optimizer
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("budget", BAG_BUDGETS)
@pytest.mark.filterwarnings("ignore:.*no cold tier is needed")
def test_a_copy_of_a_bag_fits_and_refuses_the_same_mini_batches(
    copied, optimizer, tier, budget, tmp_path
):
    module = HotColdEmbeddingBag(
        NUM_ROWS,
        4,
        mode="sum",
        optimizer=optimizer,
        budget=BAG_BUDGETS[budget],
        **tier_options(tier, tmp_path),
    )
    outcome(module, torch.arange(3).view(1, -1))
    other = copied(module)

    for count in (5, 60, 200, NUM_ROWS):
        ids = torch.arange(count).view(1, -1)
        assert outcome(other, ids) == outcome(module, ids)

    assert torch.equal(other.weight, module.weight)


def features(*counts):
    values = torch.cat([torch.arange(count) for count in counts])
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return JaggedIds(["users", "goods"], values, offsets)


@each_copy
@each_optimizer
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("budget", COLLECTION_BUDGETS)
@pytest.mark.filterwarnings("ignore:.*no cold tier is needed")
def test_a_copy_of_a_collection_shares_out_the_budget_anew_as_the_original(
    copied, optimizer, tier, budget, tmp_path
):
    module = HotColdEmbeddingBagCollection(
        TABLES,
        optimizer=optimizer,
        budget=COLLECTION_BUDGETS[budget],
        **tier_options(tier, tmp_path),
    )
    outcome(module, features(3, 3))
    other = copied(module)

    for counts in [(5, 5), (250, 5), (5, 150), (NUM_ROWS, NUM_ROWS)]:
        assert outcome(other, features(*counts)) == outcome(module, features(*counts))

    for table, expected in zip(other.table_weights(), module.table_weights(), strict=True):
        assert torch.equal(table, expected)


@each_copy
def test_a_copy_out_of_files_whose_rows_would_fit_refuses_by_name(copied, tmp_path):
    module = HotColdEmbeddingBag(
        NUM_ROWS,
        4,
        optimizer=SGD(lr=0.1),
        budget=BAG_BUDGETS["all rows"],
        **tier_options("file", tmp_path),
    )
    other = copied(module)

    with pytest.raises(BudgetTooSmall, match="300 of embedding_dim 4"):
        other(torch.arange(NUM_ROWS).view(1, -1))

    assert other.tiers()[0].residency.num_claimed == 0


def test_a_copy_of_a_part_has_no_slots():
    model = nn.ModuleList(nn.EmbeddingBag(NUM_ROWS, 4, mode="sum", sparse=True) for _ in range(2))
    recsys.accelerate(model, optimizer=SGD(lr=0.1), budget=6000)
    gc.collect()
    before = sum(isinstance(each, Slots) for each in gc.get_objects())

    part = copy.deepcopy(model[0])
    gc.collect()

    assert type(part.weight) is nn.Parameter
    assert sum(isinstance(each, Slots) for each in gc.get_objects()) == before > 0
