"""Predictions of a saved model: for stores, for files, for frames; what they refuse."""

import csv

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import csv as arrow_csv
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from recsys.config import load_config
from recsys.datasets import Schema, Store, prepare_table
from recsys.errors import DatasetFormatError
from recsys.train import Predictor, train
from tests.commands import recsys, refused
from tests.train.judged_stores import SMALL_MODEL, write_store
from tests.train.resumed_runs import evaluated, record_of

SCHEMA = {
    "label": "click",
    "group": "user",
    "dense": {"price": {"transform": "log"}},
    "categorical": {"site": {}, "user": {"values": "integer"}},
    "multi": {"tags": {"split": "|"}},
    "split": {"by": "fraction", "test": 0.2, "validation": 0.2},
}


def write_csv(path, *, num_rows=300, seed=0, new_sites=0, without=(), **more):
    """Write clicks; the last `new_sites` rows are of sites that no other row has.

    `more` adds columns, and replaces those that are there.
    """
    rng = np.random.default_rng(seed)
    columns = {
        "click": rng.integers(0, 2, num_rows),
        "price": rng.exponential(size=num_rows).round(3),
        "site": [f'site "{number}", é' for number in rng.integers(0, 9, num_rows)],
        "user": rng.integers(0, 20, num_rows),
        "tags": ["|".join(rng.choice(list("abcd"), rng.integers(0, 4))) for _ in range(num_rows)],
    }
    for number in range(new_sites):
        columns["site"][-1 - number] = f"new {number}"
    columns |= more
    kept = {name: values for name, values in columns.items() if name not in without}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(kept)
        writer.writerows(zip(*kept.values(), strict=True))
    return path


def run(data, folder, *settings):
    config = load_config(None, [*SMALL_MODEL, *settings], data=str(data))
    train(config, folder, show_progress=False)
    return folder


def prepare_and_run(folder, file, *settings, without=(), **keys):
    """A run on the store of a file, both in the folder."""
    tree = {key: value for key, value in (SCHEMA | keys).items() if key not in without}
    prepare_table([file], folder / "clicks", Schema.from_dict(tree))
    return run(folder / "clicks", folder / "run", *settings)


@pytest.fixture(scope="module")
def clicks_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    return prepare_and_run(folder, write_csv(folder / "clicks.csv"))


@pytest.fixture
def clicks(clicks_once, tmp_path):
    """A run on a store of clicks, which no test changes; the file is in `tmp_path`, too."""
    (tmp_path / "clicks.csv").write_bytes((clicks_once.parent / "clicks.csv").read_bytes())
    return clicks_once


def predicted(run, data, *options):
    """What is predicted: an array for each column."""
    out = run.parent / "scores.parquet"
    out.unlink(missing_ok=True)
    files = data if isinstance(data, list) else [data]
    recsys("predict", run, *files, *options, "--out", out)
    table = parquet.read_table(out)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def same(found, expected):
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5)


def auc(found):
    """The AUC, from its definition; a tie counts half."""
    is_positive = found["label"] == 1
    pairs = found["score"][is_positive][:, None] - found["score"][~is_positive][None]
    return ((pairs > 0) + (pairs == 0) / 2).mean()


@pytest.mark.parametrize("settings", [(), ("budget=6KiB", "cold_tier=file")])
def test_every_sample_of_a_store_is_predicted(tmp_path, monkeypatch, settings):
    store = write_store(tmp_path / "store")
    folder = run(store.path, tmp_path / "run", *settings)

    found = predicted(folder, store.path, "--batch-size", 64)

    assert list(found) == ["row", "score", "label"]
    assert [values.dtype for values in found.values()] == [np.int64, np.float32, np.int8]
    assert found["row"].tolist() == list(range(700))
    assert np.array_equal(found["label"], store.labels)
    test = {name: values[list(store.splits["test"])] for name, values in found.items()}
    assert auc(test) == pytest.approx(record_of(folder)["metrics"]["test"]["auc"], abs=1e-6)
    monkeypatch.setattr("recsys.train.predict._WRITTEN_ROWS", 200)
    same(predicted(folder, store.path, "--batch-size", 64), found)
    assert parquet.ParquetFile(folder.parent / "scores.parquet").num_row_groups == 3


