import bz2
import gzip
import io
import itertools
import json
import lzma
import math
import os
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from recsys.datasets.criteo.flow import _next_newline
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.datasets.criteo.parse import explain
from recsys.datasets.store import Store
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, MissingDependency


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
    monkeypatch.setattr("recsys.datasets.criteo.text.BLOCK_BYTES", 1000)
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
    assert "--skip-bad-lines" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_bad_lines_are_left_out_counted_and_listed_when_asked(raw_line, tmp_path):
    good = [raw_line(str(line % 2), categories=[f"{line:x}"] * 26) for line in range(40)]
    raw = tmp_path / "raw.txt"
    raw.write_text("\n".join(["bad", *good[:30], raw_line("7"), *good[30:], ""]) + "\n")

    report = prepare_criteo_kaggle(
        [raw], tmp_path / "store", skip_bad_lines=True, show_progress=False
    )

    store = Store(tmp_path / "store")
    assert_store_is(store, classic_oracle("\n".join(good)))
    listed = [json.loads(line) for line in report.bad_lines.read_text().splitlines()]
    assert [(entry["line"], entry["value"]) for entry in listed] == [
        (1, "1"),
        (32, "'7'"),
        (43, "1"),
    ]
    assert report.num_bad_lines == store.meta["num_bad_lines"] == 3


def test_a_file_without_a_good_line_is_refused(tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text("a,b,c\n" * 5)

    with pytest.raises(DatasetFormatError, match="no good line among 5"):
        prepare(raw, tmp_path / "store", skip_bad_lines=True)


def test_a_first_line_of_another_format_names_the_command_for_other_tables(tmp_path, raw_line):
    table, raw = tmp_path / "clicks.csv", tmp_path / "raw.txt"
    table.write_text("click,user,item\n1,2,3\n")
    raw.write_text(f"{raw_line()}\noops\n")

    with pytest.raises(DatasetFormatError, match=rf"`recsys prepare table {table} --schema"):
        prepare(table, tmp_path / "store")
    with pytest.raises(DatasetFormatError, match=r"line 2: .*with --skip-bad-lines$"):
        prepare(raw, tmp_path / "store")


def tar_of(text):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo("train.txt")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return made.getvalue()


def zip_of(text):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("train.txt", text)
    return made.getvalue()


@pytest.mark.parametrize(
    ("pack", "kind"),
    [
        (tar_of, "a tar archive"),
        (lambda text: gzip.compress(tar_of(text)), "a tar archive"),
        (zip_of, "a zip archive"),
        (bz2.compress, "a bzip2 file"),
        (lzma.compress, "an xz file"),
    ],
)
def test_archives_are_refused_although_most_of_their_lines_are_good(raw_line, tmp_path, pack, kind):
    raw = tmp_path / "raw"
    raw.write_bytes(pack(f"{raw_line()}\n".encode() * 50))

    with pytest.raises(DatasetFormatError, match=f"raw: raw files must be .* got {kind}; unpack"):
        prepare(raw, tmp_path / "store", skip_bad_lines=True)

    assert list(tmp_path.iterdir()) == [raw]


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


@pytest.mark.parametrize("skip_bad_lines", [True, False])
def test_an_empty_file_is_refused(tmp_path, skip_bad_lines):
    raw = tmp_path / "raw.txt"
    raw.touch()

    with pytest.raises(DatasetFormatError, match="no good line"):
        prepare(raw, tmp_path / "store", skip_bad_lines=skip_bad_lines)


def test_a_broken_gzip_file_is_named(raw_line, tmp_path):
    raw = tmp_path / "raw.txt.gz"
    text = "".join(raw_line(categories=[f"{line:x}"] * 26) + "\n" for line in range(5000))
    raw.write_bytes(gzip.compress(text.encode())[:-200])

    with pytest.raises(DatasetFormatError, match=r"raw\.txt\.gz: broken gzip file"):
        prepare(raw, tmp_path / "store")


def zst(text, frame_size=None):
    zstandard = pytest.importorskip("zstandard")
    data = text.encode()
    frame_size = frame_size or len(data)
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    frames = [data[start : start + frame_size] for start in range(0, len(data), frame_size)]
    return b"".join(compressor.compress(frame) for frame in frames)


SKIPPED_FRAME = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"


@pytest.mark.parametrize(
    ("frame_size", "before"), [(None, b""), (700, b""), (None, SKIPPED_FRAME), (700, SKIPPED_FRAME)]
)
def test_zst_files_are_told_by_their_first_bytes(
    raw_line, tmp_path, monkeypatch, frame_size, before
):
    """The parallel pzstd writes frames without text."""
    monkeypatch.setattr("recsys.datasets.criteo.text.BLOCK_BYTES", 1000)
    monkeypatch.setattr("recsys.datasets.criteo.text._ZST_READ_BYTES", 100)
    text = "".join(raw_line(categories=[f"{line:x}"] * 26) + "\n" for line in range(300))
    raw = tmp_path / "raw"
    raw.write_bytes(before + zst(text, frame_size))

    store = prepare(raw, tmp_path / "store")

    assert_store_is(store, classic_oracle(text))
    assert store.meta["sources"][0]["num_bytes"] == raw.stat().st_size


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "ends inside a frame"),
        (lambda data: data[: len(data) // 2], "ends inside a frame"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data + b"more", "Unknown frame descriptor"),
    ],
)
def test_a_broken_zst_file_is_named(raw_line, tmp_path, damage, reason):
    raw = tmp_path / "raw.txt.zst"
    text = "".join(raw_line(categories=[f"{line:x}"] * 26) + "\n" for line in range(500))
    raw.write_bytes(damage(zst(text)))

    with pytest.raises(DatasetFormatError, match=rf"raw\.txt\.zst: broken zst file .*{reason}"):
        prepare(raw, tmp_path / "store")


