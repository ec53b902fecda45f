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


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("dense_features", (2, 1), torch.nan, r"dense_features .*, got nan in sample 2, column 1;"),
        ("labels", (3,), torch.inf, r"labels .* got inf in sample 3;"),
        ("weights", (0,), torch.nan, r"weights .* got nan in sample 0;"),
    ],
)
def test_a_bad_number_in_a_mini_batch_is_named(name, place, value, message):
    model, batch = Model(), make_batch()
    getattr(batch, name)[place] = value
    before = model.layer.weight.detach().clone()
    pipeline = recsys.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(TrainingDiverged, match=message) as found:
        pipeline.progress(iter([batch]))

    assert "learning rate" not in str(found.value)
    assert torch.equal(model.layer.weight, before)


def test_a_model_that_diverged_is_told_to_lower_the_learning_rate():
    model = Model()
    model.layer.weight.data.fill_(torch.nan)
    pipeline = recsys.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(TrainingDiverged, match="lower the learning rate, or find the sample"):
        pipeline.progress(iter([make_batch()]))


def test_a_mini_batch_without_samples_is_named():
    model, batch = Model(), make_batch().select(torch.empty(0, dtype=torch.int64))
    pipeline = recsys.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(TrainingDiverged, match="the mini-batch has no samples; leave it out"):
        pipeline.progress(iter([batch]))
