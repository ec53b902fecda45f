import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Store, prepare_table, write_store
from recsys.datasets.tabular.encode import Encoder
from recsys.datasets.tabular.schema import Schema

pytest.importorskip("pyarrow")

LABELS = ["yes", "no", "Yes", "no", "yes", "not yet"]
SCHEMA = Schema.from_dict(
    {"label": "bought", "positive": "== yes", "categorical": {"c": {}}, "split": {"test": "1/6"}}
)


def rows(**columns):
    return pd.DataFrame({"c": ["a", "b"] * 3, "bought": LABELS, **columns})


def write_file(frame, path):
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


def labels_of(store):
    found = Store(store)
    return found.read(np.arange(found.num_samples)).labels.tolist()


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame", "category"])
def test_text_labels_are_made_0_and_1_by_a_rule(tmp_path, kind):
    if kind in ("csv", "parquet"):
        prepare_table([write_file(rows(), tmp_path / f"a.{kind}")], tmp_path / "store", SCHEMA)
    else:
        frame = rows().astype({"bought": "category"}) if kind == "category" else rows()
        write_store(frame, SCHEMA, tmp_path / "store")
    assert labels_of(tmp_path / "store") == [1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_store_like_one_with_text_labels(tmp_path, kind):
    write_store(rows(), SCHEMA, tmp_path / "store")
    file = write_file(rows(bought=["no", "yes"] * 3), tmp_path / f"new.{kind}")
    prepare_table([file], tmp_path / "like", like=tmp_path / "store")
    assert labels_of(tmp_path / "like") == [0, 1] * 3


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("bought", "expected"),
    [(["no", "yes", None] * 2, [0, 1, -1] * 2), ([None] * 6, [-1] * 6), ([np.nan] * 6, [-1] * 6)],
)
def test_rows_to_predict_may_lack_text_labels(tmp_path, kind, bought, expected):
    write_store(rows(), SCHEMA, tmp_path / "store")
    file = write_file(rows(bought=bought), tmp_path / f"new.{kind}")
    encoder = Encoder(Store(tmp_path / "store"))
    (batch,) = encoder.files([file]).batches()
    assert encoder.encode(batch).others["labels"].tolist() == expected


@pytest.mark.parametrize("positive", ["== yse", "== no"])
def test_one_label_in_the_training_part_is_found(tmp_path, positive):
    schema = Schema.from_dict(SCHEMA.as_dict() | {"positive": positive})
    frame = rows(bought=["no"] * 5 + ["yes"])  # the last row is for test
    findings = write_store(frame, schema, tmp_path / "store").findings
    assert any("one value" in each and "bought" in each for each in findings)
    write_store(frame[:3], None, tmp_path / "like", like=tmp_path / "store")  # nothing is learned