def test_a_zst_file_without_the_package_says_what_to_install(raw_line, tmp_path, monkeypatch):
    raw = tmp_path / "raw.txt.zst"
    raw.write_bytes(zst(raw_line()))
    monkeypatch.setitem(sys.modules, "zstandard", None)

    with pytest.raises(MissingDependency, match=r"needs zstandard; pip install zstandard"):
        prepare(raw, tmp_path / "store")

    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt.zst"]


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.criteo.text.BLOCK_BYTES", 1000)
    raw = tmp_path / "raw.txt"
    raw.write_bytes(b"0" * 10_000)

    with pytest.raises(DatasetFormatError, match="is this text"):
        prepare(raw, tmp_path / "store")


def test_ctrl_c_while_preparing_leaves_nothing_behind(raw_line, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    raw = tmp_path / "raw.txt"
    raw.write_text(raw_line())
    monkeypatch.setattr("recsys.datasets.criteo.flow.CriteoFlow._number_columns", interrupt)

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


def test_too_many_bad_lines_are_refused_instead_of_listed(tmp_path, monkeypatch):
    for module in ("parse", "text"):
        monkeypatch.setattr(f"recsys.datasets.criteo.{module}.MOST_BAD_LINES", 2000)
    (tmp_path / "raw.txt").write_bytes(b"\n" * 5000)

    with pytest.raises(DatasetFormatError, match=r"raw\.txt: at most 2,000 bad lines can be skip"):
        prepare_criteo_kaggle(
            [tmp_path / "raw.txt"], tmp_path / "store", skip_bad_lines=True, show_progress=False
        )

    assert [path.name for path in tmp_path.iterdir()] == ["raw.txt"]


def test_a_zst_bomb_takes_little_memory(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(2**28))
    (tmp_path / "raw.txt.zst").write_bytes(frame * 4)  # a GiB, in a hundred kilobytes
    assert len(frame) < 2**16

    tracemalloc.start()
    try:
        with pytest.raises(DatasetFormatError, match="a line of more than 16777216 bytes"):
            prepare_criteo_kaggle(
                [tmp_path / "raw.txt.zst"], tmp_path / "store", show_progress=False
            )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**28


def test_a_line_of_tabs_is_explained_in_little_memory():
    line = b"\t" * 2**22

    tracemalloc.start()
    try:
        assert explain(line) == ("expected 40 tab-separated fields", "4194305")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20


@pytest.mark.parametrize("length", [0, 5, 1022, 1023, 1024, 5000])
def test_the_end_of_a_short_or_long_line_is_found(length):
    text = np.frombuffer(b"0\n" + b"x" * length + b"\n1\n", np.uint8)

    assert _next_newline(text, 2) == length + 2
