"""Which rank has which table."""

import pytest

pytest.importorskip("torchrec")

from recsys.train.rank_model import place_tables


def place(num_ranks, **tables):
    """Place tables of E rows of some bytes with some traffic."""
    num_rows, num_bytes, traffic = (
        {name: table[column] for name, table in tables.items()} for column in range(3)
    )
    return place_tables(num_rows, num_bytes, traffic, num_ranks)


def test_a_table_above_a_ranks_share_is_divided_by_rows_if_it_has_enough():
    small = {"a": (50, 3200, 16), "b": (50, 3200, 16)}

    assert place(2, big=(900, 57600, 16), **small) == {"big": None, "a": 0, "b": 1}
    assert place(1, big=(900, 57600, 16), **small) == {"big": 0, "a": 0, "b": 0}
    assert place(4, big=(3, 10**6, 16), a=(50, 3200, 16)) == {"big": 0, "a": 1}


def test_small_tables_are_placed_by_their_traffic():
    busy = {f"busy{number}": (10, 640, 1000) for number in range(2)}
    quiet = {f"quiet{number}": (10, 640, 1) for number in range(6)}

    placed = place(2, **busy, **quiet)

    assert {placed[name] for name in busy} == {0, 1}
    assert sorted(placed[name] for name in quiet) == [0, 0, 0, 1, 1, 1]


def test_large_tables_are_placed_by_their_bytes():
    sizes = {"a": 60, "b": 50, "c": 40, "d": 30}

    placed = place(2, **{name: (size, 64 * size, 1) for name, size in sizes.items()})

    loads = [sum(sizes[name] for name in placed if placed[name] == rank) for rank in range(2)]
    assert loads == [90, 90]
