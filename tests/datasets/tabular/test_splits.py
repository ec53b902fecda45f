from fractions import Fraction

import numpy as np
import pytest

from recsys.datasets.splits import classic_splits
from recsys.datasets.tabular.store_parts.spooled_rows import (
    TEST,
    TRAIN,
    VALIDATION,
    halve_test,
    split_at_random,
    split_at_times,
    split_by_fractions,
    split_last_one_out,
)


@pytest.mark.parametrize("num_rows", [1, 6, 7, 13, 14, 20, 21, 1000])
def test_fourteenths_are_the_classic_split(num_rows):
    codes = split_by_fractions(num_rows, Fraction(1, 14), Fraction(1, 14))
    parts = classic_splits(num_rows)
    for code, name in enumerate(parts):
        assert np.flatnonzero(codes == code).tolist() == list(parts[name])


def test_without_shares_all_rows_are_for_training():
    assert split_by_fractions(5, Fraction(0), Fraction(0)).tolist() == [TRAIN] * 5


def test_a_part_between_two_moments_may_be_the_validation_part():
    times = np.array([9, 0, 5, 4, 7])
    assert split_at_times(times, 7, 5).tolist() == [TEST, TRAIN, VALIDATION, TRAIN, TEST]
    assert split_at_times(times, 5, 7).tolist() == [VALIDATION, TRAIN, TEST, TRAIN, VALIDATION]


def test_a_random_split_has_about_the_shares_and_depends_on_the_seed():
    first = split_at_random(20_000, Fraction(1, 10), Fraction(2, 10), seed=1)
    shares = np.bincount(first, minlength=3) / len(first)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.02)
    again = split_at_random(20_000, Fraction(1, 10), Fraction(2, 10), seed=1)
    other = split_at_random(20_000, Fraction(1, 10), Fraction(2, 10), seed=2)
    assert (first == again).all()
    assert 0.3 < (first == other).mean() < 0.7


def test_last_one_out_takes_the_last_two_rows_of_groups_with_three():
    groups = np.array([0, 1, 0, 1, 0, 2], np.int32)
    order = np.argsort(groups, kind="stable")
    codes = split_last_one_out(order, groups)
    assert codes.tolist() == [TRAIN, TRAIN, VALIDATION, TRAIN, TEST, TRAIN]


def test_the_first_half_of_an_odd_test_part_is_the_larger_one():
    codes = np.array([1, 0, 1, 1], np.uint8)
    halve_test(codes)
    assert codes.tolist() == [TEST, TRAIN, TEST, VALIDATION]
