"""What a pipeline says of a model that does not return (loss, output)."""

import pytest
import torch
from torch import nn

import recsys
from recsys.pipeline import TrainPipeline


class Model(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.returned = returned

    def forward(self, ids):
        logits = self.bag(ids).sum(1)
        return self.returned(logits.square().mean(), logits)


def train(returned):
    torch.manual_seed(0)
    model = Model(returned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    before = model.bag.weight.detach().clone()
    try:
        TrainPipeline(model, optimizer, ids=lambda ids: {"bag": ids}).progress(
            iter([torch.arange(6).view(3, 2)])
        )
    finally:
        has_moved = not torch.equal(model.bag.weight.detach(), before)
    return has_moved


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda loss, logits: loss, r"\(Tensor \(\)\)"),
        (lambda loss, logits: {"loss": loss, "logits": logits}, r"\(dict\)"),
        (lambda loss, logits: (loss, logits, 1), r"\(Tensor \(\), Tensor \(3,\), int\)"),
        (lambda loss, logits: (loss.item(), logits), r"\(float, Tensor \(3,\)\)"),
        # Its logits would be summed, and trained on as losses of samples.
        (lambda loss, logits: (logits, loss), r"\(Tensor \(3,\), Tensor \(\)\)"),
    ],
)
def test_another_result_of_a_model_is_an_error_that_shows_it(returned, shown):
    with pytest.raises(TypeError, match=rf"Model must return \(loss, output\).* got {shown}"):
        train(returned)


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss, logits: (loss, logits),
        lambda loss, logits: [loss, None],
        lambda loss, logits: (logits.square(), loss.detach()),
    ],
)
def test_a_loss_and_an_output_train(returned):
    assert train(returned)
