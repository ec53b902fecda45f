import numpy as np

from recsys.datasets.tabular.negatives import (
    NO_ITEM,
    ItemCatalog,
    KnownPositives,
    Sampler,
)


def sampler_of(groups, items, *, num_rows, by="uniform", per_positive=4, seed=0, first_row=1):
    """All rows are for training."""
    items = np.array(items, np.int32)
    catalog = ItemCatalog(num_rows, 0)
    catalog.add(items, np.empty((len(items), 0), np.int32))
    known = KnownPositives(np.array(groups, np.int32), items)
    return Sampler(catalog, known, by=by, per_positive=per_positive, seed=seed, first_row=first_row)


def draw(sampler, groups, first=0):
    rows = np.arange(first, first + len(groups))
    return sampler.draw(rows, np.array(groups, np.int32))


def test_negatives_are_items_that_the_group_lacks():
    rng = np.random.default_rng(0)
    groups, items = rng.integers(0, 5, 200), rng.integers(0, 60, 200)
    drawn = draw(sampler_of(groups, items, num_rows=60), groups)
    known = set(zip(groups.tolist(), items.tolist(), strict=True))
    for group, negatives in zip(groups.tolist(), drawn.tolist(), strict=True):
        for item in negatives:
            assert (group, item) not in known
            assert item in items
            assert item > 0


def test_a_group_with_all_items_gets_none():
    sampler = sampler_of([0, 0, 1], [1, 2, 1], num_rows=3)
    assert draw(sampler, [0, 1]).tolist() == [[NO_ITEM] * 4, [2] * 4]


def test_a_rare_item_that_is_the_only_choice_is_found():
    """Popularity draws it about once in 3,000 times."""
    items = [1] * 50_000 + [2]
    sampler = sampler_of([0] * 50_000 + [1], items, num_rows=3, by="popularity")
    assert draw(sampler, [0] * 20).tolist() == [[2] * 4] * 20


def test_draws_depend_on_the_seed_and_the_row_alone():
    groups, items = [0] * 20, list(range(1, 21))
    others = [*groups, *([1] * 50)], [*items, *range(21, 71)]
    first = draw(sampler_of(*others, num_rows=80), groups)
    again = draw(sampler_of(*others, num_rows=80), groups[10:], first=10)
    assert first[10:].tolist() == again.tolist()
    assert first.tolist() != draw(sampler_of(*others, num_rows=80, seed=1), groups).tolist()
    assert len({tuple(row) for row in first.tolist()}) > 15


def test_an_owner_may_be_the_item_itself():
    """Then all items are drawn but the positive's own."""
    groups, items = [0] * 6, [1, 2, 3, 1, 2, 3]
    sampler = sampler_of(items, items, num_rows=4, per_positive=40)
    for item, negatives in zip(items, draw(sampler, items).tolist(), strict=True):
        assert set(negatives) == {1, 2, 3} - {item}
    assert draw(sampler_of(groups, items, num_rows=4), groups).max() == NO_ITEM


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
    sampler = sampler_of([0 if item == 7 else 1 for item in items], items, num_rows=101, seed=3)
    drawn = draw(sampler, [0] * 50, first=20).tolist()
    assert drawn == [[negative(3, row, number) for number in range(4)] for row in range(20, 70)]
    assert drawn[:2] == [[87, 1, 55, 19], [51, 4, 88, 86]]


def test_chances_are_equal_or_by_popularity():
    items = [1] * 16 + [2] * 81 + [3]
    groups = [0] * len(items)
    rows = np.arange(20_000)
    for by, chances in (("uniform", [1, 1, 1]), ("popularity", [8, 27, 1])):
        sampler = sampler_of(groups, items, num_rows=4, by=by)
        sampler._known = KnownPositives(np.array([1], np.int32), np.array([0], np.int32))
        drawn = sampler.draw(rows, np.zeros(len(rows), np.int32))
        shares = np.bincount(drawn.ravel(), minlength=4)[1:] / drawn.size
        np.testing.assert_allclose(shares, np.array(chances) / sum(chances), atol=0.01)


def test_the_catalog_keeps_what_was_seen_last():
    catalog = ItemCatalog(3, 2)
    catalog.add(np.array([1, 2], np.int32), np.array([[4, 5], [6, 7]], np.int32))
    catalog.add(np.array([1], np.int32), np.array([[8, 9]], np.int32))
    assert catalog.rows.tolist() == [[0, 0], [8, 9], [6, 7]]
    assert catalog.counts.tolist() == [0, 2, 1]
