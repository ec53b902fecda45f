"""An evaluation under `torch.inference_mode` may be the first to look rows up."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.optimizer import SGD, Adagrad

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


@pytest.mark.parametrize("cold_tier", [None, "host", "file"])
def test_a_model_that_is_accelerated_in_inference_mode_trains(cold_tier, tmp_path):
    options = {} if cold_tier is None else {"budget": 6000, "cold_tier": cold_tier}
    if cold_tier == "file":
        options["cold_path"] = tmp_path / "rows"

    def trained(mode, options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(400, 4))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
        with mode:
            recsys.accelerate(model, optimizer=optimizer, **options, always=True)
        for ids in (FEW, MANY, FEW):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
        return model.state_dict()["0.weight"]

    assert torch.equal(trained(torch.inference_mode(), options), trained(nullcontext(), {}))
