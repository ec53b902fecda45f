"""Data that is refused: what is done in a folder, the error, and the name that it gives."""

import gzip

import pytest

from recsys.config import load_config
from recsys.datasets import Store, prepare_criteo_kaggle
from recsys.errors import ConfigError, DatasetFormatError, StoreError
from recsys.train.parts.build import open_source

GOOD = "\t".join(["1", *["3"] * 13, *["0a"] * 26]) + "\n"


def write(folder, name, data):
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / name


def prepare(folder, name, data):
    prepare_criteo_kaggle([write(folder, name, data)], folder / "store", show_progress=False)


def inspect(folder, text):
    pytest.importorskip("pyarrow")
    from recsys.datasets.tabular.guessing.guess import guess_schema

    guess_schema([write(folder, "a.csv", text)])


REFUSALS = [
    (
        "arrays of another program as a store",
        lambda folder: Store(write(folder, "processed.npz", b"PK")),
        StoreError,
        "processed.npz",
    ),
    (
        "a zst file of Criteo",
        lambda folder: prepare(folder, "train.txt.zst", b"\x28\xb5\x2f\xfd" + bytes(99)),
        DatasetFormatError,
        "train.txt.zst",
    ),
    (
        "a bad line of Criteo",
        lambda folder: prepare(folder, "train.txt.gz", gzip.compress(f"{GOOD}bad\n".encode())),
        DatasetFormatError,
        "train.txt.gz line 2",
    ),
    (
        "synthetic data with histories",
        lambda folder: open_source(load_config(None, [], data="synthetic:taobao")),
        ConfigError,
        "synthetic:taobao",
    ),
    (
        "preferences of synthetic data that change",
        lambda folder: load_config(None, ["synthetic.preference_changes=[5]"]),
        ConfigError,
        "preference_changes",
    ),
    (
        "a draft of a table without a label, a group and an item",
        lambda folder: inspect(folder, "a,b\nx,z\ny,w\n"),
        ConfigError,
        "--label",
    ),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(tmp_path)

    assert name in str(raised.value)
