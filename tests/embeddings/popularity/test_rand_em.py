import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.popularity.rand_em import (
    METHODS,
    estimate_hot_rows,
    student_t,
)
from recsys.errors import ConfigError


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    # Of printed tables, to their last digit.
    [
        (0.999, 34, 3.601),
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.99, 3, 5.841),
        (0.99, 10, 3.169),
        (0.9, 30, 1.697),
        (0.999, 120, 3.373),
    ],
)
def test_the_quantiles_of_students_t_are_the_printed_ones(confidence, degrees, expected):
    assert round(student_t(confidence, degrees), 3) == expected


@given(st.floats(0.01, 0.9999), st.integers(1, 200))
def test_between_the_quantiles_lies_that_much_of_the_density(confidence, degrees):
    bound = student_t(confidence, degrees)

    # Student's density in the angle whose tangent is t / sqrt(degrees) is a power of the cosine.
    angles = np.linspace(0, math.atan(bound / math.sqrt(degrees)), 20_001)
    density = np.cos(angles) ** (degrees - 1)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    area = 2 * scale / math.sqrt(math.pi) * np.trapezoid(density, angles)
    assert area == pytest.approx(confidence, abs=1e-6)


def clustered(num_rows=400_000, num_hot=20_000):
    """Hot rows at the beginning, as ids numbered by first appearance have them, nearly all."""
    rng = np.random.default_rng(0)
    counts = np.zeros(num_rows, np.uint32)
    counts[:num_hot] = rng.integers(1, 9, num_hot)
    return counts


def share_inside(counts, method, num_trials=150):
    truth = np.count_nonzero(counts >= 2)
    found = [estimate_hot_rows(counts, 2, method=method, seed=n) for n in range(num_trials)]
    return np.mean([each.low <= truth <= each.high for each in found])


def test_the_interval_of_random_rows_holds_in_any_order_and_that_of_chunks_in_random_order_alone():
    counts = clustered()
    scattered = np.random.default_rng(1).permutation(counts)

    inside = {
        (method, order): share_inside(rows, method)
        for method in METHODS
        for order, rows in (("clustered", counts), ("scattered", scattered))
    }

    assert inside["rows", "clustered"] > 0.98
    assert inside["rows", "scattered"] > 0.98
    assert inside["chunks", "scattered"] > 0.98
    assert inside["chunks", "clustered"] < 0.9


@pytest.mark.parametrize("method", METHODS)
def test_estimates_are_right_on_average(method):
    counts = np.random.default_rng(1).permutation(clustered())
    truth = np.count_nonzero(counts >= 5)

    found = [estimate_hot_rows(counts, 5, method=method, seed=seed) for seed in range(50)]

    assert np.mean([each.num_rows for each in found]) == pytest.approx(truth, rel=0.02)
    assert all(each.low <= each.num_rows <= each.high for each in found)
    assert {each.num_rows_read for each in found} == {35 * 1024}


@pytest.mark.parametrize("method", METHODS)
def test_a_table_no_larger_than_what_would_be_read_is_counted_whole(method):
    counts = np.arange(35 * 1024)

    found = estimate_hot_rows(counts, 100, method=method)

    assert (found.low, found.num_rows, found.high) == (35 * 1024 - 100,) * 3
    assert found.num_rows_read == 35 * 1024


def test_the_draw_is_that_of_the_seed():
    counts = clustered()

    first, same, other = (estimate_hot_rows(counts, 2, seed=seed) for seed in (3, 3, 4))

    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_hot_rows(np.ones(9), 1, method="all"), "must be one of .* got 'all'"),
        (lambda: estimate_hot_rows(np.ones(9), 1, num_groups=1), "at least 2 groups .* got 1 of"),
        (lambda: student_t(1.0, 3), r"must lie in \(0, 1\) .* got 1.0 and 3"),
        (lambda: student_t(0.9, 0), "got 0.9 and 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