@pytest.mark.parametrize(
    ("suffix", "without", "settings"),
    [
        (".parquet", ("multi",), ("embeddings=torch",)),
        (".csv", ("dense",), ("precision=bf16",)),
        (".parquet", (), ()),
    ],
)
def test_a_file_is_predicted_as_the_store_made_from_it(tmp_path, suffix, without, settings):
    file = write_csv(tmp_path / "clicks.csv")
    folder = prepare_and_run(tmp_path, file, *settings, without=without)
    if suffix == ".parquet":
        parquet.write_table(arrow_csv.read_csv(file), tmp_path / "a.parquet", row_group_size=170)
        file = tmp_path / "a.parquet"

    of_file, of_store = (predicted(folder, data) for data in (file, tmp_path / "clicks"))

    same(of_file, of_store)
    assert np.array_equal(of_file["label"], of_store["label"])
    assert of_file["score"].std() > 0


def test_rows_of_a_frame_get_the_predictions_of_their_file(tmp_path, clicks):
    file = write_csv(tmp_path / "new.csv", seed=1, new_sites=5)
    expected = predicted(clicks, file)["score"]
    frame = pd.read_csv(file)
    frame["tags"] = frame["tags"].fillna("")
    predictor = Predictor(clicks, batch_size=64)

    for given in (frame, frame.drop(columns="click"), pyarrow.Table.from_pandas(frame)):
        found = predictor.predict(given)
        assert (found.dtype, found.shape) == (np.float32, (300,))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(predictor.predict(frame[7:9]), expected[7:9], rtol=1e-5)
    assert predictor.predict(frame[:0]).shape == (0,)
    with pytest.raises(DatasetFormatError, match="'site'"):
        predictor.predict(frame.drop(columns="site"))
    with pytest.raises(DatasetFormatError, match=r"row 1 .*'price'"):
        predictor.predict(frame[:3].assign(price=["1", "x", "2"]))


def test_labels_and_groups_may_be_missing_and_files_follow_each_other(tmp_path, clicks):
    expected = predicted(clicks, tmp_path / "clicks.csv")
    bare = write_csv(tmp_path / "bare.csv", without=["click"])
    some, again = (
        write_csv(tmp_path / name, click=[1, "", 0] * 100) for name in ("some.csv", "again.csv")
    )

    without = predicted(clicks, bare)
    recsys("predict", clicks, some, again, "--out", tmp_path / "both.parquet")

    assert list(without) == ["row", "user", "score"]
    same(without, expected)
    both = parquet.read_table(tmp_path / "both.parquet")
    assert both.column("label").to_pylist() == [1, None, 0] * 200
    assert both.column("row").to_pylist() == list(range(600))
    same({"score": both.column("score").to_numpy()[300:]}, expected)
    of_no_user = predicted(clicks, write_csv(tmp_path / "empty.csv", user=[""] * 300))
    assert np.isfinite(of_no_user["score"]).all()
    assert np.abs(of_no_user["score"] - expected["score"]).max() > 1e-3


@pytest.mark.parametrize("seen", ["not at all", "empty"])
def test_times_weights_and_the_split_are_not_read_and_groups_are_only_written(tmp_path, seen):
    split = {"by": "column", "column": "fold", "train": ["a"], "test": ["b"], "validation": ["c"]}
    others = {
        "session": [f"s{row // 4}" for row in range(300)],
        "time": [1_700_000_000 + row for row in range(300)],
        "w": [1.5] * 300,
        "fold": ["a"] * 200 + ["c"] * 50 + ["b"] * 50,
    }
    file = write_csv(tmp_path / "events.csv", **others)
    keys = {"group": "session", "timestamp": "time", "weight": "w", "split": split}
    folder = prepare_and_run(tmp_path, file, **keys)
    empty = {name: [""] * 300 for name in others} if seen == "empty" else {}

    found = predicted(folder, write_csv(tmp_path / "new.csv", **empty))

    of_store = predicted(folder, tmp_path / "clicks")
    assert sorted(found["score"].round(5)) == sorted(of_store["score"].round(5))
    assert np.array_equal(found["label"], Store(tmp_path / "clicks").labels)
    assert of_store["session"].tolist() == others["session"]
    assert found.get("session", np.array([])).tolist() == [None] * 300 * bool(empty)


