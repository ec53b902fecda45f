"""Claims that the host does not wait for, made by operations of torch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, NOWHERE, PINNED
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import number_rows
from recsys.embeddings.kernels.torch.slots import most_rows
from recsys.embeddings.rows.lookups import Lookups
from tests.torch_kernels import TorchSlotMap, queue_claim

SIZES = (40, 12)
# Two features of the first table, one of the second.
LOOKUPS = Lookups(
    tables=np.array([0, 1, 0], np.uint64),
    positions=np.arange(3).astype(np.uint64),
    columns=np.arange(3).astype(np.uint64),
    width=3,
)
HIGH = [40, 12, 40]


def make_map(num_slots, pinned=()):
    """A map some of whose slots are pinned, each for a row that is not in it yet."""
    found = TorchSlotMap(number_rows(SIZES, 1, torch.zeros(0, 1)), num_slots)
    for row, slot in enumerate(pinned):
        found.row_of_slot[slot], found.flags[slot] = row, PINNED
        found.slot_of_row[row] = AWAITED + slot
    found.recount()
    return found


def make_bags(seed, batch_size, longest):
    """Ids of three features; one-hot if `longest` is None."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3 * batch_size,)
    lengths = torch.ones(shape, dtype=torch.int64)
    if longest is not None:
        lengths = torch.randint(0, longest + 1, shape, generator=generator)
    highs = torch.tensor(HIGH).repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(highs), generator=generator) * highs).long()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    is_one_hot = longest is None or None
    return TorchBags.from_tensors(
        values, offsets, None, batch_size, is_mean=False, is_one_hot=is_one_hot
    )


def rows_of(bags):
    """The row of each value, counted over both tables."""
    offsets = bags.bounds()[:: bags.batch_size].contiguous()
    features = torch.searchsorted(offsets, torch.arange(len(bags.values)), right=True) - 1
    return bags.values + SIZES[0] * (features == 1)


batches = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 3), st.sampled_from([None, 0, 2])), max_size=16
)


@given(
    batches=batches,
    num_slots=st.integers(1, 60),
    pinned=st.sets(st.integers(0, 40), max_size=12),
    num_held=st.integers(0, 9),
    are_read=st.booleans(),
    are_counted=st.booleans(),
)
def test_a_claim_that_the_host_knows_to_fit_finds_its_slots(
    batches, num_slots, pinned, num_held, are_read, are_counted
):
    slots = make_map(num_slots, sorted(slot for slot in pinned if slot < num_slots))
    held = []
    for batch in batches:
        while len(held) > num_held:
            slots.release(held.pop(0)[0])
        bags = make_bags(*batch)
        if are_counted and bags.offsets is not None:
            bags = bags._replace(counts=bags.bounds()[:: bags.batch_size].diff().tolist())
        most = most_rows(slots, LOOKUPS, bags)
        num_needed = most + sum(each for _, each in held)
        rows = rows_of(bags)
        assert len(rows.unique()) <= most
        if num_needed > num_slots - slots.num_pinned:
            continue
        was_in_slot = slots.slot_of_row[rows]
        was_in_slot = (was_in_slot != NOWHERE) & (was_in_slot < AWAITED)

        claim = queue(slots, bags, num_needed)

        # The host knows the most rows of the claim, or reads its counts.
        held.append((claim.held, int(claim.counts[2]) if are_read else most))
        assert claim.moves.is_enough
        assert torch.equal(slots.row_of_slot[claim.slot_of_value].long(), rows)
        assert (slots.num_claims[claim.slot_of_value] > 0).all()
        num_rows, num_missing = len(rows.unique()), len(rows[~was_in_slot].unique())
        num_lookups, num_hits, *others = claim.counts.tolist()
        assert (num_lookups, num_hits) == (len(rows), int(was_in_slot.sum()))
        assert others == [num_rows, num_rows - num_missing, num_missing, 0]
    while held:
        slots.release(held.pop()[0])
    assert not slots.num_claims.any()


def queue(slots, bags, num_needed):
    """Queue the claim of a mini-batch; with it, all tickets need at most so many slots."""
    num_rows = most_rows(slots, LOOKUPS, bags)
    return queue_claim(slots, LOOKUPS, bags, num_rows, num_needed - num_rows)


def one_hot(*ids):
    return TorchBags(torch.tensor(ids).flatten(), None, None, len(ids[0]), is_mean=False)


def test_slots_are_found_behind_those_that_are_pinned():
    slots = make_map(50, range(1, 21))

    claim = queue(slots, one_hot([36], [8], [37]), 3)

    assert (claim.held >= 0).all()


def test_slots_are_found_behind_those_that_tickets_need():
    slots = make_map(27)
    queue(slots, one_hot([0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]), 12)
    ended = queue(slots, one_hot([8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]), 24)
    queue(slots, one_hot([16], [8], [17]), 27)
    slots.release(ended.held)

    claim = queue(slots, one_hot([18], [9], [19]), 18)

    assert (claim.held >= 0).all()
