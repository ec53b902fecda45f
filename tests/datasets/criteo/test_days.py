"""Criteo 1TB days: modulo, splits, and what a failed run leaves."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from recsys.datasets.criteo.prepare import prepare_criteo_1tb
from recsys.datasets.criteo.read import CriteoReader
from recsys.datasets.splits import classic_splits
from recsys.datasets.store import Store
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError

SPLITS = ("train", "test", "validation")


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch):
    monkeypatch.setattr("recsys.datasets.criteo.read.BLOCK_BYTES", 4000)


@pytest.fixture
def days(raw_line, tmp_path):
    """Three day files that take two blocks each; every day brings new ids and repeats old ones."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"day_{day}" for day in range(3)]
    for day, path in enumerate(paths):
        lines = []
        for line in range(25 + day):
            integers = ["" if n < 0 else str(n - 3) for n in rng.integers(-2, 20, 13)]
            ids = [
                "" if n < 0 else f"{n * 2654435761 % 2**32:08x}"
                for n in rng.integers(-2, 30 + 30 * day, 26)
            ]
            lines.append(raw_line(str(line % 2), integers, ids) + "\n")
        path.write_text("".join(lines))
    return paths


def oracle(texts, max_ind_range=None):
    """The convention in plain Python, one value at a time."""
    rows_of_ids = [{} for _ in range(26)]
    labels, integers, rows = [], [], []
    for line in (line for text in texts for line in text.splitlines()):
        fields = ["0" if field == "" else field for field in line.split("\t")]
        labels.append(int(fields[0]))
        integers.append([max(int(field), 0) for field in fields[1:14]])
        ids = [int(field, 16) for field in fields[14:]]
        if max_ind_range is not None:
            ids = [raw_id % max_ind_range for raw_id in ids]
        rows.append(
            [
                seen.setdefault(raw_id, len(seen))
                for seen, raw_id in zip(rows_of_ids, ids, strict=True)
            ]
        )
    sizes = [len(text.splitlines()) for text in texts]
    train = sum(sizes[:-1])
    test = train + math.ceil(sizes[-1] / 2)
    return {
        "labels": labels,
        "dense": integers,
        "sparse": rows,
        "ids": [raw_id for seen in rows_of_ids for raw_id in seen],
        "sizes": [len(seen) for seen in rows_of_ids],
        "splits": [range(train), range(train, test), range(test, sum(sizes))],
    }


def assert_store_is(store, expected):
    for name in ("labels", "dense", "sparse", "ids"):
        np.testing.assert_array_equal(getattr(store, name), expected[name], err_msg=name)
    assert list(store.table_sizes.values()) == expected["sizes"]
    assert [store.splits[name] for name in SPLITS] == expected["splits"]


def prepare(paths, out, **options):
    return prepare_criteo_1tb(paths, out, show_progress=False, num_threads=2, **options)


@pytest.mark.parametrize("max_ind_range", [None, 1, 7, 2**32 - 1, 2**32, 2**40])
def test_days_are_prepared_as_the_oracle_says(days, tmp_path, max_ind_range):
    expected = oracle([path.read_text() for path in days], max_ind_range)

    report = prepare(days, tmp_path / "store", max_ind_range=max_ind_range)

    store = Store(tmp_path / "store")
    assert_store_is(store, expected)
    assert (report.num_samples, report.num_rows) == (len(store.labels), len(store.ids))
    assert store.meta.get("max_ind_range") == max_ind_range
    assert [source["num_samples"] for source in store.meta["sources"]] == [25, 26, 27]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0", "day_1", "day_2", "store"]


def test_the_first_thousand_lines_of_day_0_are_prepared_as_the_oracle_says(day_0_head, tmp_path):
    with gzip.open(day_0_head, "rt") as file:
        lines = file.read().splitlines(keepends=True)
    texts = ["".join(lines[:400]), "".join(lines[400:799]), "".join(lines[799:])]
    paths = [tmp_path / f"day_{day}.gz" for day in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(gzip.compress(text.encode()))

    prepare(paths, tmp_path / "days", max_ind_range=1000)
    prepare([day_0_head], tmp_path / "head")

    assert_store_is(Store(tmp_path / "days"), oracle(texts, 1000))
    whole = oracle(["".join(lines)])
    whole["splits"] = [classic_splits(1000)[name] for name in SPLITS]
    assert_store_is(Store(tmp_path / "head"), whole)


def test_a_single_day_is_split_as_the_kaggle_file_is(days, tmp_path):
    prepare(days[:1], tmp_path / "store")

    assert Store(tmp_path / "store").splits == classic_splits(25)


def test_a_bad_line_is_named_and_leaves_nothing_behind(days, tmp_path):
    days[2].write_text(days[2].read_text() + "bad\n")

    with pytest.raises(DatasetFormatError, match=r"day_2 line 28: expected 40 .*repair the line"):
        prepare(days, tmp_path / "store")

    assert sorted(tmp_path.iterdir()) == days


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_in_a_later_day_leaves_nothing_behind(days, tmp_path, monkeypatch, error):
    read = CriteoReader.read

    def read_or_fail(self, path):
        if path == days[1]:
            raise error
        return read(self, path)

    monkeypatch.setattr(CriteoReader, "read", read_or_fail)

    with pytest.raises(error):
        prepare(days, tmp_path / "store")

    assert sorted(tmp_path.iterdir()) == days


def test_an_existing_store_is_never_overwritten(days, tmp_path):
    (tmp_path / "store").mkdir()

    with pytest.raises(AlreadyExists, match="exists already; choose another"):
        prepare(days, tmp_path / "store")

    assert list((tmp_path / "store").iterdir()) == []


def test_a_day_may_come_in_parts(days, tmp_path):
    parts = [path.rename(tmp_path / f"day_0_part{part}") for part, path in enumerate(days)]

    prepare(parts, tmp_path / "store")

    assert Store(tmp_path / "store").splits["train"] == range(25 + 26)


def test_a_file_that_is_named_twice_is_refused_whatever_its_name(days, tmp_path):
    (tmp_path / "other").symlink_to(days[0])

    with pytest.raises(ConfigError, match=r"other must be named once, is the same file as .*day_0"):
        prepare([*days, tmp_path / "other"], tmp_path / "store")


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, r"day_files must be a list of at least one file, got \[\]"),
        (["day_0"], {"max_ind_range": 0}, "max_ind_range must be an integer and at least 1, got 0"),
        (["day_0"], {"max_ind_range": 1.5}, r"an integer and at least 1, got 1\.5"),
        (
            ["day_0", "day_10", "day_2"],
            {},
            r"oldest first, got day_0, day_10, day_2; in a shell use day_",
        ),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(tmp_path, names, options, message):
    with pytest.raises(ConfigError, match=message):
        prepare([Path(name) for name in names], tmp_path / "store", **options)

    assert list(tmp_path.iterdir()) == []
