import numpy as np

from recsys.datasets.tabular.encode import DenseRule, Moments


def moments_of(values, block=3):
    moments = Moments()
    for start in range(0, len(values), block):
        moments.add(np.array(values[start : start + block], np.float64))
    return moments


def test_moments_of_blocks_are_those_of_all_values():
    values = np.random.default_rng(0).normal(1e6, 1.0, 1000)
    moments = moments_of(values, block=7)
    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean, values.mean(), rtol=1e-14)
    np.testing.assert_allclose(moments.squares / 1000, values.var(), rtol=1e-7)


def test_missing_values_are_filled_in_before_the_statistics():
    moments = moments_of([1.0, np.nan, 5.0, np.nan])
    rule = DenseRule.of("x", "standardize", 3.0, moments)
    assert (rule.fill, rule.mean, rule.deviation) == (3.0, 3.0, np.sqrt(2.0))
    assert rule.apply(np.array([np.nan, 5.0])).tolist() == [0.0, np.float32(np.sqrt(2.0))]


def test_the_mean_is_that_of_the_values_that_are_there():
    rule = DenseRule.of("x", "none", "mean", moments_of([1.0, np.nan, 4.0]))
    assert rule.apply(np.array([np.nan, 7.0])).tolist() == [2.5, 7.0]


def test_equal_values_are_not_divided_by_their_rounding():
    rule = DenseRule.of("x", "standardize", "error", moments_of([0.1] * 10))
    np.testing.assert_allclose(rule.apply(np.array([0.1, 1.1])), [0.0, 1.0], atol=1e-7)


def test_logarithms_take_negative_values_as_zero():
    rule = DenseRule.of("x", "log", -4.0, moments_of([1.0]))
    np.testing.assert_allclose(
        rule.apply(np.array([-3.0, np.nan, np.e - 1])), [0.0, 0.0, 1.0], rtol=1e-7
    )
