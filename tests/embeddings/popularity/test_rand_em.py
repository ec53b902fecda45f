import math

import numpy as np
import pytest

from recsys.embeddings.popularity.rand_em import _STUDENT_T, METHODS, estimate_hot_rows
from recsys.errors import ConfigError


def test_the_quantile_of_students_t_leaves_out_a_thousandth_of_the_density():
    # Student's density in the angle whose tangent is t / sqrt(34) is a power of the cosine.
    angles = np.linspace(0, math.atan(_STUDENT_T / math.sqrt(34)), 20_001)
    density = np.cos(angles) ** 33

    scale = math.exp(math.lgamma(17.5) - math.lgamma(17))
    area = 2 * scale / math.sqrt(math.pi) * np.trapezoid(density, angles)
    assert area == pytest.approx(0.999, abs=1e-9)


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


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of .* got 'all'"):
        estimate_hot_rows(np.ones(9), 1, method="all")
