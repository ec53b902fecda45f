import numpy as np
import pytest

from recsys._support.jit import kernel
from recsys.embeddings.kernels.cpu.intrinsics.summing import add_bag

NUM_ROWS, BASE, TO = 9, 7, 5


@kernel
def add(sums, flat, dim, stride, ids, factors, first, end):
    return add_bag(
        sums,
        np.uint64(TO),
        flat,
        np.uint64(BASE),
        np.uint64(NUM_ROWS),
        np.uint64(dim),
        np.uint64(stride),
        np.uint64(16),
        ids,
        factors,
        np.uint64(first),
        np.uint64(end),
        np.uint64(len(ids)),
    )


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize(
    ("dtype", "id_dtype"), [(np.float32, np.int64), (np.float64, np.int32)], ids=str
)
@pytest.mark.parametrize("dim", [1, 7, 8, 16, 24, 33, 63, 64, 128])
def test_rows_are_added_in_order_and_nothing_else_is_touched(dim, dtype, id_dtype, has_factors):
    generator = np.random.default_rng(dim)
    flat = generator.standard_normal(BASE + NUM_ROWS * dim + 3).astype(dtype)
    rows = flat[BASE : BASE + NUM_ROWS * dim].reshape(NUM_ROWS, dim)
    for length in (0, 1, 2, 15, 16, 17, 32, 50):
        ids = generator.integers(0, NUM_ROWS, length + 4).astype(id_dtype)
        factors = generator.standard_normal(len(ids)).astype(dtype) if has_factors else None
        sums = generator.standard_normal(TO + dim + 3).astype(dtype)
        expected = sums.copy()
        for place in range(2, 2 + length):
            row = rows[ids[place]]
            expected[TO : TO + dim] += row if factors is None else factors[place] * row

        assert add(sums, flat, dim, dim, ids, factors, 2, 2 + length) == -1

        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("bad", [NUM_ROWS, -1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("place", [2, 17, 18, 30])
def test_the_first_id_that_is_no_row_is_found_and_not_read(place, bad):
    ids = np.ones(40, np.int32)
    ids[place], ids[place + 1] = bad, bad
    sums, flat = np.zeros(TO + 8, np.float32), np.zeros(BASE + NUM_ROWS * 8, np.float32)

    assert add(sums, flat, 8, 8, ids, None, 2, 35) == place


def test_ids_may_be_the_places_where_rows_begin():
    flat = np.arange(BASE + 40, dtype=np.float32)
    sums, places = np.zeros(TO + 11, np.float32), np.array([5, 0, 8], np.uint64)

    assert add(sums, flat, 11, 1, places, None, 0, 3) == -1

    assert sums.tolist() == [0.0] * TO + [3.0 * (BASE + d) + 13 for d in range(11)]
