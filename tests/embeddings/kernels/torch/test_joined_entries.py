"""Entries of a ledger as one entry."""

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.torch import joined_entries
from recsys.embeddings.kernels.torch.bags import TorchBags, layers_of, locate_one_hot
from recsys.embeddings.kernels.torch.joined_entries import join_entries
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups
from tests.torch_kernels import columns_of, locate

SIZES, DIM, NUM_SAMPLES = (5, 7, 6), 2, 4
LOOKUPS = [Lookups.one(table, DIM) for table in range(3)]


def bags_of(seed, num_features=1, num_samples=NUM_SAMPLES, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 5, (num_features * num_samples,), generator=generator, dtype=dtype)
    return TorchBags(ids, None, None, num_samples, is_mean=False)


def looked_up(ledger):
    """The rows in the order of an update, and the gradient of each."""
    space = TorchRowSpace([torch.zeros(size, DIM) for size in SIZES])
    rows, gradients = [], []
    for lookups, bags, gradient, *_ in ledger:
        for lookup in range(len(lookups.tables)):
            one = Lookups(
                tables=lookups.tables[lookup : lookup + 1],
                positions=lookups.positions[lookup : lookup + 1],
                columns=lookups.columns[lookup : lookup + 1],
                width=lookups.width,
            )
            layer, _ = layers_of(space, one, bags.num_features)
            rows.append(locate_one_hot(space, layer, bags).flatten())
            column = int(lookups.columns[lookup])
            gradients.append(gradient[:, column : column + DIM])
    return torch.cat(rows).tolist(), torch.cat(gradients).tolist()


def side_by_side():
    """Columns of one array, in another order than the entries."""
    whole = torch.randn(NUM_SAMPLES, 5 * DIM)
    return [whole[:, column * DIM : (column + 1) * DIM] for column in (3, 1, 2)]


