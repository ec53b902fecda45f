import numpy as np
import pytest

from recsys._support.jit import kernel
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch, prefetch_to_write


@kernel
def sum_ahead(numbers, indices, distance):
    total = 0.0
    for place in range(np.uint64(len(indices))):
        prefetch(numbers, indices[place] + distance)
        prefetch_to_write(numbers, indices[place] + distance)
        total += numbers[indices[place]]
    return total


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("distance", [0, 3, 2**40, 2**63])
def test_fetching_ahead_changes_no_result_even_outside_of_the_array(dtype, distance):
    numbers = np.arange(1, 8, dtype=dtype)
    indices = np.array([6, 0, 3, 3], np.uint64)

    total = sum_ahead(numbers, indices, np.uint64(distance))

    assert total == 7 + 1 + 4 + 4


@pytest.mark.parametrize("word", [(prefetch, 0), (prefetch_to_write, 1)])
def test_the_processor_is_told(word):
    function, is_write = word

    @kernel
    def tell(numbers):
        function(numbers, np.uint64(1))

    tell(np.zeros(2, np.float32))

    (code,) = tell.inspect_llvm().values()
    assert f"i32 {is_write}, i32 3, i32 1)" in code
