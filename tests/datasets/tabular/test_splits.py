import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Schema, Store, write_store
from recsys.datasets.store_writer import SPLITS, classic_splits

pytest.importorskip("pyarrow")


def parts_of(folder, frame, split, column="times", **keys):
    """Times or groups of each part of a store."""
    frame = frame.assign(y=np.arange(len(frame)) % 2, c="x")
    schema = Schema.from_dict({"label": "y", "categorical": {"c": {}}, **keys, "split": split})
    store = Store(write_store(frame, schema, folder / "store").path)
    values = getattr(store, column)
    return {part: sorted(values[list(store.splits[part])].tolist()) for part in SPLITS}


@pytest.mark.parametrize("num_rows", [7, 13, 14, 20, 21, 1000])
def test_fourteenths_have_the_sizes_of_the_classic_split(tmp_path, num_rows):
    frame = pd.DataFrame({"t": np.arange(num_rows)})
    found = parts_of(tmp_path, frame, {"by": "fraction"}, timestamp="t")
    sizes = {part: len(rows) for part, rows in classic_splits(num_rows).items()}
    assert {part: len(rows) for part, rows in found.items()} == sizes


@pytest.mark.parametrize("shares", [{"test": 0.25}, {"test_from": 60}])
def test_training_comes_first_then_validation_then_test(tmp_path, shares):
    frame = pd.DataFrame({"t": [50, 10, 40, 30, 20, 0, 60, 70]})
    split = {"by": "timestamp", "validation": 0.25, **shares}
    assert parts_of(tmp_path, frame, split, timestamp="t") == {
        "train": [0, 10, 20, 30],
        "validation": [40, 50],
        "test": [60, 70],
    }


def test_a_random_split_has_about_the_shares_and_depends_on_the_seed(tmp_path):
    frame = pd.DataFrame({"t": np.arange(20_000)})
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        split = {"by": "random", "test": 0.1, "validation": 0.2, "seed": seed}
        (tmp_path / name).mkdir()
        found.append(parts_of(tmp_path / name, frame, split, timestamp="t"))
    shares = [len(found[0][part]) / 20_000 for part in SPLITS]
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.02)
    assert found[0] == found[1] != found[2]


def test_a_group_is_in_one_part_the_same_in_every_file(tmp_path):
    users = np.random.default_rng(0).integers(0, 400, 3000)
    split = {"by": "group", "test": 0.2, "validation": 0.2}
    found = []
    for name, rows in (("a", users), ("b", users[::-1]), ("c", users[::-1].astype(str))):
        (tmp_path / name).mkdir()
        frame = pd.DataFrame({"t": rows.astype(int), "u": rows})
        found.append(parts_of(tmp_path / name, frame, split, timestamp="t", group="u"))
    sets = [set(found[0][part]) for part in SPLITS]
    assert found[0] == found[1] == found[2]
    assert not sets[0] & sets[1]
    assert not (sets[0] | sets[1]) & sets[2]
    np.testing.assert_allclose([len(users) / 400 for users in sets], [0.6, 0.2, 0.2], atol=0.07)
