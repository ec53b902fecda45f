"""An evaluation under `torch.inference_mode` may be the first to look rows up."""

import pytest
import torch

from recsys.embeddings import SGD, Adagrad, HotColdEmbedding, HotColdEmbeddingBag

FEW, MANY = torch.tensor([[0, 7]]), torch.arange(100).view(50, 2)


@pytest.mark.parametrize("kind", [HotColdEmbedding, HotColdEmbeddingBag])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.5), Adagrad(lr=0.5)])
@pytest.mark.parametrize("budget", [None, 6000])
def test_training_goes_on_after_an_evaluation_in_inference_mode(kind, optimizer, budget):
    def build():
        torch.manual_seed(0)
        return kind(400, 4, optimizer=optimizer, budget=budget)

    evaluated, other = build(), build()
    with torch.inference_mode():
        seen = [evaluated(ids).clone() for ids in (FEW, MANY)]

    assert all(torch.equal(each, other(ids)) for each, ids in zip(seen, (FEW, MANY), strict=True))
    for module in (evaluated, other):
        for ids in (FEW, MANY, FEW):
            module(ids).square().sum().backward()
    assert torch.equal(evaluated.weight.detach(), other.weight.detach())
    with torch.inference_mode():
        assert torch.equal(evaluated(FEW), other(FEW))
