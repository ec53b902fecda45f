import numpy as np
import pytest
from numba import TypingError

from recsys.embeddings.kernels.copying import copy_run
from recsys.jit import kernel


@kernel
def copy_all(target, source, to, begin, count):
    copy_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(count))


@kernel
def copy_sixteen(target, source, to, begin):
    copy_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(16))


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 15, 40])
def test_a_run_is_copied_and_nothing_else_is_touched(dtype, count):
    source = np.arange(50).astype(dtype)
    target = np.full(60, 99, dtype)

    copy_all(target, source, 7, 3, count)

    expected = np.full(60, 99, dtype)
    expected[7 : 7 + count] = source[3 : 3 + count]
    np.testing.assert_array_equal(target, expected)


def test_bits_are_copied_whatever_they_mean():
    source = np.arange(0x7FC00001, 0x7FC00001 + 20, dtype=np.uint32).view(np.float32)  # NaNs
    target = np.zeros(20, np.float32)

    copy_sixteen(target, source, 1, 2)

    np.testing.assert_array_equal(target.view(np.uint32)[1:17], source.view(np.uint32)[2:18])
    assert not target[17:].any()


def test_arrays_of_two_dtypes_are_refused():
    with pytest.raises(TypingError):
        copy_all(np.zeros(2, np.float32), np.zeros(2), 0, 0, 1)
