"""Intervals of the mean of a few measurements, by Student's t.

    mean +- t * s / sqrt(n)         s: standard deviation of the sample (n - 1)
                                    t: 97.5 % quantile of Student's t with n - 1 degrees of freedom

The interval holds the true mean in 95 % of cases if the measurements are independent draws from one
normal distribution.
"""

from __future__ import annotations

from math import cos, exp, inf, log, pi, sin, sqrt, tan
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["interval_of_mean", "interval_of_ratios", "t_quantile"]

_CONFIDENCE = 0.95


def interval_of_mean(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of some measurements and the ends of its interval.

    The ends are None for one measurement: nothing is known about its spread.

    Raises:
        ValueError: there is no measurement.
    """
    if not values:
        raise ValueError("an interval needs at least one measurement, got none")
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = t_quantile(_CONFIDENCE, len(values) - 1) * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def interval_of_ratios(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The geometric mean of some ratios and the ends of its interval.

    It is the interval of the mean of their logarithms. So the interval of a / b is that of b / a,
    turned over.

    Raises:
        ValueError: there is no ratio, or one is not above 0.
    """
    if not all(0 < ratio < inf for ratio in ratios):
        raise ValueError(f"ratios must be above 0 and finite, got {list(ratios)}")
    mean, low, high = interval_of_mean([log(ratio) for ratio in ratios])
    return exp(mean), None if low is None else exp(low), None if high is None else exp(high)


def t_quantile(confidence: float, num_free: int) -> float:
    """The t for which Student's t lies in [-t, t] with probability `confidence`.

    Args:
        confidence: In (0, 1).
        num_free: Degrees of freedom, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < confidence < 1 or num_free < 1:
        raise ValueError(
            f"confidence must be in (0, 1) and num_free at least 1, got {confidence} and {num_free}"
        )
    low, high = 0.0, pi / 2
    for _ in range(100):  # bisection, to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, num_free) < confidence else (low, middle)
    return sqrt(num_free) * tan(low)


def _within(angle: float, num_free: int) -> float:
    """The probability that Student's t lies in [-t, t], for t = sqrt(num_free) * tan(angle).

    References:
        Abramowitz and Stegun (1964), "Handbook of Mathematical Functions", 26.7.3 and 26.7.4: a
        finite sum for a whole number of degrees of freedom.
    """
    is_odd = num_free % 2
    term = cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(1 if is_odd else 0, num_free - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    if is_odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total
