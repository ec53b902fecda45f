"""Mini-batches taken apart, outputs put together."""

from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from recsys.batch import Batch, JaggedIds
from recsys.pipeline.micro_batches import (
    concatenate,
    count_samples,
    join_outputs,
    labelled_samples,
    select_samples,
)

Pair = namedtuple("Pair", "ids labels")
SAMPLES = torch.tensor([2, 0])
PARTS = [torch.tensor([1]), torch.tensor([0, 2])]


@dataclass
class Sheet:
    features: torch.Tensor
    name: str


def some_ids():
    """Three samples, two features: lengths 1, 2, 0 and 1, 0, 1."""
    values, offsets = torch.tensor([4, 9, 9, 0, 2]), torch.tensor([0, 1, 3, 3, 4, 4, 5])
    return JaggedIds(["a", "b"], values, offsets, torch.arange(5.0))


def bags_of(features):
    bounds = features.offsets().tolist()
    values = features.values().tolist()
    return [values[begin:end] for begin, end in pairwise(bounds)]


def every_kind():
    dense, labels = torch.arange(6.0).view(3, 2), torch.arange(3)
    return {
        "batch": Batch(dense, some_ids(), labels),
        "pair": Pair([labels, (dense,)], None),
        "sheet": Sheet(dense, "criteo"),
    }


def require(batch, bags, weights, labels, dense):
    """Require what every kind of mini-batch has."""
    assert bags_of(batch["batch"].sparse_features) == bags
    assert batch["batch"].sparse_features.weights_or_none().tolist() == weights
    assert batch["batch"].labels.tolist() == batch["pair"].ids[0].tolist() == labels
    assert isinstance(batch["pair"], Pair)
    for found in (batch["batch"].dense_features, batch["pair"].ids[1][0], batch["sheet"].features):
        assert found.tolist() == dense
    assert batch["sheet"].name == "criteo"


def test_every_kind_of_mini_batch_is_taken_apart_and_joined():
    part = select_samples(every_kind(), SAMPLES, 3)
    whole = concatenate([select_samples(every_kind(), each, 3) for each in PARTS], "skip=test")

    require(part, [[], [4], [2], [0]], [0, 4, 3], [2, 0], [[4, 5], [0, 1]])
    bags = [[9, 9], [4], [], [], [0], [2]]
    require(whole, bags, [1, 2, 0, 3, 4], [1, 0, 2], [[2, 3], [0, 1], [4, 5]])


def test_features_of_torchrec_are_joined():
    pytest.importorskip("torchrec")
    whole = some_ids().to_torchrec()

    joined = concatenate([select_samples(whole, samples, 3) for samples in PARTS], "skip=test")

    assert joined.keys() == ["a", "b"]
    assert bags_of(joined) == bags_of(select_samples(whole, torch.cat(PARTS), 3))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), None),
        (some_ids(), 3),
        (Batch(torch.zeros(3, 1), some_ids(), torch.zeros(3)), 3),
        ({"name": "criteo", "x": [torch.tensor(1.0), torch.zeros(5)]}, 5),
        (Sheet(torch.zeros(2), "a"), 2),
        ("abc", None),
    ],
    ids=repr,
)
def test_samples_are_counted_by_the_first_tensor_or_features(batch, expected):
    assert count_samples(batch) == expected


VALUES, OFFSETS, LABELS = torch.arange(8), torch.tensor([0, 5, 6]), torch.ones(3)


@dataclass
class Bags:
    values: torch.Tensor
    labels: torch.Tensor


class SizedBags(Bags):
    def __len__(self):
        return 2

    def select(self, samples):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"values": VALUES, "offsets": OFFSETS, "labels": LABELS}, 3),
        (Bags(VALUES, LABELS), 3),
        (SizedBags(VALUES, LABELS), 2),
        ((OFFSETS, LABELS), 3),
        ((some_ids(), LABELS), 3),
        ("abc", None),
    ],
    ids=repr,
)
def test_samples_are_counted_by_labels_where_values_of_bags_come_first(batch, size):
    assert labelled_samples(batch) == size


def test_without_labels_lengths_must_be_the_same():
    with pytest.raises(ValueError, match=r"a tuple has whose tensors have the lengths \[3, 8\]"):
        labelled_samples((VALUES, OFFSETS))


def test_outputs_come_in_the_order_of_the_samples():
    outputs = [
        (torch.tensor(3.0), {"logits": torch.tensor([10.0]), "count": torch.tensor(1)}, [2.0], 5),
        (
            torch.tensor(6.0),
            {"logits": torch.tensor([0.0, 2.0]), "count": torch.tensor(2)},
            [5.0],
            6,
        ),
    ]

    loss, found, mean, number = join_outputs(outputs, PARTS)

    assert loss.item() == pytest.approx(5.0)
    assert found["logits"].tolist() == [0, 10, 2]
    assert found["count"].item() == 3
    assert mean == pytest.approx([4.0])
    assert number == 11
    assert join_outputs([None, None], PARTS) is None
    assert join_outputs([Sheet(torch.ones(1), "a"), Sheet(torch.zeros(2), "a")], PARTS).name == "a"


def test_a_loss_that_is_a_sum_is_added_up_wherever_it_is():
    losses = [torch.tensor(3.0), torch.tensor(6.0)]
    outputs = [
        (loss, {"loss": loss.item(), "mean": torch.tensor(mean), "as good": loss + 0.5})
        for loss, mean in zip(losses, (1.0, 4.0), strict=True)
    ]

    loss, found = join_outputs(outputs, PARTS, losses)

    assert loss.item() == 9
    assert found["loss"] == 9
    assert found["mean"].item() == pytest.approx(3.0)
    assert found["as good"].item() == pytest.approx(5.5)
