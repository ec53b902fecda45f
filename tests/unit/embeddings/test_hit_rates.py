"""What share of lookups found their row in fast memory."""

import torch

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
