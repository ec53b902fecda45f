"""Claims that fit by the numbers of rows that earlier claims have, not by bounds of these.

The CPU stands in for a device that copies rows of the host by itself.
"""

import itertools

import pytest
import torch

from recsys._support.cuda.replays import replaying
from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.optimizer import Adagrad
from recsys.embeddings.tiers.slots import Slots
from recsys.errors import BudgetTooSmall
from tests.host_copies import reach_host, use_triton

TABLES = [
    TableConfig(name="users", num_embeddings=300, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=260, embedding_dim=4),
]
NUM_VALUES = 30  # of a mini-batch, and so its bound: two may need all of the 60 slots
NUM_ROWS = 10


@pytest.fixture(autouse=True)
def _reaches_the_host(monkeypatch, device):
    reach_host(monkeypatch)


def make_module(device, num_slots=60, budget=True):
    torch.manual_seed(0)
    module = HotColdEmbeddingBagCollection(
        TABLES,
        device=device,
        optimizer=Adagrad(lr=0.1),
        budget=4 * 560 + num_slots * (16 + 16 + 8) if budget else None,
    )
    for tiers in module.tiers():
        assert tiers.hot.num_slots == num_slots
    return module


def make_batch(seed, device="cpu", num_rows=NUM_ROWS, num_values=NUM_VALUES):
    """One-hot ids of two features, with as many distinct rows as said."""
    generator = torch.Generator().manual_seed(seed)
    values = [
        torch.randperm(250, generator=generator)[: num_rows // 2].repeat(num_values)[
            : num_values // 2
        ]
        for _ in TABLES
    ]
    names = [table.name for table in TABLES]
    return JaggedIds.from_one_hot(names, torch.stack(values)).to(device)


@pytest.fixture
def noted(monkeypatch):
    """Lists of what is done: claims that are waited for, and counts that are read."""
    waited, read = [], []
    claim, read_counts = Slots.claim, Slots.read_counts
    monkeypatch.setattr(
        Slots, "claim", lambda *given, **options: waited.append(1) or claim(*given, **options)
    )
    monkeypatch.setattr(Slots, "read_counts", lambda *given: _noted(read, read_counts(*given)))
    return waited, read


def _noted(read, counts):
    read.append(counts[2])
    return counts


def step(module, ids):
    module(ids).values().square().sum().backward()


def train_ahead(module, batches):
    """Each mini-batch but the last, with the next one claimed before."""
    module.prefetch(batches[0])
    for ids, following in itertools.pairwise(batches):
        assert module.prefetch(following).is_held
        step(module, ids)


@pytest.mark.in_ci("cuda", "cpu-False-1", "cpu-False-2")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("by_triton", [False, True])
def test_mini_batches_ahead_are_claimed_without_waiting_though_their_bounds_exceed_the_slots(
    device, monkeypatch, noted, by_triton, depth
):
    if by_triton:
        use_triton(monkeypatch)
    num_slots = NUM_VALUES + depth * NUM_ROWS
    modules = [make_module(device, num_slots), make_module(device, budget=False)]
    modules[1].load_state_dict(modules[0].state_dict())
    batches = [make_batch(seed, device) for seed in range(8 if by_triton else 40)]
    [tiers] = modules[0].tiers()
    waited, read = noted

    claims = [modules[0].prefetch(ids) for ids in batches[:depth]]
    for number, ids in enumerate(batches):
        for following in batches[number + depth : number + depth + 1]:
            claims.append(modules[0].prefetch(following))
            assert claims[-1].is_held
        step(modules[0], ids)

    assert not waited
    assert read == [NUM_ROWS] * (len(batches) - 1)  # of each claim once, but the last
    tiers.residency.settle()
    assert tiers.residency.num_claimed == 0
    assert (tiers.residency._holds.num_needed, tiers.residency._holds.bound) == (0, 0)
    for ids in batches:
        step(modules[1], ids)
    for expected, found in zip(*(each.table_weights() for each in modules), strict=True):
        assert torch.equal(found.cpu(), expected.cpu())


def test_no_counts_are_read_where_bounds_suffice(device, noted):
    module = make_module(device, 2 * NUM_VALUES)
    batches = [make_batch(seed, device) for seed in range(6)]

    train_ahead(module, batches)

    assert noted == ([], [])


def test_counts_are_read_from_the_first_claim_on_until_the_new_one_fits(device, noted):
    module = make_module(device, 3 * NUM_VALUES)
    for seed, num_rows in enumerate([NUM_ROWS, 16, 12]):
        assert module.prefetch(make_batch(seed, device, num_rows)).is_held
    _, read = noted
    assert not read

    claim = module.prefetch(make_batch(3, device))

    assert claim.is_held
    assert read == [NUM_ROWS, 16]  # 10 + 16 + 30 leave 34 of the 90 slots
    assert not noted[0]


def test_counts_that_cannot_suffice_are_not_read(device, noted):
    module = make_module(device, NUM_VALUES + NUM_ROWS)
    held = [module.prefetch(make_batch(seed, device)) for seed in range(2)]
    assert all(claim.is_held for claim in held)
    waited, read = noted
    read.clear()

    more = module.prefetch(make_batch(2, device, num_values=40))

    assert not more.has_room
    assert (waited, read) == ([], [])


def test_a_claim_that_does_not_fit_by_counts_either_is_waited_for(device, noted):
    module = make_module(device, NUM_VALUES + NUM_ROWS - 1)
    batches = [make_batch(seed, device) for seed in range(6)]
    waited, read = noted

    train_ahead(module, batches)

    assert len(waited) == 5
    assert read == [NUM_ROWS]  # the others are known, because they were waited for


def test_a_mini_batch_that_has_more_rows_than_slots_is_refused(device, noted):
    module = make_module(device, 20)
    step(module, make_batch(0, device))

    with pytest.raises(BudgetTooSmall):
        module(make_batch(1, device, num_rows=24))


def test_the_third_mini_batch_is_not_claimed_by_waiting_for_claims_of_its_own(device, noted):
    """The device would do all that is queued, and then have nothing to do."""
    module = make_module(device, NUM_VALUES + 3 * NUM_ROWS)
    [tiers] = module.tiers()
    batches = [make_batch(seed, device) for seed in range(3)]
    for ids in batches[:2]:
        tiers.ahead.begin_batch()
        assert module.prefetch(ids).has_room
    waited, read = noted
    tiers.ahead.begin_batch()

    claims = [module.prefetch(batches[2]) for _ in range(3)]

    assert [claim.has_room for claim in claims] == [True, False, False]
    assert read == [NUM_ROWS] * 2
    assert not waited


@pytest.mark.parametrize("num_slots", [NUM_VALUES + NUM_ROWS, NUM_VALUES + NUM_ROWS - 1])
def test_a_claim_looks_at_equally_many_slots_in_each_step(device, monkeypatch, noted, num_slots):
    """A graph is for one number, and the rows of mini-batches differ in theirs."""
    given, queue_claim = [], Slots.queue_claim
    monkeypatch.setattr(
        Slots, "queue_claim", lambda *each: given.append(each[3:5]) or queue_claim(*each)
    )
    module = make_module(device, num_slots)
    numbers = [2 * (seed % 5 + 1) for seed in range(20)]
    batches = [make_batch(seed, device, number) for seed, number in enumerate(numbers)]

    with replaying():
        train_ahead(module, batches)

    assert set(noted[1]) > {2, 4, 6}
    assert set(given[1:]) == {(NUM_VALUES, num_slots - NUM_VALUES)}
