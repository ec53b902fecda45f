"""Which rank has which table."""

import pytest

pytest.importorskip("torchrec")

from recsys.distributed.placement import TableCost, place_tables


def test_a_table_above_a_ranks_share_is_divided_by_rows():
    tables = {"big": TableCost(900, 64, 16), "a": TableCost(50, 64, 16), "b": TableCost(50, 64, 16)}

    assert place_tables(tables, 2) == {"big": None, "a": 0, "b": 1}
    assert place_tables(tables, 1) == {"big": 0, "a": 0, "b": 0}


def test_a_table_with_fewer_rows_than_ranks_is_on_one_rank():
    tables = {"big": TableCost(3, 10**6, 16), "a": TableCost(50, 64, 16)}

    assert place_tables(tables, 4) == {"big": 0, "a": 1}


def test_small_tables_are_placed_by_their_traffic():
    tables = {f"busy{n}": TableCost(10, 64, 1000) for n in range(2)} | {
        f"quiet{n}": TableCost(10, 64, 1) for n in range(6)
    }

    placed = place_tables(tables, 2)

    assert {placed["busy0"], placed["busy1"]} == {0, 1}
    assert sorted(placed[f"quiet{n}"] for n in range(6)) == [0, 0, 0, 1, 1, 1]


def test_large_tables_are_placed_by_their_bytes():
    sizes = {"a": 60, "b": 50, "c": 40, "d": 30}
    tables = {name: TableCost(size, 64, 1) for name, size in sizes.items()}

    placed = place_tables(tables, 2)

    loads = [sum(sizes[name] for name in placed if placed[name] == rank) for rank in range(2)]
    assert loads == [90, 90]
