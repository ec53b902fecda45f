from math import exp, lgamma, pi, sqrt

import numpy as np
import pytest

from recsys._support.student import interval_of_mean, interval_of_ratios, t_quantile

# Abramowitz and Stegun (1964), table 26.10: two-sided 95 % and 99 %.
PRINTED = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    29: (2.045, 2.756),
    30: (2.042, 2.750),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize(("num_free", "expected"), PRINTED.items())
def test_quantiles_are_those_of_the_printed_table(num_free, expected):
    found = [t_quantile(confidence, num_free) for confidence in (0.95, 0.99)]

    assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("num_free", [*range(1, 12), 50, 51])
def test_the_integral_of_the_density_up_to_a_quantile_is_its_probability(num_free):
    points = np.linspace(0, 3, 30_001)
    factor = exp(lgamma((num_free + 1) / 2) - lgamma(num_free / 2)) / sqrt(num_free * pi)
    density = factor * (1 + points**2 / num_free) ** (-(num_free + 1) / 2)

    probability = 2 * np.trapezoid(density, points)

    assert t_quantile(probability, num_free) == pytest.approx(3, abs=1e-5)


def test_an_interval_holds_the_true_mean_in_95_percent_of_cases():
    draws = np.random.default_rng(0).normal(7, 3, (4_000, 3))

    intervals = [interval_of_mean(each.tolist()) for each in draws]

    share = np.mean([low <= 7 <= high for _, low, high in intervals])
    assert 0.94 < share < 0.96


def test_an_interval_is_that_of_the_formula():
    mean, low, high = interval_of_mean([1.0, 2.0, 6.0])

    t = 0.95 / (2 * 0.975 * 0.025) ** 0.5  # with 2 degrees of freedom
    half = t * (7 / 3) ** 0.5  # the variance is 7
    assert mean == 3
    assert (low, high) == pytest.approx((3 - half, 3 + half))


def test_the_interval_of_turned_over_ratios_is_turned_over():
    ratios = [0.5, 0.8, 0.7]

    mean, low, high = interval_of_ratios(ratios)
    turned = interval_of_ratios([1 / ratio for ratio in ratios])

    assert mean == pytest.approx((0.5 * 0.8 * 0.7) ** (1 / 3))
    assert turned == pytest.approx((1 / mean, 1 / high, 1 / low))


def test_one_measurement_has_no_interval_and_none_is_refused():
    assert interval_of_mean([2.5]) == (2.5, None, None)
    assert interval_of_ratios([2.5]) == (pytest.approx(2.5), None, None)
    with pytest.raises(ValueError, match="at least one measurement, got none"):
        interval_of_mean([])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_a_ratio_that_has_no_logarithm_is_refused(bad):
    with pytest.raises(ValueError, match="above 0 and finite"):
        interval_of_ratios([1.0, bad])


@pytest.mark.parametrize(("confidence", "num_free"), [(0, 3), (1, 3), (0.95, 0)])
def test_quantiles_that_do_not_exist_are_refused(confidence, num_free):
    with pytest.raises(ValueError, match="confidence must be in"):
        t_quantile(confidence, num_free)
