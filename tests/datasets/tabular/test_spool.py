import errno
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import write_store
from recsys.datasets.tabular import prepare
from recsys.datasets.tabular.schema import Schema
from recsys.datasets.tabular.split import Spool, SpooledRows
from recsys.errors import AlreadyExists


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail():
        with Spool(tmp_path) as spool:
            spool.append(2, {"a": np.array([7, 8], np.int8)})
            monkeypatch.setattr(spool, "_write", full_disk)
            spool.append(2, {"a": np.array([7, 8], np.int8)})

    with pytest.raises(OSError, match="No space left"):
        fail()

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_preparation_leaves_is_named_by_the_next_one(tmp_path, monkeypatch):
    stores, left = tmp_path / "stores", tmp_path / "left"
    frame = pd.DataFrame({"click": [0, 1] * 10, "ad": ["x", "y", "z", "x"] * 5})
    schema = Schema.from_dict({"label": "click", "categorical": {"ad": {}}})

    def look(*arguments):
        shutil.copytree(stores, left)
        return SpooledRows(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "SpooledRows", look)
        write_store(frame, schema, stores / "store")
    shutil.rmtree(stores)
    left.rename(stores)
    (folder,) = stores.iterdir()

    with pytest.raises(AlreadyExists, match=f"at work: rm -r {re.escape(str(folder))}"):
        write_store(frame, schema, stores / "store")
    shutil.rmtree(folder)
    write_store(frame, schema, stores / "store")

    assert not list((stores / "store").glob("*spool*"))
