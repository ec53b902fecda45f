"""A claim made ahead, split by samples: each part's lookup takes its own, and nothing waits."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import Adagrad
from tests.embeddings.tiers.twins import FEATURES, TABLES


def build(device=None, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(
        TABLES, device=device, optimizer=Adagrad(lr=0.1), auto_apply=False, **options
    )


def some_ids(seed, device, num_samples=8, is_one_hot=False):
    generator = torch.Generator().manual_seed(seed)
    if is_one_hot:
        rows = torch.randint(0, 250, (len(FEATURES), num_samples), generator=generator)
        return JaggedIds.from_one_hot(FEATURES, rows).to(device)
    lengths = torch.randint(0, 4, (len(FEATURES) * num_samples,), generator=generator)
    values = torch.randint(0, 250, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return JaggedIds(FEATURES, values, offsets).to(device)


def num_claimed(module):
    return sum(tiers.residency.num_claimed for tiers in module.tiers())


def num_rows(module):
    return sum(tiers.residency.counts.num_rows for tiers in module.tiers())


def require_split(device, is_one_hot):
    plain, tiered = build(), build(device, budget="40KiB")
    first, ids = some_ids(0, "cpu"), some_ids(1, "cpu", is_one_hot=is_one_hot)
    # Some of the samples are looked up before: their rows are in slots.
    known, other = torch.tensor([5, 0, 3]), torch.tensor([1, 2, 4, 6, 7])
    for features in (first, ids.select(known)):
        for module in (plain, tiered):
            module(features.to("cpu" if module is plain else device))
    claim = tiered.prefetch(ids.to(device))
    claimed = num_claimed(tiered), num_rows(tiered)
    is_missing = torch.stack(claim.missing_samples()).any(0)

    assert not is_missing[known].any()
    assert is_missing[other].any()
    sides = [(~is_missing).nonzero().flatten(), is_missing.nonzero().flatten()]
    parts = claim.split([(sides[0], False), (sides[1], True)])
    assert not claim.is_held
    assert all(part.is_held for part in parts)
    for part, samples in zip(parts, sides, strict=True):
        pooled, expected = (
            module(ids.select(samples).to("cpu" if module is plain else device)).values()
            for module in (tiered, plain)
        )
        torch.testing.assert_close(pooled.cpu(), expected, rtol=0, atol=0)
        assert not part.is_held  # it was taken
        pooled.square().sum().backward()
        expected.square().sum().backward()
    assert (num_claimed(tiered), num_rows(tiered)) == claimed  # nothing was claimed again
    for module in (plain, tiered):
        module.row_optimizer.step()
    del pooled
    assert num_claimed(tiered) == 0
    for mine, others in zip(tiered.table_weights(), plain.table_weights(), strict=True):
        torch.testing.assert_close(mine.cpu(), others, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_parts_take_their_rows_from_the_whole_claim(is_one_hot):
    require_split("cpu", is_one_hot)


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_on_a_device_too(device, is_one_hot):
    require_split(device, is_one_hot)


def test_a_part_that_is_cancelled_leaves_the_slots_of_the_other():
    tiered = build(budget="40KiB")
    ids = some_ids(1, "cpu")
    halves = [(torch.arange(4), True), (torch.arange(4, 8), True)]
    first, second = tiered.prefetch(ids).split(halves)
    claimed = num_claimed(tiered)

    first.cancel()
    assert num_claimed(tiered) == claimed
    second.cancel()
    assert num_claimed(tiered) == 0
