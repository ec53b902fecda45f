"""Which rank has which table, and what several processes cannot do."""

import pytest
import torch

pytest.importorskip("torchrec")

from recsys.config import load_config
from recsys.errors import ConfigError
from recsys.train.build import open_source
from recsys.train.rank_model import (
    _require_no_running_statistics,
    place_tables,
    require_supported,
)


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


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("schedule=hotline", "schedule must be one of .* got 'hotline'"),
        ("schedule=fae", "schedule must be one of .* got 'fae'"),
        ("schedule=auto", "schedule must be one of .* got 'auto'"),
        ("init_from=run", "init_from must be '' on 2 processes, got 'run'"),
    ],
)
def test_what_one_process_alone_can_do_is_refused_by_name(setting, name):
    config = load_config(None, [setting], data="synthetic:criteo-kaggle")

    with pytest.raises(ConfigError, match=name):
        require_supported(config, open_source(config), 2, keeps_best=False)


def test_batch_normalization_is_refused():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="1: BatchNorm1d would see each process's samples alone"):
        _require_no_running_statistics(network)
