import errno
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import write_store
from recsys.datasets.tabular import prepare
from recsys.datasets.tabular.encode import Bags
from recsys.datasets.tabular.schema import Schema
from recsys.datasets.tabular.spool import Spool

DTYPES = {"a": np.dtype(np.int8), "b": np.dtype(np.int32)}


def rows():
    bags = Bags(np.arange(3, dtype=np.int32), np.array([1, 2], np.int32))
    return {"a": np.array([7, 8], np.int8), "b": bags}


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path):
    class FullDisk:
        write = close = full_disk

    def fail():
        with Spool(tmp_path, DTYPES, ["b"]) as spool:
            path = next(iter(spool._files))
            spool._files[path].close()
            spool._files[path] = FullDisk()
            spool.append(2, rows())

    with pytest.raises(OSError, match="No space left"):
        fail()

    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_when_a_file_cannot_be_opened(tmp_path, monkeypatch):
    opened, open_path = [], Path.open

    def open_two(path, *arguments):
        if len(opened) == 2:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        opened.append(open_path(path, *arguments))
        return opened[-1]

    monkeypatch.setattr(Path, "open", open_two)
    with pytest.raises(OSError, match="Too many open files"):
        Spool(tmp_path, DTYPES, ["b"])

    assert all(file.closed for file in opened)
    assert list(tmp_path.iterdir()) == []


def test_files_are_closed_before_they_are_read(tmp_path):
    with Spool(tmp_path, DTYPES, ["b"]) as spool:
        spool.append(2, rows())
        spool.flush()

        assert len(spool._files) == 3
        assert all(file.closed for file in spool._files.values())
        (block,) = spool.blocks(["a", "b"], np.ones(spool.num_rows, bool))
        assert block.columns["a"].tolist() == [7, 8]
        assert block.columns["b"].values.tolist() == [0, 1, 2]


def test_what_a_killed_preparation_leaves_is_named_by_the_next_one(tmp_path, monkeypatch):
    stores, left, fill = tmp_path / "stores", tmp_path / "left", prepare._fill
    frame = pd.DataFrame({"click": [0, 1] * 10, "ad": ["x", "y", "z", "x"] * 5})
    schema = Schema.from_dict({"label": "click", "categorical": {"ad": {}}})

    def fill_and_look(*arguments):
        fill(*arguments)
        shutil.copytree(stores, left)

    monkeypatch.setattr(prepare, "_fill", fill_and_look)
    write_store(frame, schema, stores / "store")
    monkeypatch.setattr(prepare, "_fill", fill)
    shutil.rmtree(stores)
    left.rename(stores)
    (folder,) = stores.iterdir()

    with pytest.warns(UserWarning, match=f"if none is at work: rm -r {re.escape(str(folder))}"):
        write_store(frame, schema, stores / "store")

    assert sorted(stores.iterdir()) == [folder, stores / "store"]
    assert not list((stores / "store").glob("*spool*"))
