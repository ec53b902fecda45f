"""Criteo 1TB days: modulo, splits, and going on after an interruption."""

import gzip
import itertools
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from recsys.datasets.criteo import prepare as preparing
from recsys.datasets.criteo.prepare import prepare_criteo_1tb
from recsys.datasets.criteo.read import CriteoReader
from recsys.datasets.splits import classic_splits
from recsys.datasets.store import Store, StoreWriter
from recsys.errors import ConfigError, DatasetFormatError, StoreError
from tests.forks import Fork

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


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stopped(BaseException):
    """As KeyboardInterrupt is, not an Exception."""


def prepare_until(days, out, number, error=Stopped, **options):
    """A run that is stopped in the middle of a day."""
    number_columns, read = CriteoReader._number_columns, CriteoReader.read
    reading = []

    def noting(self, path):
        reading[:] = [path]
        return read(self, path)

    def failing(self, parts):
        reading.append(parts)
        if reading[0] == days[number] and len(reading) == 3:
            raise error
        number_columns(self, parts)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(CriteoReader, "_number_columns", failing)
        patches.setattr(CriteoReader, "read", noting)
        prepare(days, out, **options)


@pytest.fixture
def stopped(days, tmp_path):
    """The unfinished store of a run that ended in the middle of day 2; what it was asked for."""

    def stop(**options):
        with pytest.raises(Stopped):
            prepare_until(days, tmp_path / "store", 2, **options)
        return tmp_path / "store.unfinished"

    return stop


@pytest.mark.parametrize("max_ind_range", [None, 1, 7, 2**32 - 1, 2**32, 2**40])
def test_days_are_prepared_as_the_oracle_says(days, tmp_path, max_ind_range):
    expected = oracle([path.read_text() for path in days], max_ind_range)

    report = prepare(days, tmp_path / "store", max_ind_range=max_ind_range)

    store = Store(tmp_path / "store")
    assert_store_is(store, expected)
    assert (report.num_samples, report.num_rows) == (len(store.labels), len(store.ids))
    assert report.num_files_before == 0
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


def test_a_run_killed_at_any_moment_is_gone_on_with_to_the_same_bytes(days, tmp_path):
    snapshots, numbers = [], itertools.count()

    def snapshot_before(owner, name):
        original = getattr(owner, name)

        def noting(*arguments, **options):
            unfinished = tmp_path / "store.unfinished"
            if unfinished.exists():
                copy = tmp_path / f"snapshot{next(numbers)}"
                # What is not in the files yet would be lost with the process, and is not copied.
                shutil.copytree(unfinished, copy)
                snapshots.append((copy, num_committed()))
            return original(*arguments, **options)

        patches.setattr(owner, name, noting)

    def num_committed():
        record = tmp_path / "store.unfinished" / "committed.json"
        return len(json.loads(record.read_text())["days"]) if record.exists() else 0

    with pytest.MonkeyPatch.context() as patches:
        for owner, name in (
            (CriteoReader, "_number_columns"),
            (StoreWriter, "append"),
            (StoreWriter, "flush"),
            (preparing, "_commit"),
            (StoreWriter, "finish"),
            (preparing, "_remove"),
            (Path, "unlink"),
            (Path, "rmdir"),
            (shutil, "rmtree"),
            (preparing, "appearing_whole"),
            (sys.modules["recsys.datasets.store_writer"], "flush_to_disk"),
        ):
            snapshot_before(owner, name)
        options = {"max_ind_range": 50}
        prepare(days, tmp_path / "store", **options)
    expected = contents(tmp_path / "store")

    assert {committed for _, committed in snapshots} == {0, 1, 2, 3}
    for snapshot, num_committed_then in snapshots:
        if not (snapshot / "store").exists() and num_committed_then:
            continue  # the store has its name
        shutil.rmtree(tmp_path / "store")
        snapshot.rename(tmp_path / "store.unfinished")

        report = prepare(days, tmp_path / "store", **options)

        assert contents(tmp_path / "store") == expected
        assert report.num_files_before == num_committed_then
        assert not (tmp_path / "store.unfinished").exists()


def prepare_until_day_2(store, days):
    read = CriteoReader.read

    def read_then_die(self, path):
        source = read(self, path)
        if path.name == "day_2":
            os.kill(os.getpid(), signal.SIGKILL)
        return source

    CriteoReader.read = read_then_die
    prepare_criteo_1tb(days, store, show_progress=False)


@pytest.mark.slow
def test_a_process_that_was_killed_loses_the_day_it_was_at_and_no_other(days, tmp_path):
    prepare(days, tmp_path / "expected")
    killed = Fork(prepare_until_day_2, tmp_path / "store", days)
    _, said = killed.end()
    assert killed.process.exitcode == -signal.SIGKILL, said
    assert not (tmp_path / "store").exists()

    report = prepare(days, tmp_path / "store")

    assert report.num_files_before == 2
    assert contents(tmp_path / "store") == contents(tmp_path / "expected")


