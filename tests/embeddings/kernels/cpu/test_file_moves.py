import ctypes
import mmap
import os
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.file_moves import ALL_MOVED, advise_share, move_share

SIZES = (5, 1, 9)
FIRST_ROWS = np.cumsum([0, *SIZES]).astype(np.uint64)
NUM_BYTES = 6
PAGE = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file per table but the second, and what is in them."""
    folder = tmp_path_factory.mktemp("rows")
    rows = np.random.default_rng(0).integers(1, 255, (sum(SIZES), NUM_BYTES)).astype(np.uint8)
    rows[5] = 0  # of the table without a file
    descriptors = []
    for table in range(3):
        path = folder / str(table)
        path.write_bytes(rows[FIRST_ROWS[table] : FIRST_ROWS[table + 1]].tobytes())
        descriptors.append(-1 if table == 1 else os.open(path, os.O_RDWR))
    yield np.array(descriptors, np.int32), rows
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def content(descriptors):
    found = [b"" if each < 0 else os.pread(each, 1 << 20, 0) for each in descriptors]
    found[1] = bytes(NUM_BYTES)
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, NUM_BYTES).copy()


@given(
    rows=st.lists(st.integers(0, sum(SIZES) - 1), unique=True, min_size=1),
    bounds=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    is_fetch=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_a_share_of_the_rows_moves_and_nothing_else(files, rows, bounds, is_fetch, random):
    descriptors, _ = files
    before = content(descriptors)
    begin, end = sorted(min(bound, len(rows)) for bound in bounds)
    slots = np.array(random.sample(range(20), len(rows)), np.int32)
    hot = np.random.default_rng(len(rows)).integers(0, 255, (20, NUM_BYTES)).astype(np.uint8)
    expected_hot, expected = hot.copy(), before.copy()
    for row, slot in zip(rows[begin:end], slots[begin:end], strict=True):
        if is_fetch:
            expected_hot[slot] = before[row]
        elif row != 5:
            expected[row] = hot[slot]

    stopped = move_share(
        descriptors, FIRST_ROWS, np.array(rows, np.int32), slots, hot, begin, end, is_fetch
    )

    assert stopped == ALL_MOVED
    np.testing.assert_array_equal(hot, expected_hot)
    np.testing.assert_array_equal(content(descriptors), expected)


def test_a_row_behind_the_end_of_its_file_is_told_and_those_behind_it_wait(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes([1]) * (2 * NUM_BYTES + 1))
    descriptor = os.open(path, os.O_RDWR)
    hot = np.zeros((3, NUM_BYTES), np.uint8)
    order = np.arange(3, dtype=np.int32)
    rows = np.array([0, 2, 1], np.int32)

    stopped = move_share(
        np.array([descriptor], np.int32),
        np.array([0, 3], np.uint64),
        rows,
        order,
        hot,
        0,
        3,
        True,
    )

    os.close(descriptor)
    assert stopped == 1
    assert hot[0].all()
    assert not hot[2].any()


def cached_pages(pages):
    """Which of a mapped file's pages are in memory; nothing is read by asking."""
    found = np.zeros(len(pages) // PAGE, np.uint8)
    ctypes.CDLL(None).mincore(
        ctypes.c_void_p(pages.ctypes.data),
        ctypes.c_size_t(len(pages)),
        ctypes.c_void_p(found.ctypes.data),
    )
    return np.flatnonzero(found & 1).tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no advice")
def test_pages_of_rows_that_are_announced_are_read_and_no_others(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(256)) * (64 * PAGE // 256))
    descriptor = os.open(path, os.O_RDWR)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.fdatasync(descriptor)  # pages that are not on the disk yet cannot be dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    if cached_pages(pages):
        pytest.skip("the file system keeps all pages")
    rows = np.array([PAGE // 8 * page + 3 for page in (7, 10, 50, 20)], np.int32)
    first_rows = np.array([0, 64 * PAGE // 8], np.uint64)

    advise_share(np.array([descriptor], np.int32), first_rows, rows, 8, 1, 3)

    end = time.monotonic() + 30  # the disk takes its time
    while cached_pages(pages) != [10, 50] and time.monotonic() < end:
        time.sleep(0.001)
    assert cached_pages(pages) == [10, 50]
    os.close(descriptor)
