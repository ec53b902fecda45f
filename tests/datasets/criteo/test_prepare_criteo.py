"""Stores of Criteo's files, and of its 1TB days: modulo, splits, what a failed run leaves."""

import gzip
import hashlib
import math

import numpy as np
import pytest

from recsys.datasets import Store, prepare_criteo_1tb, prepare_criteo_kaggle
from recsys.errors import DatasetFormatError


@pytest.fixture
def days(raw_line, tmp_path, monkeypatch):
    """Three day files that take two blocks each; every day brings new ids and repeats old ones."""
    monkeypatch.setattr("recsys.datasets.criteo.BLOCK_BYTES", 4000)
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


def oracle(text, max_ind_range=None):
    """The conventions in plain Python, one value at a time; `splits` are those of Kaggle's file."""
    rows_of_ids = [{} for _ in range(26)]
    labels, integers, rows = [], [], []
    for line in text.splitlines():
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
    return {
        "labels": labels,
        "dense": integers,
        "sparse": rows,
        "ids": [raw_id for seen in rows_of_ids for raw_id in seen],
        "sizes": [len(seen) for seen in rows_of_ids],
        "splits": splits_of_last(len(labels), len(labels) // 7),
    }


def assert_store_is(store, expected):
    for name in ("labels", "dense", "sparse", "ids"):
        np.testing.assert_array_equal(getattr(store, name), expected[name], err_msg=name)
    assert list(store.table_sizes.values()) == expected["sizes"]
    assert store.splits == expected["splits"]


def splits_of_last(num_samples, num_last):
    """All samples but the last ones are for training; a single day is as Kaggle's file."""
    train = num_samples - num_last
    test = train + math.ceil(num_last / 2)
    return {
        "train": range(train),
        "test": range(train, test),
        "validation": range(test, num_samples),
    }


def prepare(paths, out, **options):
    return prepare_criteo_1tb(paths, out, show_progress=False, num_threads=2, **options)


@pytest.mark.parametrize("max_ind_range", [None, 1, 7, 2**32 - 1, 2**32, 2**40])
def test_days_are_prepared_as_the_oracle_says(days, tmp_path, max_ind_range):
    expected = oracle("".join(path.read_text() for path in days), max_ind_range)
    expected["splits"] = splits_of_last(78, 27)

    report = prepare(days, tmp_path / "store", max_ind_range=max_ind_range)

    store = Store(tmp_path / "store")
    assert_store_is(store, expected)
    assert (report.num_samples, report.num_rows) == (len(store.labels), len(store.ids))
    assert store.meta.get("max_ind_range") == max_ind_range
    sources = store.meta["sources"]
    assert [source["num_samples"] for source in sources] == [25, 26, 27]
    assert sources[0]["num_bytes"] == days[0].stat().st_size
    assert sources[0]["sha256"] == hashlib.sha256(days[0].read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0", "day_1", "day_2", "store"]


def test_the_first_lines_of_the_real_sets_are_prepared_as_the_oracle_says(
    day_0_head, kaggle_10k, tmp_path
):
    with gzip.open(day_0_head, "rt") as file:
        lines = file.read().splitlines(keepends=True)
    with gzip.open(kaggle_10k, "rt") as file:
        of_kaggle = file.read()
    texts = ["".join(lines[:400]), "".join(lines[400:799]), "".join(lines[799:])]
    paths = [tmp_path / f"day_{day}.gz" for day in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(gzip.compress(text.encode()))

    prepare(paths, tmp_path / "days", max_ind_range=1000)
    prepare([day_0_head], tmp_path / "head")

    expected = oracle("".join(lines), 1000) | {"splits": splits_of_last(1000, 201)}
    assert_store_is(Store(tmp_path / "days"), expected)
    assert_store_is(Store(tmp_path / "head"), oracle("".join(lines)))
    assert_store_is(prepare_kaggle(kaggle_10k, tmp_path / "kaggle"), oracle(of_kaggle))


def test_an_error_in_a_later_day_leaves_nothing_behind(days, tmp_path):
    days[1].write_text(days[1].read_text() + "1\n")

    with pytest.raises(DatasetFormatError, match="day_1 line 27"):
        prepare(days, tmp_path / "store")

    assert sorted(tmp_path.iterdir()) == days


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("num_missing", [1, 7, 8])
def test_a_file_that_is_cut_in_its_last_value_is_refused(raw_line, tmp_path, pack, num_missing):
    raw = tmp_path / "raw.txt"
    text = raw_line("0", categories=["01234567"] * 26)
    raw.write_bytes(pack(f"{text}\n{text}"[:-num_missing].encode()))

    with pytest.raises(DatasetFormatError, match=r"raw\.txt"):
        prepare_kaggle(raw, tmp_path / "store")


def prepare_kaggle(raw, out, **options):
    prepare_criteo_kaggle([raw], out, show_progress=False, **options)
    return Store(out)


def test_missing_fields_negatives_and_a_last_line_without_an_end(raw_line, tmp_path):
    text = "\n".join(
        [
            raw_line("1", [""] * 13, [""] * 26),
            raw_line("0", ["-2", "0", "5"] + [""] * 10, ["", "0", "00000000"] + ["a"] * 23),
            raw_line("1", ["-2147483648"] * 13, ["A"] * 26),
            *[raw_line("0", [str(line)] * 13, [f"{line:08x}"] * 26) for line in range(20)],
        ]
    )
    raw = tmp_path / "raw.txt"
    raw.write_text(text)

    store = prepare_kaggle(raw, tmp_path / "store")

    assert_store_is(store, oracle(text))


def test_several_files_are_one_data_set_and_their_ends_are_line_ends(raw_line, tmp_path):
    texts = [raw_line(label, categories=[f"{label}000000a"] * 26) for label in "01"]
    raws = [tmp_path / "one.txt", tmp_path / "two.txt.gz"]
    raws[0].write_text(texts[0])
    raws[1].write_bytes(gzip.compress(texts[1].encode()))

    prepare_criteo_kaggle(raws, tmp_path / "store", show_progress=False)

    store = Store(tmp_path / "store")
    assert_store_is(store, oracle("\n".join(texts)))
    assert [source["name"] for source in store.meta["sources"]] == ["one.txt", "two.txt.gz"]


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.criteo.BLOCK_BYTES", 1000)
    raw = tmp_path / "raw.txt"
    raw.write_bytes(b"0" * 10_000)

    with pytest.raises(DatasetFormatError, match=r"raw\.txt"):
        prepare_kaggle(raw, tmp_path / "store")
