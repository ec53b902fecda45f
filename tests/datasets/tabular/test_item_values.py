import numpy as np

from recsys.datasets.tabular.encode import Bags
from recsys.datasets.tabular.negatives import ItemValues


def found(blocks, num_items=5):
    """The columns that are found in blocks of items and columns."""
    values = ItemValues(list(blocks[0][1]), num_items)
    for items, columns in blocks:
        values.add(np.array(items), {name: np.array(each) for name, each in columns.items()})
    return values.found()


def test_columns_with_one_value_for_each_item_are_found():
    nan = float("nan")
    first = {"genre": [7, 8, 7], "price": [1.5, nan, 1.5], "same": [3, 3, 3], "mood": [1, 2, 1]}
    second = {"genre": [8, 9], "price": [nan, 0.0], "same": [3, 3], "mood": [1, 2]}
    assert found([([1, 2, 1], first), ([2, 4], second)]) == ["genre", "price"]


def test_rows_of_one_block_may_disagree():
    assert found([([1, 1, 2], {"mood": [1, 2, 1]})]) == []


def test_without_an_item_that_comes_again_nothing_is_known():
    assert found([([1, 2], {"genre": [7, 8]})]) == []
    assert found([([-1, -1, 2], {"genre": [7, 8, 8]})]) == []  # rows without an item


def test_bags_are_compared_whole():
    def bags(*lists):
        flat = np.array([each for bag in lists for each in bag], np.int32)
        return Bags(flat, np.array([len(bag) for bag in lists], np.int32))

    items = np.array([1, 2, 1, 3])
    values = ItemValues(["genres", "tags"], 4)
    columns = {"genres": bags([0], [], [0], [0, 1]), "tags": bags([0], [], [0, 0], [1])}
    values.add(items, columns)
    assert values.found() == ["genres"]
