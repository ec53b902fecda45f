import numpy as np
import pytest
from numba import TypingError

from recsys._support.jit import kernel
from recsys.embeddings.kernels.cpu.intrinsics.copying import RUN, add_run, copy_run


@kernel
def copy_all(target, source, to, begin, count):
    copy_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(count))


@kernel
def copy_sixteen(target, source, to, begin):
    copy_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(16))


@kernel
def add_all(target, source, to, begin, count):
    add_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(count))


@kernel
def add_sixteen(target, source, to, begin):
    add_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(16))


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, RUN, 5 * RUN])
def test_a_run_is_added_and_nothing_else_is_touched(dtype, count):
    generator = np.random.default_rng(0)
    source, target = (generator.standard_normal(60).astype(dtype) for _ in range(2))
    expected = target.copy()
    expected[7 : 7 + count] += source[3 : 3 + count]

    add_all(target, source, 7, 3, count)

    np.testing.assert_array_equal(target, expected)


def test_a_run_of_known_length_is_added_as_any_other():
    source = np.arange(20, dtype=np.float32)
    target = np.ones(20, np.float32)

    add_sixteen(target, source, 1, 2)

    np.testing.assert_array_equal(target[1:17], 1 + source[2:18])
    assert target[0] == 1
    assert (target[17:] == 1).all()


@pytest.mark.parametrize("of_all", [copy_all, add_all])
def test_arrays_of_two_dtypes_are_refused(of_all):
    with pytest.raises(TypingError):
        of_all(np.zeros(2, np.float32), np.zeros(2), 0, 0, 1)


def test_what_is_no_number_of_floating_point_is_not_added():
    with pytest.raises(TypingError):
        add_all(np.zeros(9, np.uint16), np.zeros(9, np.uint16), 0, 0, 8)
