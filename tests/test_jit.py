import numba
import pytest

from recsys import jit


def test_a_kernel_runs_where_nothing_can_be_kept_and_says_so(monkeypatch):
    def njit(*, nogil, cache=False):
        if cache:
            raise RuntimeError("no locator available")
        return numba.njit(nogil=nogil)

    def double(number):
        return 2 * number

    monkeypatch.setattr(jit, "njit", njit)

    with pytest.warns(UserWarning, match="each process compiles them anew"):
        compiled = jit.kernel(double)

    assert compiled(21) == 42
