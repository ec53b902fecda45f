import numpy as np

from recsys.embeddings.rows.lookups import Lookups

LOOKUPS = Lookups(
    tables=np.array([2, 0, 1, 0], np.uint64),
    positions=np.array([3, 1, 0, 2], np.uint64),
    columns=np.array([0, 4, 8, 12], np.uint64),
    width=16,
)


def test_lookups_in_some_tables_keep_their_order_and_columns():
    found = LOOKUPS.of_tables({0, 2, 7})

    assert found.tables.tolist() == [2, 0, 0]
    assert found.positions.tolist() == [3, 1, 2]
    assert found.columns.tolist() == [0, 4, 12]
    assert found.width == 16


def test_the_same_tables_give_the_same_object():
    """Recorded launches are found by it."""
    assert LOOKUPS.of_tables({0, 1}) is LOOKUPS.of_tables([1, 0, 5])
    assert LOOKUPS.of_tables({0, 1, 2}) is LOOKUPS
    assert not len(LOOKUPS.of_tables(()).tables)


def test_a_feature_is_in_a_layer_once_and_a_table_in_one_layer():
    lookups = Lookups(
        tables=np.array([2, 0, 1, 0, 3], np.uint64),
        positions=np.array([3, 1, 3, 2, 1], np.uint64),
        columns=np.arange(0, 20, 4, dtype=np.uint64),
        width=20,
    )

    assert [each.tables.tolist() for each in lookups.layers()] == [[2, 0, 0], [1, 3]]
    assert [each.positions.tolist() for each in lookups.layers()] == [[3, 1, 2], [3, 1]]
    assert lookups.layers()[1] is lookups.layers()[1]
    assert LOOKUPS.layers() == [LOOKUPS]
    assert LOOKUPS.layers() == [LOOKUPS]  # from the cache
    assert Lookups.nothing().layers() == []
