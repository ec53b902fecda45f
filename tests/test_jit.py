import numba
import pytest
import torch

from recsys import jit


def test_a_kernel_runs_where_nothing_can_be_kept_and_says_so(monkeypatch):
    def njit(*, nogil, parallel, cache=False):
        if cache:
            raise RuntimeError("no locator available")
        return numba.njit(nogil=nogil, parallel=parallel)

    def double(number):
        return 2 * number

    monkeypatch.setattr(jit, "njit", njit)

    with pytest.warns(UserWarning, match="each process compiles them anew"):
        compiled = jit.kernel(double)

    assert compiled(21) == 42


def test_the_number_of_parts_follows_torchs_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert jit.num_parts() == 3
    finally:
        torch.set_num_threads(before)
