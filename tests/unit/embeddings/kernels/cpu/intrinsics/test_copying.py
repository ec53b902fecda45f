import numpy as np
import pytest

from recsys._support.jit import kernel
from recsys.embeddings.kernels.cpu.intrinsics.copying import RUN, add_run, copy_run


@kernel
def copy_all(target, source, to, begin, count):
    copy_run(target, np.uint64(to), source, np.uint64(begin), np.uint64(count))


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
