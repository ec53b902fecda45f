"""What share of lookups found their row in fast memory."""

import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag


def test_a_module_counts_what_was_in_fast_memory():
    resident = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=0.5))
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=0.5), budget="2KiB")

    assert resident.hit_rates is None
    assert bag.hit_rates == (0, 0)
    for _ in range(2):
        bag(torch.tensor([[1, 1, 2]])).sum().backward()
    assert bag.hit_rates.lookups == 0.5
    assert bag.hit_rates.distinct_rows == 0.5


def test_modules_with_one_budget_show_the_hit_rates_of_all():
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum"), nn.Embedding(200, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget="4KiB")

    for ids in (torch.tensor([[1]]), torch.tensor([[1]])):
        model[0](ids).sum().backward()
        optimizer.step()

    assert model[0].hit_rates == model[1].hit_rates == (0.5, 0.5)

    [(fetcher, claimed)] = model[0].prefetch(ids)
    fetcher.begin(claimed)
    (model[0](ids).sum() + model[1](ids).sum()).backward()
    assert fetcher.counts[:2] == (4, 2)  # the row of the other module was not claimed ahead
