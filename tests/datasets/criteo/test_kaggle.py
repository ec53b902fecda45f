import gzip
import itertools
import math
import os
import tracemalloc

import numpy as np
import pytest

from recsys.datasets.criteo.parse import explain
from recsys.datasets.criteo.prepare import prepare_criteo_kaggle
from recsys.datasets.store import Store
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError


def classic_oracle(text):
    """The classic convention in plain Python, one value at a time."""
    rows_of_ids = [{} for _ in range(26)]
    labels, integers, rows = [], [], []
    for line in text.splitlines():
        fields = ["0" if field == "" else field for field in line.split("\t")]
        labels.append(int(fields[0]))
        integers.append([max(int(field), 0) for field in fields[1:14]])
        ids = [int(field, 16) for field in fields[14:]]
        rows.append(
            [
                seen.setdefault(raw_id, len(seen))
                for seen, raw_id in zip(rows_of_ids, ids, strict=True)
            ]
        )
    part_sizes = [len(labels) // 7 + (part < len(labels) % 7) for part in range(7)]
    num_train, num_test = sum(part_sizes[:6]), math.ceil(part_sizes[6] / 2)
    bounds = [0, num_train, num_train + num_test, len(labels)]
    return {
        "labels": labels,
        "dense": integers,
        "sparse": rows,
        "ids": [raw_id for seen in rows_of_ids for raw_id in seen],
        "sizes": [len(seen) for seen in rows_of_ids],
        "splits": [range(begin, end) for begin, end in itertools.pairwise(bounds)],
    }


def assert_store_is(store, expected):
    for name in ("labels", "dense", "sparse", "ids"):
        np.testing.assert_array_equal(getattr(store, name), expected[name], err_msg=name)
    assert list(store.table_sizes.values()) == expected["sizes"]
    assert [store.splits[name] for name in ("train", "test", "validation")] == expected["splits"]


def prepare(raw, out, **options):
    prepare_criteo_kaggle([raw], out, show_progress=False, **options)
    return Store(out)


def test_the_first_ten_thousand_lines_are_prepared_as_the_oracle_says(kaggle_10k, tmp_path):
    with gzip.open(kaggle_10k, "rt") as file:
        expected = classic_oracle(file.read())

    store = prepare(kaggle_10k, tmp_path / "store")

    assert_store_is(store, expected)


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

    store = prepare(raw, tmp_path / "store")

    assert_store_is(store, classic_oracle(text))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_single_line(raw_line, tmp_path, end):
    raw = tmp_path / "raw.txt"
    raw.write_bytes((raw_line("1") + end).encode())

    store = prepare(raw, tmp_path / "store")

    assert_store_is(store, classic_oracle(raw_line("1")))


def test_several_files_are_one_data_set_and_their_ends_are_line_ends(raw_line, tmp_path):
    texts = [raw_line("0", categories=["a"] * 26), raw_line("1", categories=["b"] * 26)]
    raws = [tmp_path / "one.txt", tmp_path / "two.txt.gz"]
    raws[0].write_text(texts[0])
    raws[1].write_bytes(gzip.compress(texts[1].encode()))

    prepare_criteo_kaggle(raws, tmp_path / "store", show_progress=False)

    store = Store(tmp_path / "store")
    assert_store_is(store, classic_oracle("\n".join(texts)))
    assert [source["name"] for source in store.meta["sources"]] == ["one.txt", "two.txt.gz"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_and_threads_leave_no_trace(raw_line, tmp_path, monkeypatch, num_threads):
    monkeypatch.setattr("recsys.datasets.criteo.read.BLOCK_BYTES", 1000)
    text = "".join(
        raw_line(str(line % 2), [str(line)] * 13, [f"{line * line % 97:x}"] * 26) + "\n"
        for line in range(300)
    )
    raw = tmp_path / "raw.txt"
    raw.write_text(text)

    store = prepare(raw, tmp_path / "store", num_threads=num_threads)

    assert_store_is(store, classic_oracle(text))


def test_a_bad_line_stops_with_file_line_rule_and_value_and_leaves_nothing(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text("\n".join([raw_line()] * 50 + [raw_line(integers=["1.5"] + ["1"] * 12)] * 2))

    with pytest.raises(DatasetFormatError) as caught:
        prepare(raw, tmp_path / "store")

    assert str(caught.value).startswith(
        f"{raw} line 51: field 2 (int_0) must be empty or an integer, got '1.5'"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_a_first_line_of_another_format_names_the_command_for_other_tables(tmp_path, raw_line):
    table, raw = tmp_path / "clicks.csv", tmp_path / "raw.txt"
    table.write_text("click,user,item\n1,2,3\n")
    raw.write_text(f"{raw_line()}\noops\n")

    with pytest.raises(DatasetFormatError, match=rf"`recsys prepare table {table} --schema"):
        prepare(table, tmp_path / "store")
    with pytest.raises(DatasetFormatError, match=r"line 2: .*repair the line, or delete it$"):
        prepare(raw, tmp_path / "store")


def test_a_link_to_nothing_in_the_place_of_a_store_is_refused_at_once(raw_line, tmp_path):
    raw, store = tmp_path / "raw.txt", tmp_path / "store"
    raw.write_text(raw_line())
    store.symlink_to(tmp_path / "nowhere")

    with pytest.raises(
        AlreadyExists, match=r"is a link to .*nowhere, which does not exist; choose"
    ):
        prepare(raw, store)

    assert store.is_symlink()
    assert sorted(tmp_path.iterdir()) == [raw, store]


def test_arguments_that_are_no_lists_or_numbers_are_refused(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text(raw_line())

    for files in ([], str(raw), raw):
        with pytest.raises(
            ConfigError, match=r"raw_files must be a list of at least one file, got"
        ):
            prepare_criteo_kaggle(files, tmp_path / "store")
    with pytest.raises(ConfigError, match=r"num_threads must be an integer and at least 0, .*-1"):
        prepare(raw, tmp_path / "store", num_threads=-1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        FileNotFoundError, match=r"pipe must be a file, found no plain file; create"
    ):
        prepare(tmp_path / "pipe", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_empty_file_is_refused(tmp_path):
    raw = tmp_path / "raw.txt"
    raw.touch()

    with pytest.raises(DatasetFormatError, match="no line in it"):
        prepare(raw, tmp_path / "store")


def test_a_broken_gzip_file_is_named(raw_line, tmp_path):
    raw = tmp_path / "raw.txt.gz"
    text = "".join(raw_line(categories=[f"{line:x}"] * 26) + "\n" for line in range(5000))
    raw.write_bytes(gzip.compress(text.encode())[:-200])

    with pytest.raises(DatasetFormatError, match=r"raw\.txt\.gz: broken gzip file"):
        prepare(raw, tmp_path / "store")


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.criteo.read.BLOCK_BYTES", 1000)
    raw = tmp_path / "raw.txt"
    raw.write_bytes(b"0" * 10_000)

    with pytest.raises(DatasetFormatError, match="is this text"):
        prepare(raw, tmp_path / "store")


def test_ctrl_c_while_preparing_leaves_nothing_behind(raw_line, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    raw = tmp_path / "raw.txt"
    raw.write_text(raw_line())
    monkeypatch.setattr("recsys.datasets.criteo.read.CriteoReader._number_columns", interrupt)

    with pytest.raises(KeyboardInterrupt):
        prepare(raw, tmp_path / "store")

    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_an_existing_store_is_never_overwritten(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text(raw_line())
    prepare(raw, tmp_path / "store")
    before = (tmp_path / "store" / "meta.json").read_bytes()

    with pytest.raises(AlreadyExists, match="exists already; choose another"):
        prepare(raw, tmp_path / "store")

    assert (tmp_path / "store" / "meta.json").read_bytes() == before


def test_the_store_keeps_where_it_came_from(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text(raw_line())

    store = prepare(raw, tmp_path / "store")

    (source,) = store.meta["sources"]
    assert source["num_bytes"] == raw.stat().st_size
    assert len(source["sha256"]) == 64


def test_a_file_named_twice_is_refused(tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text("not read")

    with pytest.raises(ConfigError, match=r"raw input .*raw\.txt must be named once, is the same"):
        prepare_criteo_kaggle([raw, raw], tmp_path / "store", show_progress=False)

    assert list(tmp_path.iterdir()) == [raw]


def test_a_line_of_tabs_is_explained_in_little_memory():
    line = b"\t" * 2**22

    tracemalloc.start()
    try:
        assert explain(line) == ("expected 40 tab-separated fields", "4194305")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20
