"""Sizes of Triton launches equal those of triton itself."""

import pytest

from recsys._support.cuda.triton_support import cdiv, next_power_of_2

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("divisor", [1, 3, 256])
@pytest.mark.parametrize("dividend", [0, 1, 255, 256, 257, 2**40])
def test_cdiv_rounds_up_as_triton_does(dividend, divisor):
    assert cdiv(dividend, divisor) == triton.cdiv(dividend, divisor)


@pytest.mark.parametrize("number", [1, 2, 3, 16, 17, 2**40 + 1])
def test_the_next_power_of_2_is_that_of_triton(number):
    assert next_power_of_2(number) == triton.next_power_of_2(number)
