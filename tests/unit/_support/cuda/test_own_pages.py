"""Memory in pages of its own, registered with CUDA as long as one user needs it; fakes stand in."""

import gc
import mmap
from contextlib import nullcontext

import pytest
import torch

from recsys._support.cuda import own_pages
from recsys._support.cuda.own_pages import PageLocks, empty_in_own_pages, in_own_pages, pages_of

PAGE = mmap.PAGESIZE
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_has_whole_pages_and_zeros(dtype):
    found = empty_in_own_pages((1000, 3), dtype)

    begin, end, memory = pages_of(found)
    assert len(memory) == found.nbytes
    assert begin == found.data_ptr()
    assert begin % PAGE == end % PAGE == 0
    assert 0 <= end - begin - found.nbytes < PAGE
    assert (found.shape, found.dtype) == ((1000, 3), dtype)
    assert not found.any()


def test_what_shares_pages_is_copied_and_what_has_its_own_is_not():
    given, whole = torch.rand(10, 3), empty_in_own_pages((5000,), torch.float32)

    found = in_own_pages(given)

    assert pages_of(given) is None
    assert pages_of(found) is not None
    assert torch.equal(found, given)
    for tensor in (whole, whole[4000:]):
        assert in_own_pages(tensor) is tensor
        assert pages_of(tensor) == pages_of(whole)


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


class FakeCudart:
    """Refuses what CUDA refuses: a page that is registered, and more than four pages."""

    def __init__(self):
        self.runs, self.num_calls = {}, 0

    def cudaHostRegister(self, begin, num_bytes, flags):  # noqa: N802
        assert begin % PAGE == num_bytes % PAGE == 0
        assert flags == 1 | 2  # portable and mapped
        self.num_calls += 1
        end = begin + num_bytes
        if any(begin < last and first < end for first, last in self.runs.items()):
            return 712
        if num_bytes > 4 * PAGE:
            return 2
        self.runs[begin] = end
        return 0

    def cudaHostUnregister(self, begin):  # noqa: N802
        del self.runs[begin]
        return 0

    def cudaGetErrorString(self, error):  # noqa: N802
        return {2: "out of memory", 712: "already mapped"}[error]


@pytest.fixture
def cudart(monkeypatch):
    found = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(own_pages, "_clear_error", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield found
    gc.collect()
    assert not found.runs
    assert not own_pages._USERS


def memory(num_pages):
    return empty_in_own_pages((num_pages * PAGE,), torch.uint8)


def test_memory_is_locked_once_until_its_last_user_is_gone(cudart):
    whole = memory(4)
    locks = [PageLocks([part, torch.empty(0)], DEVICE) for part in (whole[:PAGE], whole[PAGE:])]

    assert cudart.runs == {whole.data_ptr(): whole.data_ptr() + whole.nbytes}
    assert cudart.num_calls == 1
    locks[0].release()
    locks[0].release()
    assert cudart.runs
    locks.clear()
    assert not cudart.runs


def test_what_cannot_be_locked_leaves_nothing_locked_and_says_why(cudart):
    with pytest.raises(OSError, match=r"cannot page-lock \d+ bytes of memory \(out of memory\)"):
        PageLocks([memory(2), memory(9)], DEVICE)

    assert not cudart.runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_device_reads_locked_memory_and_memory_beside_it_is_copied_as_before():
    """Much of it, so that some would share a page with a table that had none of its own."""
    others, tables = [], []
    for number in range(200):
        others.append(torch.full((300,), float(number)))
        tables.append(in_own_pages(torch.rand(100, 4)))

    locks = PageLocks(tables, DEVICE)

    for number, (other, table) in enumerate(zip(others, tables, strict=True)):
        assert table.is_pinned()
        assert torch.equal(table.to(DEVICE, non_blocking=True).cpu(), table)
        assert not other.is_pinned()
        assert (other.to(DEVICE, non_blocking=True) == number).all()
    locks.release()
    assert not tables[0].is_pinned()