GRADIENTS = {
    "of cat": side_by_side,
    "of stack": lambda: torch.randn(NUM_SAMPLES, 3, DIM).unbind(1),
    "of a sum": lambda: [torch.ones(NUM_SAMPLES, DIM)] * 3,
    "apart": lambda: [torch.randn(NUM_SAMPLES, DIM) for _ in range(3)],
    "of rows": lambda: torch.randn(3, NUM_SAMPLES, DIM).unbind(),
    "negated": lambda: [torch._neg_view(each) for each in side_by_side()],
    "expanded": lambda: [torch.randn(NUM_SAMPLES, 1).expand(-1, DIM) for _ in range(3)],
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_joined_entries_look_up_the_same_rows_with_the_same_gradients(kind):
    torch.manual_seed(0)
    ledger = [
        LedgerEntry(lookups, bags_of(seed), gradient)
        for seed, (lookups, gradient) in enumerate(zip(LOOKUPS, GRADIENTS[kind](), strict=True))
    ]

    found = join_entries(ledger)

    assert len(found) == 1
    assert looked_up(found) == looked_up(ledger)
    shares_memory = found[0].gradient.untyped_storage().data_ptr() == (
        ledger[0].gradient.untyped_storage().data_ptr()
    )
    assert shares_memory == (kind in ("of cat", "of stack", "of a sum"))


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_joined_bags_look_up_the_same_rows_with_the_same_gradients(is_mean, padding, dtype):
    torch.manual_seed(0)

    def entry(lookups, offsets, num_values, gradient):
        values = torch.randint(0, 5, (num_values,), dtype=dtype)
        bounds = torch.tensor([*offsets, num_values], dtype=dtype)
        more = NUM_SAMPLES, is_mean, padding
        return LedgerEntry(lookups, TorchBags(values, bounds, None, *more, is_whole=True), gradient)

    ledger = [
        entry(LOOKUPS[0], (0, 2, 2, 5), 5, torch.randn(NUM_SAMPLES, DIM)),
        entry(LOOKUPS[2], (0, 0, 0, 0), 3, torch.randn(NUM_SAMPLES, DIM)),
        entry(LOOKUPS[0], (0, 1, 2, 3), 4, torch.randn(NUM_SAMPLES, DIM)),
    ]
    space = TorchRowSpace([torch.zeros(size, DIM) for size in SIZES])

    def updates(entries):
        found = []
        for lookups, bags, gradient, *_ in entries:
            layer, _ = layers_of(space, lookups, bags.num_features)
            rows, sources, scales = locate(space, layer, bags)
            of_values = columns_of(layer, gradient, DIM)[sources]
            of_values = of_values if scales is None else of_values * scales.unsqueeze(1)
            is_row = rows < space.num_rows
            found += zip(rows[is_row].tolist(), of_values[is_row].tolist(), strict=True)
        return found

    found = join_entries(ledger)

    assert len(found) == 1
    assert found[0].bags.values.dtype == found[0].bags.offsets.dtype == dtype
    assert updates(found) == updates(ledger)
    assert updates(ledger)


def test_a_single_sample_is_copied():
    whole = torch.randn(1, 3 * DIM)
    ledger = [
        LedgerEntry(lookups, bags_of(0, num_samples=1), gradient)
        for lookups, gradient in zip(LOOKUPS, whole.split(DIM, 1), strict=True)
    ]

    found = join_entries(ledger)

    assert len(found) == 1
    assert looked_up(found) == looked_up(ledger)


def test_entries_of_several_features_may_be_joined():
    several = Lookups(
        tables=np.array([2, 0], np.uint64),
        positions=np.array([1, 0], np.uint64),
        columns=np.array([0, DIM], np.uint64),
        width=2 * DIM,
    )
    ledger = [
        LedgerEntry(LOOKUPS[1], bags_of(0, dtype=torch.int32), torch.randn(NUM_SAMPLES, DIM)),
        LedgerEntry(several, bags_of(1, num_features=3), torch.randn(NUM_SAMPLES, 2 * DIM)),
        LedgerEntry(LOOKUPS[1], bags_of(2), torch.randn(NUM_SAMPLES, DIM)),
    ]

    found = join_entries(ledger)

    assert len(found) == 1
    assert looked_up(found) == looked_up(ledger)


def test_only_entries_of_one_kind_that_follow_each_other_are_joined():
    def entry(lookups, bags, dtype=torch.float32):
        return LedgerEntry(lookups, bags, torch.randn(bags.batch_size, DIM, dtype=dtype))

    jagged = bags_of(0)._replace(offsets=torch.arange(NUM_SAMPLES + 1))
    ledger = [
        entry(LOOKUPS[0], bags_of(1)),
        entry(LOOKUPS[1], bags_of(2)),
        entry(LOOKUPS[2], jagged),
        entry(LOOKUPS[2], jagged),
        entry(LOOKUPS[0], bags_of(3)._replace(padding=1)),
        entry(LOOKUPS[0], bags_of(4, num_samples=2)),
        entry(LOOKUPS[1], bags_of(5)),
        entry(LOOKUPS[1], bags_of(6)),
        entry(LOOKUPS[1], bags_of(6), torch.float64),
        entry(LOOKUPS[1], bags_of(7, num_samples=0)),
        entry(LOOKUPS[1], jagged._replace(is_whole=True)),
        entry(LOOKUPS[2], jagged._replace(is_whole=True)),
        entry(LOOKUPS[2], jagged._replace(is_whole=True, is_mean=True)),
        entry(LOOKUPS[2], jagged._replace(is_whole=True, weights=torch.ones(NUM_SAMPLES))),
        entry(LOOKUPS[2], jagged._replace(is_whole=True, weights=torch.ones(NUM_SAMPLES))),
    ]

    found = join_entries(ledger)

    numbers = [2, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1]
    assert [len(each.lookups.tables) for each in found] == numbers
    assert found[1:5] == ledger[2:6]


def test_gradients_that_take_long_to_copy_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(joined_entries, "_MOST_COPIED_BYTES", 3 * NUM_SAMPLES * DIM * 4 - 1)
    apart, together = (
        [
            LedgerEntry(lookups, bags_of(0), gradient)
            for lookups, gradient in zip(LOOKUPS, GRADIENTS[kind](), strict=True)
        ]
        for kind in ("apart", "of cat")
    )

    assert join_entries(apart) == apart
    assert len(join_entries(together)) == 1


def test_entries_with_the_same_places_share_their_lookups():
    def ledger():
        return [
            LedgerEntry(lookups, bags_of(0), gradient)
            for lookups, gradient in zip(LOOKUPS, side_by_side(), strict=True)
        ]

    [first], [second] = join_entries(ledger()), join_entries(ledger())

    assert first.lookups is second.lookups
