import numpy as np
import pytest
import torch
from numba import prange

from recsys._support.jit import parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn


@parallel_kernel
def take_all(turns, num_tasks, num_parts, taken):
    for part in prange(num_parts):
        while True:
            task = next_turn(turns)
            if task >= num_tasks:
                break
            taken[part, task] += 1


@pytest.mark.threads
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_every_task_is_taken_by_one_thread_once(num_threads):
    torch.set_num_threads(num_threads)
    turns = np.zeros(1, np.int64)
    taken = np.zeros((num_threads, 100_000), np.int64)

    take_all(turns, 100_000, num_threads, taken)

    assert np.array_equal(taken.sum(0), np.ones(100_000))
    # Each thread has asked once more than there were tasks for it.
    assert turns[0] == 100_000 + num_threads
