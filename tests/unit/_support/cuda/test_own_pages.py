"""Memory in pages of its own."""

import gc
import mmap

import pytest
import torch

from recsys._support.cuda import own_pages
from recsys._support.cuda.own_pages import empty_in_own_pages, in_own_pages, pages_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_has_whole_pages_and_zeros(dtype):
    found = empty_in_own_pages((1000, 3), dtype)

    begin, end, memory = pages_of(found)
    assert len(memory) == found.nbytes
    assert begin == found.data_ptr()
    assert begin % mmap.PAGESIZE == end % mmap.PAGESIZE == 0
    assert 0 <= end - begin - found.nbytes < mmap.PAGESIZE
    assert found.shape == (1000, 3)
    assert found.dtype == dtype
    assert not found.any()
    found[-1] = 1
    assert found.sum() == 3


def test_what_has_pages_of_its_own_is_not_copied_and_its_parts_are_in_them():
    whole = empty_in_own_pages((5000,), torch.float32)
    last = whole[4000:]

    assert in_own_pages(whole) is whole
    assert in_own_pages(last) is last
    assert pages_of(last) == pages_of(whole)


def test_what_shares_pages_is_copied():
    given = torch.rand(10, 3)
    assert pages_of(given) is None

    found = in_own_pages(given)

    assert pages_of(found) is not None
    assert torch.equal(found, given)
    assert found.data_ptr() != given.data_ptr()


def test_pages_last_as_long_as_a_tensor_on_them():
    before = set(own_pages._MAPPINGS)
    part = empty_in_own_pages((3000,), torch.float32)[2000:].view(10, 100)
    part.fill_(7)
    gc.collect()
    assert pages_of(part) is not None
    assert (part == 7).all()

    del part

    gc.collect()
    assert not set(own_pages._MAPPINGS) - before
