"""Bags of a subclass that overrides `prefetch`."""

import torch
from torch import nn

from recsys.embeddings import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD
from recsys.pipeline import LookAhead, TrainPipeline


class Hashed(HotColdEmbeddingBag):
    def forward(self, ids):
        return super().forward(ids % self.num_embeddings)

    def prefetch(self, ids):
        return super().prefetch(ids % self.num_embeddings)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = Hashed(150, 4, mode="sum", optimizer=SGD(lr=0.1), budget=2000)
        self.layer = nn.Linear(4, 1)

    def forward(self, ids):
        return self.layer(self.bag(ids)).square().mean(), None


def test_it_is_called_with_the_input_of_the_bag():
    generator = torch.Generator().manual_seed(1)
    batches = list(torch.randint(0, 10**6, (8, 12, 1), generator=generator))
    model = Model()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    pipeline = TrainPipeline(
        model, optimizer, schedule=LookAhead(1), ids=lambda batch: {"bag": batch}
    )

    losses = [loss for loss, _ in pipeline.steps(batches)]

    assert len(losses) == len(batches)
    assert pipeline.mean_depth > 0.5
