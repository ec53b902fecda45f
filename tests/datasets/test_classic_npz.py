import io
import itertools
import math
import os
import zipfile

import numpy as np
import pytest

from recsys.datasets.classic_npz import read_classic_npz, write_classic_npz
from recsys.datasets.criteo.kaggle import prepare_criteo_kaggle
from recsys.datasets.splits import classic_splits
from recsys.datasets.store import Store, StoreWriter
from recsys.errors import AlreadyExists, DatasetFormatError, StoreError

NUM_SAMPLES = 45


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("recsys.datasets.interchange.npy_blocks.BLOCK_SAMPLES", 7)


@pytest.fixture
def store(raw_line, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text(
        "\n".join(
            raw_line(
                str(line % 3 // 2),
                [str(line * column - 40) for column in range(13)],
                [f"{line % (column + 1):x}" for column in range(26)],
            )
            for line in range(NUM_SAMPLES)
        )
    )
    prepare_criteo_kaggle([raw], tmp_path / "store", show_progress=False)
    return Store(tmp_path / "store")


def assert_equal(found, expected):
    for name in ("labels", "dense", "sparse"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert found.table_sizes == expected.table_sizes
    assert found.splits == expected.splits
    assert found.meta["dense_names"] == expected.meta["dense_names"]


def test_a_store_comes_back_equal(store, tmp_path):
    file = write_classic_npz(store, tmp_path / "new" / "processed.npz")

    back = Store(read_classic_npz(file, tmp_path / "back"))

    assert_equal(back, store)
    assert back.ids is None
    (source,) = back.meta["sources"]
    assert (source["name"], source["num_bytes"]) == ("processed.npz", file.stat().st_size)


def test_the_file_has_the_arrays_that_the_classic_script_loads(store, tmp_path):
    file = write_classic_npz(store, tmp_path / "processed.npz")

    with np.load(file) as data:
        arrays = dict(data)

    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "X_cat": (np.int32, (NUM_SAMPLES, 26)),
        "X_int": (np.int32, (NUM_SAMPLES, 13)),
        "y": (np.int32, (NUM_SAMPLES,)),
        "counts": (np.int32, (26,)),
    }
    np.testing.assert_array_equal(arrays["X_cat"], store.sparse)
    np.testing.assert_array_equal(arrays["X_int"], store.dense)
    np.testing.assert_array_equal(arrays["y"], store.labels)
    assert arrays["counts"].tolist() == list(store.table_sizes.values())


def test_equal_stores_give_equal_bytes(store, tmp_path):
    files = [write_classic_npz(store, tmp_path / f"{number}.npz") for number in range(2)]

    assert files[0].read_bytes() == files[1].read_bytes()


def classic_arrays(store):
    return {
        "X_cat": np.array(store.sparse),
        "X_int": np.array(store.dense),
        "y": store.labels.astype(np.int32),
        "counts": np.array(list(store.table_sizes.values()), np.int32),
    }


def test_what_the_classic_script_writes_is_read_compressed_and_column_by_column(store, tmp_path):
    arrays = classic_arrays(store)
    # It transposes a float64 array of columns, day by day, and concatenates the days.
    days = np.array_split(np.asfortranarray(arrays["X_cat"].astype(np.float64)), 7)
    arrays["X_cat"] = np.concatenate([np.asfortranarray(day) for day in days])
    assert arrays["X_cat"].flags.f_contiguous
    np.savez_compressed(tmp_path / "processed.npz", **arrays)

    back = Store(read_classic_npz(tmp_path / "processed.npz", tmp_path / "back"))

    assert_equal(back, store)


def test_its_splits_are_those_of_the_classic_loader(store, tmp_path):
    """getCriteoAdData counts the days, getCriteoAdData's caller halves the last one."""
    per_day, extra = divmod(NUM_SAMPLES, 7)
    ends = list(itertools.accumulate(per_day + (day < extra) for day in range(7)))
    half = ends[5] + math.ceil(per_day / 2)

    splits = Store(
        read_classic_npz(write_classic_npz(store, tmp_path / "f.npz"), tmp_path / "back")
    ).splits

    assert splits == {
        "train": range(ends[5]),
        "test": range(ends[5], half),
        "validation": range(half, NUM_SAMPLES),
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("y", lambda y: y + 1, r"y, sample \d+: .* in \[0, 2\), got 2; labels must be 0 or 1"),
        ("y", lambda y: y[:-1], r"X_cat: must be \(44, 26\), got \(45, 26\)"),
        ("y", lambda y: y[:0], "y: must have at least one sample"),
        ("y", lambda y: y[:, None], r"y: must be \(N,\), got \(45, 1\)"),
        ("y", lambda y: y.astype(str), "y: must hold numbers, got dtype <U"),
        ("y", lambda y: y.astype(object), "y: must hold numbers, got dtype object"),
        ("X_int", lambda x: x[:, 0], r"X_int: must be \(45, I\), got \(45,\)"),
        ("X_int", lambda x: x - (x == x.max()) * 2**31, r"X_int, sample 44, column 12: .* got -"),
        ("X_int", lambda x: x + 0.5, r"X_int, sample 0, column 0: must be a whole number"),
        ("X_int", lambda x: x * np.nan, r"X_int, sample 0, column 0: .* got nan"),
        ("X_cat", lambda x: x + (x == 25), r"X_cat, sample 25, column 25: .* \[0, 26\), got 26"),
        ("counts", lambda c: c[:-1], r"X_cat: must be \(45, 25\), got \(45, 26\)"),
        ("counts", lambda c: c - 30.0, r"counts, sample 0: must be a whole number"),
    ],
)
def test_arrays_that_break_the_format_are_refused_and_leave_nothing(
    store, tmp_path, name, change, message
):
    arrays = classic_arrays(store)
    arrays[name] = change(arrays[name])
    np.savez(tmp_path / "bad.npz", **arrays)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(DatasetFormatError, match=message):
        read_classic_npz(tmp_path / "bad.npz", tmp_path / "back")

    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_array_a_broken_file_and_none_at_all_are_told_apart(store, tmp_path):
    arrays = classic_arrays(store)
    del arrays["counts"]
    np.savez(tmp_path / "few.npz", **arrays)
    with pytest.raises(
        DatasetFormatError, match=r"X_cat, X_int, y, counts, got none called counts"
    ):
        read_classic_npz(tmp_path / "few.npz", tmp_path / "back")

    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(DatasetFormatError, match=r"text\.npz: is not an npz file"):
        read_classic_npz(tmp_path / "text.npz", tmp_path / "back")

    with pytest.raises(FileNotFoundError, match=r"npz input .*none\.npz must be a file"):
        read_classic_npz(tmp_path / "none.npz", tmp_path / "back")


def test_a_damaged_array_is_named(store, tmp_path):
    file = write_classic_npz(store, tmp_path / "processed.npz")
    data = bytearray(file.read_bytes())
    data[data.index(np.array(store.dense[:3], "<i4").tobytes()) + 60] ^= 1
    file.write_bytes(data)

    with pytest.raises(DatasetFormatError, match=r"X_int: is not a complete array .*CRC"):
        read_classic_npz(file, tmp_path / "back")


def test_stores_that_the_format_cannot_hold_are_refused(store, tmp_path):
    def rewritten(name, convention, splits):
        with StoreWriter(tmp_path / name) as writer:
            writer.append(store.labels, store.dense, store.sparse)
            writer.finish(
                dense_names=store.meta["dense_names"],
                table_sizes=store.table_sizes,
                splits=splits,
                about={"convention": convention, "sources": []},
            )
        return Store(tmp_path / name)

    splits = classic_splits(NUM_SAMPLES)
    message = "needs convention 'classic', got 'torchrec'; prepare the raw files .*--convention"
    with pytest.raises(StoreError, match=message):
        write_classic_npz(rewritten("a", "torchrec", splits), tmp_path / "f.npz")
    message = "needs convention 'classic', got 'table'; write it as torchrec-npy"
    with pytest.raises(StoreError, match=message):
        write_classic_npz(rewritten("c", "table", splits), tmp_path / "f.npz")
    splits = splits | {"train": range(3)}
    with pytest.raises(StoreError, match=r"train samples must be 0 to .* got 0 to 3; write each"):
        write_classic_npz(rewritten("b", "classic", splits), tmp_path / "f.npz")
    assert not (tmp_path / "f.npz").exists()


def test_nothing_is_overwritten(store, tmp_path):
    file = write_classic_npz(store, tmp_path / "processed.npz")

    with pytest.raises(AlreadyExists):
        write_classic_npz(store, file)
    with pytest.raises(AlreadyExists):
        read_classic_npz(file, store.path)


@pytest.mark.parametrize(("change", "when"), [(-4, "early"), (4, "late")])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_that_ends_early_or_late_is_refused(store, tmp_path, change, when, order):
    arrays = classic_arrays(store) | {"X_cat": np.asarray(store.sparse, order=order)}
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            data = buffer.getvalue()
            if name == "X_cat":
                data = data[:change] if change < 0 else data + bytes(change)
            archive.writestr(f"{name}.npy", data)

    with pytest.raises(DatasetFormatError, match=rf"X_cat: ends too {when}: its header says \(45,"):
        read_classic_npz(tmp_path / "bad.npz", tmp_path / "back")


def test_a_sample_larger_than_a_block_and_tables_that_are_none_are_refused(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr("recsys.datasets.interchange.npy_blocks._BLOCK_BYTES", 2**16)
    for name, change, message in (
        ("counts", {"counts": np.zeros(0, np.int32)}, r"counts: must have at least one table"),
        (
            "wide",
            {"X_int": np.zeros((45, 2**13 + 1), np.int64)},
            r"X_int: a sample must have at most 65536 bytes, got 65544",
        ),
    ):
        np.savez_compressed(tmp_path / f"{name}.npz", **(classic_arrays(store) | change))

        with pytest.raises(DatasetFormatError, match=message):
            read_classic_npz(tmp_path / f"{name}.npz", tmp_path / "back")

        assert not (tmp_path / "back").exists()


def test_an_archive_with_a_pipe_in_its_place_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")

    with pytest.raises(FileNotFoundError, match=r"npz input .*pipe\.npz must be a file"):
        read_classic_npz(tmp_path / "pipe.npz", tmp_path / "back")