def test_scores_of_pairs_stand_beside_user_and_item_and_no_negatives_are_among_them(tmp_path):
    file = write_csv(tmp_path / "clicks.csv", without=["click"], new_sites=3)
    keys = {"negatives": {"item": "site"}, "split": {"by": "fraction", "test": 0.1}}
    folder = prepare_and_run(tmp_path, file, without=["label"], **keys)

    found, of_store = (predicted(folder, data) for data in (file, tmp_path / "clicks"))

    assert list(found) == list(of_store) == ["row", "user", "site", "score"]
    rows = pd.read_csv(file)
    assert found["user"].tolist() == of_store["user"].tolist() == rows.user.tolist()
    assert found["site"].tolist() == rows.site.tolist()
    assert of_store["site"].tolist() == [*rows.site[:297], None, None, None]
    same(found, of_store)
    assert np.isin(of_store["row"], np.flatnonzero(Store(tmp_path / "clicks").labels)).all()
    (tmp_path / "clicks" / "groups.arrow").write_bytes(b"ARROW1")
    assert "groups.arrow is damaged" in refused(
        "predict", folder, tmp_path / "clicks", "--out", tmp_path / "again.parquet"
    )


def test_tomorrows_rows_are_predicted_as_a_store_like_todays_and_unknown_values_are_reported(
    tmp_path, clicks
):
    new = write_csv(tmp_path / "new.csv", seed=1, new_sites=5)
    prepare_table([new], tmp_path / "new", like=clicks.parent / "clicks")

    of_file, of_store = (predicted(clicks, data) for data in (new, tmp_path / "new"))
    printed = recsys("predict", clicks, new, "--out", tmp_path / "scores.parquet")
    metrics = evaluated(clicks, "--data", tmp_path / "new")

    same(of_file, of_store)
    assert np.array_equal(of_file["label"], of_store["label"])
    assert "site 5" in printed
    assert "site 5" in recsys("evaluate", clicks, "--data", tmp_path / "new")
    assert list(metrics) == ["test"]
    assert metrics["test"]["num_samples"] == 300


def test_a_row_that_has_no_features_or_no_score_is_named_by_its_file(tmp_path):
    standardized = {"price": {"transform": "standardize"}}
    first = write_csv(tmp_path / "first.csv", price=[row / 1000 for row in range(300)])
    folder = prepare_and_run(tmp_path, first, dense=standardized)
    state = load_file(folder / "model.safetensors")
    state["dense_arch.model._mlp.0._linear.weight"].fill_(1e10)
    save_file(state, folder / "model.safetensors")
    out = ("--out", tmp_path / "scores.parquet")

    for price in ("1e300", "1e30"):
        second = write_csv(tmp_path / "second.csv", num_rows=3, price=[1, price, 1])
        assert "second.csv, line 3" in refused("predict", folder, first, second, *out)
    like = ("--like", tmp_path / "clicks", "--out", tmp_path / "like")
    recsys("prepare", "table", second, *like)
    assert "like, sample 1" in refused("predict", folder, tmp_path / "like", *out)
    assert not (tmp_path / "scores.parquet").exists()


