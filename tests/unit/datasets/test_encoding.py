import numpy as np

from recsys.datasets.tabular.encode import Bags, DenseRule, Moments
from recsys.datasets.tabular.negatives import Sampler, belongs_to_items, numbers_of
from recsys.datasets.tabular.schema import Negatives


def sampler_of(groups, items, by):
    """All rows are for training."""
    return Sampler(
        np.array(items, np.int32),
        np.array(groups, np.int32),
        Negatives(item="item", by=by),
        first_row=1,
    )


def test_a_rare_item_that_is_the_only_choice_is_found():
    """Popularity draws it about once in 3,000 times."""
    sampler = sampler_of([0] * 50_000 + [1], [1] * 50_000 + [2], "popularity")

    assert sampler.draw(np.arange(20), np.zeros(20, np.int32)).tolist() == [[2] * 4] * 20


def test_chances_are_equal_or_by_popularity():
    items = [1] * 16 + [2] * 81 + [3, 0]
    groups = [0] * len(items)
    groups[items.index(0)] = 1  # has no item that is drawn
    for by, chances in (("uniform", [1, 1, 1]), ("popularity", [8, 27, 1])):
        drawn = sampler_of(groups, items, by).draw(np.arange(20_000), np.ones(20_000, np.int32))
        shares = np.bincount(drawn.ravel(), minlength=4)[1:] / drawn.size
        np.testing.assert_allclose(shares, np.array(chances) / sum(chances), atol=0.01)


def belong(items, values):
    return belongs_to_items(np.array(items), numbers_of(values))


def test_columns_with_one_value_for_each_item_are_found():
    items, nan = [1, 2, 1, 2, 4], float("nan")
    assert belong(items, np.array([7, 8, 7, 8, 9]))
    assert belong(items, np.array([1.5, nan, 1.5, nan, 0.0]))
    assert not belong(items, np.array([3, 3, 3, 3, 3]))
    assert not belong(items, np.array([1, 2, 2, 2, 2]))
    assert not belong([1, 2], np.array([7, 8]))  # no item comes again


def test_bags_are_compared_whole():
    def bags(*lists):
        return Bags(
            np.array([value for bag in lists for value in bag], np.int32),
            np.array([len(bag) for bag in lists], np.int32),
        )

    assert belong([1, 2, 1, 3], bags([0], [], [0], [0, 1]))
    assert not belong([1, 2, 1, 3], bags([0], [], [0, 0], [1]))


def test_moments_of_blocks_are_those_of_all_values():
    values, moments = np.random.default_rng(0).normal(1e6, 1.0, 1000), Moments()
    for start in range(0, 1000, 7):
        moments.add(values[start : start + 7])

    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean, values.mean(), rtol=1e-14)
    np.testing.assert_allclose(moments.squares / 1000, values.var(), rtol=1e-7)


def test_equal_values_are_not_divided_by_their_rounding():
    moments = Moments()
    moments.add(np.full(10, 0.1))
    rule = DenseRule.of("x", "standardize", "error", moments)

    np.testing.assert_allclose(rule.apply(np.array([0.1, 1.1])), [0.0, 1.0], atol=1e-7)


def test_a_column_is_standardized_once_its_missing_values_are_filled():
    moments, values = Moments(), np.array([1.0, np.nan])
    moments.add(values)

    assert DenseRule.of("x", "standardize", 3.0, moments).apply(values).tolist() == [-1, 1]
