"""`recsys prepare` and `recsys convert`, from files to files."""

import numpy as np
import pytest
import torch

from recsys.cli import main
from recsys.datasets.criteo.flow import CriteoFlow
from recsys.datasets.splits import SPLITS
from recsys.datasets.store import Store


def run_cli(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def raw(raw_line, tmp_path):
    file = tmp_path / "raw.txt"
    file.write_text(
        "".join(
            raw_line(
                str(line % 3 // 2),
                [str(line * column) for column in range(13)],
                [f"{line * line % (column + 2):x}" for column in range(26)],
            )
            + "\n"
            for line in range(70)
        )
    )
    return file


@pytest.fixture
def store(raw, tmp_path, capsys):
    assert run_cli("prepare", "criteo-kaggle", raw, "--out", tmp_path / "store") == 0
    capsys.readouterr()
    return Store(tmp_path / "store")


def assert_batches_equal(found, expected):
    assert found.splits == expected.splits
    assert found.table_sizes == expected.table_sizes
    for split in SPLITS:
        samples = np.array(expected.splits[split])
        ours, theirs = found.read(samples), expected.read(samples)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.dense_features, theirs.dense_features)
        assert torch.equal(ours.sparse_features.values(), theirs.sparse_features.values())


def test_a_store_goes_to_a_classic_npz_and_comes_back_equal(store, tmp_path, capsys):
    npz, back = tmp_path / "new" / "processed.npz", tmp_path / "back"

    assert run_cli("convert", store.path, "--to", "classic-npz", "--out", npz) == 0
    assert run_cli("prepare", "classic-npz", npz, "--out", back) == 0

    num_rows = sum(store.table_sizes.values())
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {npz}",
        f"{back}: 70 samples, {num_rows:,} rows in 26 tables",
    ]
    for name in ("labels", "dense", "sparse"):
        np.testing.assert_array_equal(getattr(Store(back), name), getattr(store, name))
    assert_batches_equal(Store(back), store)


def test_a_store_goes_to_torchrecs_npy_files_and_comes_back_with_equal_batches(
    store, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    assert run_cli("convert", "store", "--to", "torchrec-npy", "--out", "npy/all") == 0
    assert run_cli("prepare", "torchrec-npy", "npy/all", "--out", "back") == 0
    assert run_cli("prepare", "torchrec-npy", tmp_path / "npy" / "all", "--out", "again") == 0

    written, read, _ = capsys.readouterr().out.splitlines()
    assert written == "wrote npy/all_dense.npy, npy/all_sparse.npy, npy/all_labels.npy"
    assert read.startswith("back: 70 samples, ")
    assert_batches_equal(Store("back"), store)
    assert_batches_equal(Store("again"), store)


def test_parts_become_days_and_ids_are_taken_modulo_table_sizes(store, tmp_path):
    for split in SPLITS:
        out = ("--out", tmp_path / split, "--split", split)
        assert run_cli("convert", store.path, "--to", "torchrec-npy", *out) == 0

    days = [tmp_path / split for split in SPLITS]
    sizes = ("--table-sizes", *[2] * 26)
    assert run_cli("prepare", "torchrec-npy", *days, "--out", tmp_path / "back", *sizes) == 0

    back = Store(tmp_path / "back")
    np.testing.assert_array_equal(back.sparse, store.sparse % 2)
    assert list(back.table_sizes.values()) == [2] * 26
    assert back.splits["train"] == range(65)


def test_a_store_whose_splits_files_cannot_keep_is_written_part_by_part(raw, tmp_path, capsys):
    days = [tmp_path / f"day_{day}" for day in range(2)]
    for day in days:
        day.write_bytes(raw.read_bytes())
    store = tmp_path / "store"
    assert run_cli("prepare", "criteo-1tb", *days, "--out", store) == 0
    to = ("convert", store, "--out", tmp_path / "out", "--to")
    capsys.readouterr()

    assert run_cli(*to, "torchrec-npy") == 2
    said = capsys.readouterr().err
    assert run_cli(*to, "torchrec-npy", "--split", "train") == 0

    assert f"recsys convert: store {store}: its train samples are 0 to 70, but npy files" in said
    assert "would be 0 to 120; write each part alone, with split 'train'," in said
    labels = np.load(tmp_path / "out_labels.npy").reshape(-1)
    np.testing.assert_array_equal(labels, Store(store).labels[:70])


def test_nothing_is_written_over(store, tmp_path, capsys):
    (tmp_path / "f").write_text("mine")

    assert run_cli("convert", store.path, "--to", "classic-npz", "--out", tmp_path / "f") == 2

    assert f"recsys convert: {tmp_path / 'f'} exists already" in capsys.readouterr().err
    assert (tmp_path / "f").read_text() == "mine"


def test_days_are_gone_on_with_by_the_same_command(raw, tmp_path, monkeypatch, capsys):
    days = [tmp_path / f"day_{day}" for day in range(2)]
    for day in days:
        day.write_bytes(raw.read_bytes())
    command = ("prepare", "criteo-1tb", *days, "--out", tmp_path / "store", "--max-ind-range", 3)
    read = CriteoFlow.read

    def stop_at_day_1(self, path):
        if path == days[1]:
            raise KeyboardInterrupt
        return read(self, path)

    with monkeypatch.context() as patches:
        patches.setattr(CriteoFlow, "read", stop_at_day_1)
        assert run_cli(*command) == 130
    kept = f"{tmp_path / 'store'}.unfinished keeps the days prepared so far\n"
    assert kept in capsys.readouterr().err

    assert run_cli(*command) == 0

    samples, before = capsys.readouterr().out.splitlines()
    assert samples.startswith(f"{tmp_path / 'store'}: 140 samples, ")
    assert before == "1 of 2 days were prepared before"
    assert max(Store(tmp_path / "store").table_sizes.values()) == 3
