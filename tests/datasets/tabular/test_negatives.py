import numpy as np

from recsys.datasets.tabular.encode import Bags
from recsys.datasets.tabular.negatives import NO_ITEM, Sampler, belongs_to_items, numbers_of
from recsys.datasets.tabular.schema import Negatives


def sampler_of(groups, items, **keys):
    """All rows are for training."""
    keys = Negatives(item="item", **keys)
    return Sampler(np.array(items, np.int32), np.array(groups, np.int32), keys, first_row=1)


def draw(sampler, groups, first=0):
    rows = np.arange(first, first + len(groups))
    return sampler.draw(rows, np.array(groups, np.int32))


def test_negatives_are_items_that_the_group_lacks():
    rng = np.random.default_rng(0)
    groups, items = rng.integers(0, 5, 200), rng.integers(0, 60, 200)
    drawn = draw(sampler_of(groups, items), groups)
    known = set(zip(groups.tolist(), items.tolist(), strict=True))
    for group, negatives in zip(groups.tolist(), drawn.tolist(), strict=True):
        for item in negatives:
            assert (group, item) not in known
            assert item in items
            assert item > 0


def test_a_group_with_all_items_gets_none():
    sampler = sampler_of([0, 0, 1], [1, 2, 1])
    assert draw(sampler, [0, 1]).tolist() == [[NO_ITEM] * 4, [2] * 4]


def test_a_rare_item_that_is_the_only_choice_is_found():
    """Popularity draws it about once in 3,000 times."""
    items = [1] * 50_000 + [2]
    sampler = sampler_of([0] * 50_000 + [1], items, by="popularity")
    assert draw(sampler, [0] * 20).tolist() == [[2] * 4] * 20


def test_draws_depend_on_the_seed_and_the_row_alone():
    groups, items = [0] * 20, list(range(1, 21))
    others = [*groups, *([1] * 50)], [*items, *range(21, 71)]
    first = draw(sampler_of(*others), groups)
    again = draw(sampler_of(*others), groups[10:], first=10)
    assert first[10:].tolist() == again.tolist()
    assert first.tolist() != draw(sampler_of(*others, seed=1), groups).tolist()
    assert len({tuple(row) for row in first.tolist()}) > 15


def test_an_owner_may_be_the_item_itself():
    """Then all items are drawn but the positive's own."""
    groups, items = [0] * 6, [1, 2, 3, 1, 2, 3]
    sampler = sampler_of(items, items, per_positive=40)
    for item, negatives in zip(items, draw(sampler, items).tolist(), strict=True):
        assert set(negatives) == {1, 2, 3} - {item}
    assert draw(sampler_of(groups, items), groups).max() == NO_ITEM


def test_draws_are_those_of_the_formula():
    end = 2**64

    def mix64(bits):
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % end
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % end
        return bits ^ (bits >> 31)

    def negative(seed, row, number):
        state = mix64((mix64((mix64(seed) + row) % end) + number) % end)
        for step in range(256):
            bits = mix64((state + (step + 1) * 0x9E3779B97F4A7C15) % end)
            item = 1 + int((bits >> 11) / 2**53 * 100)
            if item != 7:
                return item
        return None

    items = list(range(1, 101))
    sampler = sampler_of([0 if item == 7 else 1 for item in items], items, seed=3)
    drawn = draw(sampler, [0] * 50, first=20).tolist()
    assert drawn == [[negative(3, row, number) for number in range(4)] for row in range(20, 70)]
    assert drawn[:2] == [[87, 1, 55, 19], [51, 4, 88, 86]]


def test_chances_are_equal_or_by_popularity():
    items = [1] * 16 + [2] * 81 + [3, 0]
    groups = [0] * len(items)
    groups[items.index(0)] = 1  # has no item that is drawn
    rows = np.arange(20_000)
    for by, chances in (("uniform", [1, 1, 1]), ("popularity", [8, 27, 1])):
        sampler = sampler_of(groups, items, by=by)
        drawn = sampler.draw(rows, np.ones(len(rows), np.int32))
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
        flat = np.array([value for bag in lists for value in bag], np.int32)
        return Bags(flat, np.array([len(bag) for bag in lists], np.int32))

    assert belong([1, 2, 1, 3], bags([0], [], [0], [0, 1]))
    assert not belong([1, 2, 1, 3], bags([0], [], [0, 0], [1]))
