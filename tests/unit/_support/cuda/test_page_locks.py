"""Pages are registered with CUDA once, as long as one user needs them; fakes stand in."""

import gc
import mmap
from contextlib import nullcontext

import pytest
import torch

from recsys._support.cuda import own_pages
from recsys._support.cuda.own_pages import PageLocks, empty_in_own_pages, in_own_pages

PAGE = mmap.PAGESIZE
DEVICE = torch.device("cuda:0")


class FakeCudart:
    """Refuses what CUDA refuses: a page that is registered, and more than `limit` pages."""

    def __init__(self):
        self.runs, self.limit, self.num_calls = {}, 10**6, 0

    def cudaHostRegister(self, begin, num_bytes, flags):  # noqa: N802
        assert begin % PAGE == num_bytes % PAGE == 0
        assert flags == 1 | 2  # portable and mapped
        self.num_calls += 1
        end = begin + num_bytes
        if any(begin < last and first < end for first, last in self.runs.items()):
            return 712
        if num_bytes > self.limit * PAGE:
            return 2
        self.runs[begin] = end
        return 0

    def cudaHostUnregister(self, begin):  # noqa: N802
        del self.runs[begin]
        return 0

    def cudaGetErrorString(self, error):  # noqa: N802
        return {2: "out of memory", 712: "already mapped"}[error]

    def holds(self, tensor):
        """Whether every byte of a tensor is in a registered page."""
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        pages = range(first // PAGE * PAGE, end, PAGE)
        return all(any(begin <= page < last for begin, last in self.runs.items()) for page in pages)


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


def test_memory_is_locked_until_the_locks_are_released(cudart):
    tensor = memory(3)

    locks = PageLocks([tensor, torch.empty(0)], DEVICE)

    assert cudart.holds(tensor)
    locks.release()
    locks.release()
    assert not cudart.runs


def test_memory_is_unlocked_with_its_last_user(cudart):
    tensor = memory(2)
    locks = [PageLocks([tensor], DEVICE) for _ in range(2)]

    del locks[0]

    assert cudart.holds(tensor)
    assert cudart.num_calls == 1
    locks.clear()


def test_tables_of_one_memory_are_locked_with_all_of_it(cudart):
    whole = memory(6)
    parts = [whole[: 2 * PAGE], whole[2 * PAGE : 2 * PAGE + 40], whole[2 * PAGE + 40 :]]

    locks = [PageLocks([part], DEVICE) for part in parts]

    assert cudart.num_calls == 1
    assert cudart.holds(whole)
    locks[0].release()
    locks[2].release()
    assert cudart.holds(whole)
    locks[1].release()


def test_what_cannot_be_locked_leaves_nothing_locked_and_says_why(cudart):
    cudart.limit = 4
    small, large = memory(2), memory(9)

    with pytest.raises(OSError, match=r"cannot page-lock \d+ bytes of memory \(out of memory\)"):
        PageLocks([small, large], DEVICE)

    assert not cudart.runs


@pytest.mark.gpu
def test_a_device_reads_and_writes_memory_that_is_locked():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    tensor = in_own_pages(torch.arange(10_000.0))

    locks = PageLocks([tensor], device)

    assert tensor.is_pinned()
    assert tensor.to(device, non_blocking=True).sum().item() == tensor.sum().item()
    assert tensor[5000:5003].to(device).sum().item() == 3 * 5001
    locks.release()
    assert not tensor.is_pinned()
    assert torch.ones(1, device=device).item() == 1


@pytest.mark.gpu
def test_memory_beside_locked_memory_is_copied_as_before():
    """Much of it, so that some of it would share a page with a table that had none of its own."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    others, tables = [], []
    for number in range(200):
        others.append(torch.full((300,), float(number)))
        tables.append(in_own_pages(torch.rand(100, 4)))

    locks = PageLocks(tables, device)

    for number, other in enumerate(others):
        assert not other.is_pinned()
        assert (other.to(device, non_blocking=True) == number).all()
    locks.release()
