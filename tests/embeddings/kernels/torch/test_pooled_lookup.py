import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu import pooled_lookup as numba
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.kernels.torch.pooled_lookup import TieredRows
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace, number_rows
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import RowSpace
from tests.torch_kernels import TorchSlotMap, pooled_lookup, row_gradient_dots

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
cases = {
    "seed": st.integers(0, 2**31),
    "dim": st.integers(1, 9),
    "batch_size": st.integers(0, 9),
    "longest": st.sampled_from([None, 0, 1, 4]),
    "how": st.sampled_from(["sum", "mean", "weighted", "weighted mean"]),
    "int_dtype": st.sampled_from([torch.int32, torch.int64]),
}


def pooled_by_both(case, **others):
    """By numba and by torch; columns that nobody writes are left as they were."""
    dtype = TorchRowSpace(case.copies()).compute_dtype
    shape = case.batch_size, case.lookups.width
    theirs, ours = torch.full(shape, 7, dtype=dtype), torch.full(shape, 7, dtype=dtype)
    numba.pooled_lookup(RowSpace(case.copies()), case.lookups, case.numba_bags(), theirs)
    space = TorchRowSpace(case.copies())
    assert pooled_lookup(space, case.lookups, case.bags(**others), ours) == -1
    return theirs, ours


@given(dtype=st.sampled_from(list(TOLERANCE)), **cases)
def test_rows_are_pooled_as_by_the_kernel_for_the_cpu(make_case, dtype, **of_case):
    case = make_case(**of_case, dtype=dtype)

    expected, found = pooled_by_both(case)

    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    errors_on(CPU).check()


@given(**cases)
def test_gradients_of_weights_are_those_of_the_kernel_for_the_cpu(make_case, **of_case):
    case = make_case(**of_case)
    gradient = case.gradient().contiguous()
    expected = torch.ones(len(case.values), dtype=torch.float64)
    found = expected.clone()
    numba.row_gradient_dots(
        RowSpace(case.copies()), case.lookups, case.numba_bags(), gradient, expected
    )

    row_gradient_dots(TorchRowSpace(case.copies()), case.lookups, case.bags(), gradient, found)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rows", "slots and copies"])
@pytest.mark.parametrize("offsets", [None, torch.arange(5)], ids=["one-hot", "jagged"])
def test_an_id_that_is_no_row_adds_zeros_whatever_is_in_memory(offsets, kind):
    rows = torch.full((4, 3), torch.nan)
    rows[1] = 5
    space = TorchRowSpace([rows])
    if kind != "rows":
        numbers = number_rows([4], 3, rows)
        slots = TorchSlotMap(numbers, 2).tensors  # empty
        space = TieredRows(numbers, slots, rows[:2], torch.tensor([1, 3]), rows[[1, 3]])
    found = torch.full((4, 3), 7.0)
    bags = TorchBags(torch.tensor([1, -1, 4, 1]), offsets, None, 4, is_mean=False)

    pooled_lookup(space, Lookups.one(0, 3), bags, found)

    assert found.tolist() == [[5] * 3, [0] * 3, [0] * 3, [5] * 3]
    space.errors.report(KeyError)
    with pytest.raises(KeyError):
        space.errors.check()
