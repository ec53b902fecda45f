"""DIN and TBSM train to the same bits for every budget and schedule."""

import warnings

import pytest
import torch

from recsys import DLRMTrain
from recsys.embeddings import Adagrad
from recsys.models import DIN, TBSM
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline
from tests.models.sequence_data import (
    DIM,
    HISTORIES,
    NUM_DENSE,
    budgets,
    make_batch,
    make_collection,
)

LENGTHS = [[4, 0, 1, 6], [4, 4, 4, 4], [2, 4, 0, 4]]
BATCHES = [make_batch(LENGTHS[seed % 3], seed, num_popular=2) for seed in range(12)]
OPTIMIZER = Adagrad(lr=0.1)


def make_model(name, budget):
    torch.manual_seed(0)
    collection = make_collection(optimizer=OPTIMIZER, budget=budget)
    if name == "din":
        return DIN(collection, NUM_DENSE, HISTORIES, [7, 1], attention_layer_sizes=[6])
    sizes = [6, DIM], [7, 1]
    return TBSM(collection, NUM_DENSE, HISTORIES, 4, *sizes, tower_layer_sizes=[6, 5])


def train(name, schedule, budget=None):
    """The losses; the model's numbers and the state of its rows, by name; whether rows are in two
    tiers; and how many mini-batches were split.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "budget=")  # all rows may fit
        warnings.filterwarnings("ignore", "schedule=")  # too few slots, or none are needed
        warnings.filterwarnings("ignore", ".* were used in cold memory")
        model = DLRMTrain(make_model(name, budget))
        collection = model.model.embedding_collection
        tables = set(collection.parameters())
        dense = [each for each in model.parameters() if each not in tables]
        optimizer = torch.optim.Adagrad(dense, lr=0.1)
        pipeline = TrainPipeline(model, optimizer, schedule=schedule)
        losses = [loss.item() for loss, _ in pipeline.steps(BATCHES)]
        pipeline.detach()
    numbers = dict(model.state_dict())
    for table, state in collection.row_optimizer.state_dict()["state"].items():
        numbers |= {f"{table} {key}": torch.as_tensor(value) for key, value in state.items()}
    num_split = pipeline.popular_split.num_split if pipeline.popular_split else 0
    return losses, numbers, collection.groups()[0].num_slots > 0, num_split


@pytest.fixture(scope="module", params=["din", "tbsm"])
def resident(request):
    losses, numbers, is_tiered, _ = train(request.param, Sequential())
    assert not is_tiered
    assert losses[0] != losses[3]
    return request.param, losses, numbers


@pytest.mark.in_ci("seq-floor", "ahead-half", "ahead-everything")
@pytest.mark.parametrize("budget", ["floor", "half", "everything"])
@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(depth=2)], ids=["seq", "ahead"])
def test_tiers_and_looking_ahead_change_no_bit(resident, schedule, budget):
    name, expected_losses, expected = resident

    losses, numbers, is_tiered, _ = train(name, schedule, budgets(OPTIMIZER)[budget])

    assert is_tiered == (budget != "everything")
    assert losses == expected_losses
    assert list(numbers) == list(expected)
    for key, value in numbers.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("budget", ["floor", "half", "everything"])
def test_hotline_is_equal_up_to_rounding(resident, budget):
    name, expected_losses, expected = resident
    schedule = Hotline(learning_steps=2)

    losses, numbers, _, num_split = train(name, schedule, budgets(OPTIMIZER)[budget])

    assert (num_split > 0) == (budget == "half")
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for key, value in numbers.items():  # the order of sums in PyTorch depends on the processor
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5, msg=key)
