"""Claims of slots in the CPU's memory; `tiers/test_residency` has which slots rows get."""

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.cpu import slots
from recsys.embeddings.kernels.cpu.slots import NoSuchRow, Shortage, SlotMap
from recsys.embeddings.rows.lookups import Bags, Lookups

SIZES = [40, 3, 200]
NUM_SLOTS = 90


def make_map():
    return SlotMap(np.cumsum([0, *SIZES]).astype(np.uint64), NUM_SLOTS)


def one_hot(seed, num_samples=12):
    """A feature for each table."""
    generator = np.random.default_rng(seed)
    values = [generator.integers(0, size, num_samples) for size in SIZES]
    return Bags(np.concatenate(values), None, None, num_samples, is_mean=False)


def all_tables():
    numbers = np.arange(len(SIZES), dtype=np.uint64)
    return Lookups(tables=numbers, positions=numbers, columns=numbers * np.uint64(4), width=12)


def numbers_of(claim):
    """All that a claim consists of, copied."""
    arrays = claim.slot_of_value, claim.held, *claim.moves
    counts = claim.num_lookups, claim.num_hits, claim.num_rows, claim.num_rows_hit
    return [each.tolist() for each in arrays], counts


def test_a_claim_stays_as_it_is_when_others_are_made():
    slot_map, lookups = make_map(), all_tables()
    claims = [slot_map.claim(lookups, one_hot(seed)) for seed in range(2)]
    before = [numbers_of(each) for each in claims]

    slot_map.claim(lookups, one_hot(2, num_samples=5))
    slot_map.claim(Lookups.one(2, 4), Bags(np.arange(20), None, None, 20, is_mean=False))
    with pytest.raises(NoSuchRow):
        slot_map.claim(Lookups.one(1, 4), Bags(np.array([0, 3]), None, None, 2, is_mean=False))
    with pytest.raises(Shortage):
        slot_map.claim(Lookups.one(2, 4), Bags(np.arange(200), None, None, 200, is_mean=False))

    assert [numbers_of(each) for each in claims] == before


@pytest.mark.threads
def test_one_thread_and_several_claim_alike(monkeypatch):
    torch.set_num_threads(2)
    found = []
    for least_shared in (0, 10**9):
        monkeypatch.setattr(slots, "_MIN_SHARED", least_shared)
        slot_map, lookups = make_map(), all_tables()
        claims = []
        for seed in range(30):
            claims.append(slot_map.claim(lookups, one_hot(seed)))
            slot_map.mark_dirty(claims[-1].held)
            slot_map.release(claims[-1].held)
        found.append([numbers_of(each) for each in claims])

    assert found[0] == found[1]
    assert any(counts[1] for _, counts in found[0])  # hits
    assert any(arrays[4] for arrays, _ in found[0])  # rows written back


def test_bags_of_another_length_are_other_requests():
    slot_map, lookups = make_map(), Lookups.one(2, 4)
    for values, bounds in (
        (np.array([5, 6, 7]), None),
        (np.array([5, 6]), None),
        (np.array([5, 6, 9, 9]), np.array([0, 3, 4])),
        (np.array([7, 8, 9]), None),
    ):
        num_bags = len(values) if bounds is None else len(bounds) - 1
        claim = slot_map.claim(lookups, Bags(values, bounds, None, num_bags, is_mean=False))

        rows = slot_map.arrays.row_of_slot[claim.slot_of_value] - sum(SIZES[:2])
        assert rows.tolist() == values.tolist()
