"""Data that is refused: what is done in a folder, the error, and the name that it gives."""

import gzip
import os

import pytest

from recsys.config import load_config
from recsys.datasets import Store, SyntheticCriteo, prepare_criteo_1tb, prepare_criteo_kaggle
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError
from recsys.train import train

GOOD = "\t".join(["1", *["3"] * 13, *["0a"] * 26]) + "\n"


def write(folder, name, data):
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / name


def prepare(folder, name, data, **options):
    files = [write(folder, name, data)]
    prepare_criteo_kaggle(files, folder / "store", show_progress=False, **options)


def prepare_twice(folder, prepare_files, *names):
    """The first file by several names."""
    file = write(folder, names[0], GOOD)
    for name in names[1:]:
        (folder / name).symlink_to(file)
    prepare_files([folder / name for name in (*names, names[0])], folder / "store")


def prepare_in_place_of(folder, place):
    """Prepare where something is: `place` puts it there."""
    place(folder / "store")
    prepare(folder, "train.txt", GOOD)


def prepare_pipe(folder):
    os.mkfifo(folder / "pipe")
    prepare_criteo_kaggle([folder / "pipe"], folder / "store")


def prepare_days(folder, *names, **options):
    prepare_criteo_1tb([folder / name for name in names], folder / "store", **options)


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
        "a bad value of Criteo",
        lambda folder: prepare(folder, "train.txt", GOOD + GOOD.replace("3", "1.5", 1)),
        DatasetFormatError,
        "train.txt line 2",
    ),
    (
        "a table as Criteo",
        lambda folder: prepare(folder, "clicks.csv", "click,user,item\n1,2,3\n"),
        DatasetFormatError,
        "recsys prepare table",
    ),
    (
        "an empty file",
        lambda folder: prepare(folder, "train.txt", ""),
        DatasetFormatError,
        "train.txt",
    ),
    (
        "a gzip file that is cut",
        lambda folder: prepare(folder, "train.txt.gz", gzip.compress(GOOD.encode())[:-9]),
        DatasetFormatError,
        "train.txt.gz",
    ),
    ("a pipe as Criteo", prepare_pipe, FileNotFoundError, "pipe"),
    ("no file", lambda _: prepare_criteo_kaggle([], "store"), ConfigError, "raw_files"),
    ("no list", lambda _: prepare_criteo_kaggle("train.txt", "store"), ConfigError, "raw_files"),
    (
        "a file named twice",
        lambda folder: prepare_twice(folder, prepare_criteo_kaggle, "train.txt"),
        ConfigError,
        "train.txt",
    ),
    (
        "a day by two names",
        lambda folder: prepare_twice(folder, prepare_criteo_1tb, "day_0", "other"),
        ConfigError,
        "other",
    ),
    *[
        (name, lambda folder, act=act: prepare_in_place_of(folder, act), AlreadyExists, "store")
        for name, act in {
            "a folder in the place": lambda store: store.mkdir(),
            "a file in the place": lambda store: store.touch(),
            "a link to nothing in the place": lambda store: store.symlink_to("nowhere"),
        }.items()
    ],
    ("no days", prepare_days, ConfigError, "day_files"),
    *[
        (
            f"days with a bound of {bound}",
            lambda folder, bound=bound: prepare_days(folder, "day_0", max_ind_range=bound),
            ConfigError,
            "max_ind_range",
        )
        for bound in (0, 1.5)
    ],
    (
        "days that are not in order",
        lambda folder: prepare_days(folder, "day_0", "day_10", "day_2"),
        ConfigError,
        "day_10",
    ),
    *[
        (
            f"synthetic data of {settings}",
            lambda _, settings=settings: SyntheticCriteo(**{"num_samples": 700} | settings),
            ConfigError,
            name,
        )
        for settings, name in (
            ({"num_samples": 6}, "num_samples"),
            ({"table_sizes": [3, 0]}, "table_sizes"),
            ({"table_sizes": [2**31 + 1]}, "table_sizes"),
            ({"test_samples": -1}, "test_samples"),
            ({"test_samples": 500}, "test_samples"),
        )
    ],
    (
        "synthetic data with histories",
        lambda folder: train(load_config(None, [], data="synthetic:taobao"), folder / "run"),
        ConfigError,
        "synthetic:taobao",
    ),
    (
        "preferences of synthetic data that change",
        lambda folder: load_config(None, ["synthetic.preference_changes=[5]"]),
        ConfigError,
        "preference_changes",
    ),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(tmp_path)

    assert name in str(raised.value)