def test_a_store_with_other_rows_for_its_values_is_refused(tmp_path, clicks):
    new, store = write_csv(tmp_path / "new.csv", seed=5), clicks.parent / "clicks"
    prepare_table([new], tmp_path / "new", Schema.from_dict(SCHEMA))
    assert Store(tmp_path / "new").table_sizes == Store(store).table_sizes
    out = ("--out", tmp_path / "scores.parquet")

    assert "--like" in refused("evaluate", clicks, "--data", tmp_path / "new")
    assert "--like" in refused("predict", clicks, tmp_path / "new", *out)
    same_rows = prepare_table([tmp_path / "clicks.csv"], tmp_path / "a", Schema.from_dict(SCHEMA))
    assert evaluated(clicks, "--data", same_rows.path) == evaluated(clicks)


def test_a_store_with_its_dense_columns_in_another_order_is_refused(tmp_path):
    file = write_csv(tmp_path / "clicks.csv", age=list(range(300)))
    dense = {"price": {"transform": "standardize"}, "age": {"transform": "standardize"}}
    folder = prepare_and_run(tmp_path, file, dense=dense)
    swapped = Schema.from_dict(SCHEMA | {"dense": dict(reversed(dense.items()))})
    prepare_table([file], tmp_path / "swapped", swapped)

    assert "dense columns" in refused("evaluate", folder, "--data", tmp_path / "swapped")


@pytest.mark.parametrize(("seed", "changed"), [(5, {}), (0, {"missing_values": ["NA"]})])
def test_a_store_that_was_prepared_again_is_refused_and_one_that_was_moved_can_be_named(
    tmp_path, seed, changed
):
    file, out = write_csv(tmp_path / "clicks.csv"), ("--out", tmp_path / "scores.parquet")
    folder = prepare_and_run(tmp_path, file)
    expected = predicted(folder, file)
    (tmp_path / "clicks").rename(tmp_path / "moved")
    (tmp_path / "scores.parquet").unlink()

    assert "--data" in refused("evaluate", folder)
    assert "--store" in refused("predict", folder, file, *out)
    assert "--store" in refused("predict", folder, tmp_path / "moved", "--store", "x", *out)
    same(predicted(folder, file, "--store", tmp_path / "moved"), expected)
    (tmp_path / "scores.parquet").unlink()
    new = write_csv(tmp_path / "new.csv", seed=seed)
    prepare_table([new], tmp_path / "clicks", Schema.from_dict(SCHEMA | changed))
    assert "prepared again" in refused("predict", folder, file, *out)


def test_what_cannot_be_predicted_is_refused_and_leaves_no_file(tmp_path, clicks, small_config):
    file, bad, taken = (tmp_path / name for name in ("clicks.csv", "bad.csv", "taken.parquet"))
    bad.write_text(file.read_text() + "1,expensive,a,1,\n")
    taken.touch()
    synthetic, of_store, store = (tmp_path / name for name in ("synthetic", "of_store", "store"))
    train(small_config(), synthetic, show_progress=False)
    run(write_store(store).path, of_store)
    out, before = tmp_path / "scores.parquet", sorted(tmp_path.iterdir())

    for name, run_dir, data, *options in (
        ("batch_size", clicks, file, "--out", out, "--batch-size", 0),
        ("taken.parquet", clicks, file, "--out", taken),
        (".parquet", clicks, file, "--out", tmp_path / "scores.csv"),
        ("missing.csv", clicks, tmp_path / "missing.csv", "--out", out),
        ("bad.csv, line 302", clicks, bad, "--out", out),
        ("features and their tables", clicks, store, "--out", out),
        ("synthetic:criteo-kaggle", synthetic, file, "--out", out),
        ("schema", of_store, file, "--out", out),
    ):
        assert name in refused("predict", run_dir, data, *options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_does_not_give_histories(tmp_path):
    file, out = write_csv(tmp_path / "clicks.csv"), ("--out", tmp_path / "scores.parquet")
    history = {"visited": {"of": "site", "max_length": 3}}
    folder = prepare_and_run(tmp_path, file, history=history)

    assert "--like" in refused("predict", folder, file, *out)

    with pytest.warns(UserWarning, match="histories list rows of these files alone"):
        prepare_table([file], tmp_path / "again", like=tmp_path / "clicks")
    same(predicted(folder, tmp_path / "again"), predicted(folder, tmp_path / "clicks"))
