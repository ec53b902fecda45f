"""A loss that is not finite names the number in the mini-batch that made it so, if there is one."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import recsys
from recsys.errors import TrainingDiverged


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch):
        logits = self.layer(batch.dense_features).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels, batch.weights), logits


def make_batch():
    ids = recsys.JaggedIds.from_one_hot(["f"], torch.zeros(1, 4, dtype=torch.int64))
    return recsys.Batch(torch.ones(4, 3), ids, torch.ones(4), torch.ones(4))


def put(name, place, value):
    """The change that puts a value into a mini-batch."""
    return lambda model, batch: getattr(batch, name).__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (put("dense_features", (2, 1), torch.nan), "dense_features"),
        (put("labels", 3, torch.inf), "labels"),
        (put("weights", 0, torch.nan), "weights"),
        (lambda model, batch: model.layer.weight.data.fill_(torch.nan), "learning rate"),
        (lambda model, batch: batch.select(torch.empty(0, dtype=torch.int64)), "no samples"),
    ],
)
def test_what_made_a_loss_that_is_not_finite_is_named(change, name):
    model, batch = Model(), make_batch()
    changed = change(model, batch)
    batch = changed if isinstance(changed, recsys.Batch) else batch
    before = model.layer.weight.detach().clone()
    pipeline = recsys.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(TrainingDiverged, match=name):
        pipeline.progress(iter([batch]))

    assert torch.equal(model.layer.weight.nan_to_num(), before.nan_to_num())
