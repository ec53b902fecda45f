"""Rows of files are moved once, by whichever thread there is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.embeddings.tiers.cold.file_store import NUM_THREADS, arrays_of, move_rows

ROWS = np.arange(300, dtype=np.int32)


def refuse(_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("num_started", [0, 1])
def test_rows_are_not_moved_again_by_a_thread_that_starts_later(num_started, tmp_path, monkeypatch):
    files = ColdFiles(tmp_path, {"t": ((300, 4), torch.float32)})
    table = files.begin_with("t", torch.arange(1200.0).view(300, 4))
    arrays, first_rows = arrays_of(files, [table]), np.array([0, 300], np.uint64)
    memory, other = (np.zeros((300, 4), np.float32) for _ in range(2))
    threads, is_busy = ThreadPoolExecutor(NUM_THREADS), threading.Event()
    for _ in range(num_started):
        threads.submit(is_busy.wait)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        move_rows(threads, arrays, first_rows, ROWS, ROWS, memory, is_fetch=True)
    assert np.array_equal(memory, table)
    memory.fill(-1.0)  # updated
    is_busy.set()
    move_rows(threads, arrays, first_rows, ROWS, ROWS, other, is_fetch=True)
    threads.shutdown()

    assert np.array_equal(other, table)
    assert (memory == -1.0).all()
