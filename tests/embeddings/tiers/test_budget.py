from operator import ge

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers.budget import SpaceSize, divide_budget, enough_bytes
from recsys.embeddings.tiers.slots import Slots
from recsys.errors import BudgetTooSmall

CPU = torch.device("cpu")


def space(num_rows, dim, *state):
    sizes = {str(number): size for number, size in enumerate(state)}
    return SpaceSize([num_rows], dim, torch.float32, sizes)


spaces = st.lists(
    st.builds(space, st.integers(1, 300), st.sampled_from([1, 4, 16]), st.sampled_from([1, 4])),
    min_size=1,
    max_size=4,
)


@given(spaces, st.integers(1, 40_000))
def test_slots_and_row_maps_stay_within_the_budget(sizes, budget_bytes):
    try:
        slots = divide_budget(budget_bytes, sizes, [1] * len(sizes))
    except BudgetTooSmall:
        assert budget_bytes < sum(4 * size.num_rows + size.slot_bytes for size in sizes)
        return
    if slots is None:
        assert sum(size.resident_bytes for size in sizes) <= budget_bytes
        return
    tiers = [
        Slots([size.num_rows], size.dim, size.dtype, size.state_sizes, num_slots, CPU)
        for size, num_slots in zip(sizes, slots, strict=True)
    ]
    assert all(
        1 <= tier.num_slots <= size.num_rows for tier, size in zip(tiers, sizes, strict=True)
    )
    if budget_bytes >= sum(4 * size.num_rows + 4 * size.slot_bytes for size in sizes):
        assert sum(tier.num_bytes for tier in tiers) <= budget_bytes


@given(spaces, st.integers(1, 40_000))
def test_what_is_left_over_is_less_than_a_slot_of_each(sizes, budget_bytes):
    try:
        slots = divide_budget(budget_bytes, sizes, [1] * len(sizes))
    except BudgetTooSmall:
        return
    if slots is None or slots == [size.num_rows for size in sizes]:
        return
    used = sum(
        4 * size.num_rows + num_slots * size.slot_bytes
        for size, num_slots in zip(sizes, slots, strict=True)
    )
    assert budget_bytes - used < sum(size.slot_bytes for size in sizes)


def test_every_table_gets_as_many_slots_or_one_for_each_row():
    sizes = [SpaceSize([10_000, 5], 4, torch.float32, {}), space(3, 8), space(400, 4)]

    slots = divide_budget(4 * 10_408 + 24 * 205 + 3 * 40, sizes, [1, 1, 1])

    assert slots == [100 + 5, 3, 100]


def test_slots_that_a_row_space_must_have_come_first():
    sizes = [space(300, 4), space(10_000, 4)]
    budget_bytes = 4 * 10_300 + 24 * 200

    assert divide_budget(budget_bytes, sizes, [1, 1]) == [100, 100]
    assert divide_budget(budget_bytes, sizes, [160, 1]) == [160, 40]
    with pytest.raises(BudgetTooSmall, match="60 of embedding_dim 4, 141 of embedding_dim 4"):
        divide_budget(budget_bytes, sizes, [60, 141])


@given(spaces, st.data())
def test_the_budget_that_is_enough_for_some_slots_gives_them(sizes, data):
    needed = [data.draw(st.integers(1, size.num_rows)) for size in sizes]

    least, pinned = [1] * len(sizes), [data.draw(st.integers(0, 2)) for _ in sizes]
    wanted = [
        min(size.num_rows, sum(each)) for size, *each in zip(sizes, needed, pinned, strict=True)
    ]

    enough = enough_bytes(sizes, needed, pinned, 0)

    slots = divide_budget(enough, sizes, least, pinned=pinned, may_stay=False)
    assert all(map(ge, slots, wanted))
    maps = sum(4 * size.num_rows for size in sizes)
    assert enough <= maps + max(
        sum(
            size.slot_bytes * min(size.num_rows, count + num_pinned)
            for size, num_pinned in zip(sizes, pinned, strict=True)
        )
        for count in needed
    )


def test_slots_of_pinned_rows_come_beside_those_of_mini_batches():
    sizes = [space(300, 4), space(10_000, 4)]
    budget_bytes = 4 * 10_300 + 24 * 200

    assert divide_budget(budget_bytes, sizes, [1, 1], pinned=[80, 20]) == [130, 70]
    assert divide_budget(budget_bytes, sizes, [60, 1], pinned=[80, 20]) == [140, 60]
    with pytest.raises(BudgetTooSmall, match="140 of embedding_dim 4, 61 of embedding_dim 4"):
        divide_budget(budget_bytes, sizes, [60, 41], pinned=[80, 20])


def test_what_one_mini_batch_needed_is_not_kept_from_the_next_one():
    tables = [
        TableConfig(name="small", num_embeddings=300, embedding_dim=4),
        TableConfig(name="large", num_embeddings=3000, embedding_dim=8),
    ]
    module = HotColdEmbeddingBagCollection(
        tables, optimizer=SGD(lr=0.1), budget=4 * 3300 + 40 * 24 + 5 * 40
    )

    def look_up(num_small, num_large):
        values = torch.cat([torch.arange(num_small), torch.arange(num_large)])
        offsets = torch.tensor([0, num_small, num_small + num_large])
        module(JaggedIds(["small", "large"], values, offsets)).values().sum().backward()

    look_up(40, 5)
    look_up(5, 25)  # of which 40 and 25 together would not fit
    with pytest.raises(BudgetTooSmall, match="300 of embedding_dim 4, 1 of embedding_dim 8"):
        look_up(300, 1)
    look_up(40, 5)


def test_rows_that_earlier_losses_hold_are_named_as_what_takes_the_budget():
    bag = HotColdEmbeddingBag(1000, 4, mode="sum", budget=4000 + 24 * 50, optimizer=SGD(lr=0.1))
    losses = [bag(torch.arange(30).view(-1, 1)).sum()]

    with pytest.raises(
        BudgetTooSmall,
        match=r"those of earlier ones whose loss or outputs still exist, .* \(60 of .* or delete "
        "the loss and outputs of earlier ones, or accumulate",
    ):
        bag(torch.arange(30, 60).view(-1, 1))

    del losses[:]
    bag(torch.arange(30, 60).view(-1, 1))


def test_rows_of_accumulated_gradients_are_named_as_what_takes_the_budget():
    bag = HotColdEmbeddingBag(
        1000, 4, mode="sum", budget=4000 + 24 * 50, optimizer=SGD(lr=0.1), auto_apply=False
    )
    bag(torch.arange(30).view(-1, 1)).sum().backward()

    with pytest.raises(
        BudgetTooSmall,
        match=r"or whose gradients no step has used yet \(60 of .* or accumulate gradients over "
        "fewer$",
    ):
        bag(torch.arange(30, 60).view(-1, 1))

    bag.row_optimizer.step()
    bag(torch.arange(30, 60).view(-1, 1))


def test_a_budget_that_is_too_small_is_told_by_one_error_without_another_before_it():
    bag = HotColdEmbeddingBag(1000, 4, budget=6000, optimizer=SGD(lr=0.1))

    with pytest.raises(BudgetTooSmall) as at_first:
        HotColdEmbeddingBag(1000, 4, budget=10, optimizer=SGD(lr=0.1))
    with pytest.raises(BudgetTooSmall) as in_lookup:
        bag(torch.arange(500), torch.zeros(1, dtype=torch.int64))

    assert at_first.value.__context__ is None
    assert in_lookup.value.__context__ is None