def test_committed_days_are_not_read_again(days, tmp_path, stopped):
    stopped()
    read = []

    with pytest.MonkeyPatch.context() as patches:
        original = CriteoReader.read
        patches.setattr(
            CriteoReader, "read", lambda self, path: read.append(path) or original(self, path)
        )
        prepare_criteo_1tb(days, tmp_path / "store")

    assert read == days[2:]


def test_a_bad_line_costs_the_day_it_is_in_and_is_repaired(days, tmp_path):
    good = days[2].read_text()
    prepare(days, tmp_path / "expected")
    days[2].write_text(good + "bad\n")
    with pytest.raises(DatasetFormatError, match=r"day_2 line 28: expected 40 .*repair the line"):
        prepare(days, tmp_path / "store")
    assert (tmp_path / "store.unfinished").exists()

    days[2].write_text(good)
    report = prepare(days, tmp_path / "store")

    assert report.num_files_before == 2
    assert contents(tmp_path / "store") == contents(tmp_path / "expected")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_in_the_first_day_leaves_nothing_behind(days, tmp_path, error):
    with pytest.raises(error):
        prepare_until(days, tmp_path / "store", 0, error)

    assert sorted(tmp_path.iterdir()) == days


def test_a_day_may_come_in_parts(days, tmp_path):
    parts = [path.rename(tmp_path / f"day_0_part{part}") for part, path in enumerate(days)]

    prepare(parts, tmp_path / "store")

    assert Store(tmp_path / "store").splits["train"] == range(25 + 26)


def test_a_file_that_is_named_twice_is_refused_whatever_its_name(days, tmp_path):
    (tmp_path / "other").symlink_to(days[0])

    with pytest.raises(ConfigError, match=r"other must be named once, is the same file as .*day_0"):
        prepare([*days, tmp_path / "other"], tmp_path / "store")


def test_days_may_follow_that_were_not_thought_of_at_first(days, tmp_path):
    prepare(days, tmp_path / "expected")
    with pytest.raises(Stopped):
        prepare_until(days[:2], tmp_path / "store", 1)

    report = prepare(days, tmp_path / "store")

    assert report.num_files_before == 1
    assert contents(tmp_path / "store") == contents(tmp_path / "expected")


def refused(days, tmp_path, error, message, **options):
    """Check that going on is refused, and that it costs nothing of what is there."""

    def committed():
        files = (tmp_path / "store.unfinished").rglob("*.*")
        return {file: file.read_bytes() for file in files if file.parent.name != "store"}

    before = committed()

    with pytest.raises(error, match=message):
        prepare(days, tmp_path / "store", **options)

    assert committed() == before
    assert not (tmp_path / "store").exists()


def test_another_option_is_refused(days, tmp_path, stopped):
    stopped(max_ind_range=50)

    refused(
        days,
        tmp_path,
        ConfigError,
        r"unchanged .*, and max_ind_range 50, got .* and 51; name these, or remove",
        max_ind_range=51,
    )


@pytest.mark.parametrize("given", [[1, 2], [0, 2], [0], [1]])
def test_other_days_are_refused(days, tmp_path, stopped, given):
    stopped()

    refused(
        [days[day] for day in given],
        tmp_path,
        ConfigError,
        r"first days must be day_0, day_1, unchanged .* got day_",
    )


def test_a_day_that_was_changed_is_refused(days, tmp_path, stopped):
    stopped()

    days[1].write_text(days[1].read_text() + "\n")

    refused(days, tmp_path, ConfigError, "first days must be day_0, day_1, unchanged")


@pytest.mark.parametrize(
    "change", ["", "[]", '{"days": [], "max_ind_range"', '{"days": [{}], "max_ind_range": null}']
)
def test_a_damaged_record_is_refused(days, tmp_path, stopped, change):
    (stopped() / "committed.json").write_text(change)

    refused(days, tmp_path, StoreError, r"committed\.json is not a record .* to start again")


def test_a_link_among_the_files_is_refused(days, tmp_path, stopped):
    labels = stopped() / "store" / "labels.bin"
    labels.rename(tmp_path / "mine")
    labels.symlink_to(tmp_path / "mine")

    refused(days, tmp_path, StoreError, "must not have symbolic links")


def test_arrays_that_lost_committed_samples_are_refused(days, tmp_path, stopped):
    file = stopped() / "store" / "sparse.bin"
    file.write_bytes(file.read_bytes()[:51])

    refused(days, tmp_path, StoreError, r"sparse\.bin must have at least 5304 bytes, has 51")


def test_ids_that_are_not_those_of_rows_are_refused(days, tmp_path, stopped):
    file = stopped() / "ids" / "cat_3.bin"
    ids = np.fromfile(file, "<u4")
    ids[1] = ids[0]
    ids.tofile(file)

    refused(days, tmp_path, StoreError, r"cat_3\.bin: an id must have one row.* to start again")


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
