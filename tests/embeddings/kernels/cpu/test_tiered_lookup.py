"""Rows read where they are: the kernel beside its reference and beside `pooled_lookup`."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.pooled_lookup import pooled_lookup
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.kernels.cpu.tiered_lookup import tiered_lookup
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype
from tests.torch_kernels import pooled_lookup_reference

SIZES = (5, 1, 9)
FIRST_ROWS = np.array([0, 5, 6, 15], np.uint64)
NUM_SLOTS = 6
# Where torch adds in another order; what is stored in 16 bits is widened exactly.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5}


class Case:
    """Tables and slots, no two numbers alike, and lookups of two features in three tables."""

    def __init__(self, dim, dtype, slots, values, lengths, has_weights):
        def numbered(size):
            nonlocal count
            count += size * dim
            return torch.arange(count - size * dim, count).reshape(size, dim).to(dtype)

        count = 1
        self.tables = [numbered(size) for size in SIZES]
        self.slots = numbered(NUM_SLOTS)
        self.slot_of_row = np.full(sum(SIZES), -1, np.int32)
        for slot, (row, is_awaited) in enumerate(slots):
            self.slot_of_row[row] = slot + (AWAITED if is_awaited else 0)
        self.batch_size = len(lengths) // 2
        self.lookups = Lookups(
            tables=np.array([2, 0, 1], np.uint64),
            positions=np.array([0, 1, 1], np.uint64),
            columns=np.array([0, dim, 2 * dim], np.uint64),
            width=3 * dim,
        )
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.values = values
        computed = compute_dtype(dtype)
        self.weights = None
        if has_weights:
            self.weights = torch.linspace(-1, 2, len(values), dtype=computed)
        self.result = torch.empty(self.batch_size, 3 * dim, dtype=computed)

    def bags(self, is_mean):
        return Bags.from_tensors(
            self.values, self.offsets, self.weights, self.batch_size, is_mean=is_mean
        )

    def look_up(self, is_mean=False):
        both = RowSpace([*self.tables, self.slots])
        bags = self.bags(is_mean)
        return tiered_lookup(both, self.slot_of_row, FIRST_ROWS, self.lookups, bags, self.result)

    def newest(self):
        """The tables, with slots written back."""
        tables = [table.clone() for table in self.tables]
        for row, slot in enumerate(self.slot_of_row.tolist()):
            if 0 <= slot < AWAITED:
                table = int(np.searchsorted(FIRST_ROWS, row, side="right")) - 1
                tables[table][row - int(FIRST_ROWS[table])] = self.slots[slot]
        return tables


@st.composite
def cases(draw):
    rows = draw(st.lists(st.integers(0, 14), max_size=NUM_SLOTS, unique=True))
    slots = [(row, draw(st.booleans())) for row in rows]
    batch_size = draw(st.integers(0, 4))
    is_one_hot = draw(st.booleans())
    count = st.just(1) if is_one_hot else st.integers(0, 4)
    lengths = [draw(count) for _ in range(2 * batch_size)]
    # The second feature is looked up in tables of five rows and of one.
    first, second = sum(lengths[:batch_size]), sum(lengths[batch_size:])
    values = [draw(st.integers(0, 8)) for _ in range(first)] + [0] * second
    dtype = draw(st.sampled_from(sorted(TOLERANCE, key=str)))
    dim, has_weights = draw(st.sampled_from([1, 3, 16])), draw(st.booleans())
    values = torch.tensor(values, dtype=torch.int64)
    is_mean = not has_weights and draw(st.booleans())
    return Case(dim, dtype, slots, values, lengths, has_weights), is_mean


@given(cases())
def test_rows_are_those_of_tables_that_slots_are_written_back_to(case_and_is_mean):
    case, is_mean = case_and_is_mean

    assert case.look_up(is_mean) == -1

    expected = torch.empty_like(case.result)
    newest = RowSpace(case.newest())
    assert pooled_lookup(newest, case.lookups, case.bags(is_mean), expected) == -1
    assert torch.equal(case.result, expected)
    reference = pooled_lookup_reference(
        [table.to(case.result.dtype) for table in case.newest()],
        case.lookups,
        case.values,
        case.offsets,
        case.weights,
        case.batch_size,
        is_mean=is_mean,
    )
    tolerance = TOLERANCE[case.tables[0].dtype]
    torch.testing.assert_close(case.result, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_other_dtypes_and_ids_of_32_bits(dtype):
    values = torch.tensor([8, 3, 0, 0, 0, 0], dtype=torch.int32)
    case = Case(3, dtype, [(8, False), (14, True)], values, [2, 1, 0, 3], has_weights=False)

    assert case.look_up() == -1

    expected = torch.empty_like(case.result)
    pooled_lookup(RowSpace(case.newest()), case.lookups, case.bags(False), expected)
    assert torch.equal(case.result, expected)


def test_many_samples_are_shared_out_among_threads():
    batch_size, dim = 4096, 64
    values = torch.cat([torch.arange(batch_size) % 9, torch.zeros(batch_size, dtype=torch.int64)])
    slots = [(8, False), (0, False), (5, False), (13, True)]
    case = Case(dim, torch.float32, slots, values, [1] * (2 * batch_size), has_weights=False)

    assert case.look_up() == -1

    newest = case.newest()
    expected = [newest[2][values[:batch_size]], newest[0][:1], newest[1][:1]]
    assert torch.equal(case.result[:, :dim], expected[0])
    assert torch.equal(case.result[:, dim : 2 * dim], expected[1].expand(batch_size, dim))
    assert torch.equal(case.result[:, 2 * dim :], expected[2].expand(batch_size, dim))


@pytest.mark.parametrize("bad", [9, -1, 2**40])
@pytest.mark.parametrize("length", [1, 30])
def test_the_first_value_that_is_no_row_is_told(bad, length):
    values = torch.zeros(4 * length, dtype=torch.int64)
    values[length + length // 2 :] = bad
    case = Case(3, torch.float32, [(0, False)], values, [length] * 4, has_weights=False)

    assert case.look_up() == length + length // 2


def test_a_zero_keeps_its_sign_where_rows_are_copied():
    case = Case(
        1, torch.float32, [(6, False)], torch.tensor([0, 1, 0, 0]), [1] * 4, has_weights=False
    )
    case.slots[0], case.tables[2][1] = -0.0, -0.0

    case.look_up()

    assert torch.signbit(case.result[:, 0]).tolist() == [True, True]
