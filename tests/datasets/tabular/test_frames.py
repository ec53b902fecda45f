from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Schema, Store, write_store
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")

SCHEMA = Schema.from_dict(
    {
        "label": "click",
        "dense": {"price": {}},
        "categorical": {"site": {}, "item": {"values": "integer"}},
        "multi": {"tags": {}},
        "split": {"by": "fraction", "test": 0, "validation": 0},
    }
)
FRAME = pd.DataFrame(
    {
        "click": [0, 1, 1, 0, 1],
        "price": [0.5, None, 2.0, 0.0, 4.0],
        "site": ["ab", "c", None, "é", "c"],
        "item": [5, 0, 7, 5, -1],
        "tags": [["x"], ["y", "zz"], None, [], ["x"]],
    }
)


def hash_of(rows, path, schema=SCHEMA):
    write_store(rows, schema, path)
    (source,) = Store(path).meta["sources"]
    return source["sha256"]


def test_frames_of_pandas_and_tables_of_arrow_are_the_same_data(tmp_path):
    table = pa.Table.from_pandas(FRAME)

    assert hash_of(FRAME, tmp_path / "a") == hash_of(table, tmp_path / "b")
    sessions = [FRAME.assign(user=np.array([7, 7, 1, 7, 3], kind)) for kind in ("i8", "f8")]
    schema = Schema.from_dict(SCHEMA.as_dict() | {"group": "user"})
    first, second = (
        Store(write_store(frame, schema, tmp_path / f"of {place}").path)
        for place, frame in enumerate(sessions)
    )
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("click", [0, 1, 1, 1, 1]),
        ("price", [0.5, 0.0, 2.0, 0.0, 4.0]),
        ("site", ["a", "bc", None, "é", "c"]),
        ("site", ["ab", "c", "é", None, "c"]),
        ("item", [5, 7, 0, 5, -1]),
        ("tags", [["x", "y"], ["zz"], None, [], ["x"]]),
        ("tags", [["x"], ["yz", "z"], None, [], ["x"]]),
        ("tags", [["x"], ["y", "zz"], [], None, ["x"]]),
    ],
)
def test_other_values_are_other_data(tmp_path, column, values):
    other = FRAME.assign(**{column: values})

    assert hash_of(FRAME, tmp_path / "a") != hash_of(other, tmp_path / "b")


@pytest.mark.parametrize(("dtype", "bits"), [("float64", 53), ("float32", 24)])
@pytest.mark.parametrize("kind", ["categorical", "multi"])
def test_floats_that_may_be_rounded_integers_are_no_ids(tmp_path, dtype, bits, kind):
    schema = Schema.from_dict(SCHEMA.as_dict() | {kind: {"id": {"values": "integer"}}})

    def frame(ids):
        ids = np.array(ids, dtype)
        lists = ids if kind == "categorical" else [ids[:1], ids[1:]]
        filled = FRAME[:2] if kind == "multi" else FRAME[: len(ids)]
        return filled.assign(id=lists)

    exact, rounded = [2**bits - 1, 2**bits - 2, 1 - 2**bits], [1, 2, -(2**bits) - 1]

    store = Store(write_store(frame(exact), schema, tmp_path / "exact").path)
    with pytest.raises(DatasetFormatError, match=rf"'id': .*below 2\^{bits}, as larger ones are"):
        write_store(frame(rounded), schema, tmp_path / "rounded")

    assert store.table_sizes["id"] == 1 + len(exact)


def test_integers_and_text_are_told_apart_by_their_values(tmp_path):
    schema = Schema.from_dict({"label": "click", "categorical": {"site": {}}})

    def write(name, *columns):
        frames = [pd.DataFrame({"click": [0, 1], "site": each}) for each in columns]
        return write_store(frames, schema, tmp_path / name)

    empty, whole = pd.Series([None, None], dtype="Int64"), [Decimal(7), Decimal(8)]
    for name, other in (("text", ["a", "b"]), ("integers", [7, 8])):
        assert write(name, other, empty).num_rows == 4
    assert write("decimals", [7, 8], whole).num_rows == 4
