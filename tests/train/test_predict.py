import csv

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from recsys.cli import main
from recsys.config import load_config
from recsys.datasets.store import Store
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schema import Schema
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError
from recsys.train.evaluate import evaluate_run, open_saved_model, unknown_values
from recsys.train.predict import Predictor, predict_run
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train
from tests.train.judged_stores import SMALL_MODEL, write_store

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema.from_dict(
    {
        "label": "click",
        "group": "user",
        "dense": {"price": {"transform": "log"}},
        "categorical": {"site": {}, "user": {"values": "integer"}},
        "multi": {"tags": {"split": "|"}},
        "split": {"by": "fraction", "test": 0.2, "validation": 0.2},
    }
)


def write_csv(path, *, num_rows=300, seed=0, new_sites=0, without=(), more=()):
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
    columns |= dict(more)
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


@pytest.fixture
def clicks(tmp_path):
    """A run on a store of clicks."""
    prepare_table([write_csv(tmp_path / "clicks.csv")], tmp_path / "clicks", SCHEMA)
    return run(tmp_path / "clicks", tmp_path / "run")


def read(file):
    table = parquet.read_table(file)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def scores_of(run_dir, samples=None):
    """Probabilities of samples of the run's data, all in one mini-batch."""
    _, source, model = open_saved_model(run_dir)
    batch = source.read(np.arange(source.num_samples) if samples is None else samples)
    with torch.no_grad():
        _, (_, logits, _) = model(batch)
    return torch.sigmoid(logits).numpy()


@pytest.mark.parametrize("batch_size", [64, 10_000])
def test_every_sample_of_a_store_is_predicted(tmp_path, batch_size):
    store = write_store(tmp_path / "store")
    run(store.path, tmp_path / "run")

    report = predict_run(
        tmp_path / "run", [store.path], tmp_path / "scores.parquet", batch_size=batch_size
    )

    found = read(tmp_path / "scores.parquet")
    assert list(found) == ["row", "score", "label"]
    assert [values.dtype for values in found.values()] == [np.int64, np.float32, np.int8]
    assert found["row"].tolist() == list(range(700))
    np.testing.assert_allclose(found["score"], scores_of(tmp_path / "run"), rtol=1e-5)
    assert np.array_equal(found["label"], store.labels)
    assert (report.num_samples, report.has_labels, report.unknown) == (700, True, {})


def test_predictions_are_written_in_parts(tmp_path, monkeypatch):
    store = write_store(tmp_path / "store")
    run(store.path, tmp_path / "run")
    predict_run(tmp_path / "run", [store.path], tmp_path / "whole.parquet", batch_size=64)
    monkeypatch.setattr("recsys.train.predict._WRITTEN_ROWS", 200)

    predict_run(tmp_path / "run", [store.path], tmp_path / "parts.parquet", batch_size=64)

    assert parquet.read_table(tmp_path / "parts.parquet").equals(
        parquet.read_table(tmp_path / "whole.parquet")
    )
    assert parquet.ParquetFile(tmp_path / "parts.parquet").num_row_groups == 3
    assert parquet.ParquetFile(tmp_path / "whole.parquet").num_row_groups == 1


def test_rows_of_a_file_get_the_predictions_of_the_store_made_from_it(tmp_path, clicks):
    predict_run(clicks, [tmp_path / "clicks.csv"], tmp_path / "scores.parquet", batch_size=37)

    found = read(tmp_path / "scores.parquet")
    assert found["row"].tolist() == list(range(300))
    # The split is in the order of the file, so samples are rows.
    np.testing.assert_allclose(found["score"], scores_of(clicks), rtol=1e-5)
    assert np.array_equal(found["label"], Store(tmp_path / "clicks").labels)


def test_rows_of_a_frame_get_the_predictions_of_their_file(tmp_path, clicks):
    file = write_csv(tmp_path / "new.csv", seed=1, new_sites=5)
    predict_run(clicks, [file], tmp_path / "scores.parquet")
    expected = read(tmp_path / "scores.parquet")["score"]
    frame = pd.read_csv(file)
    frame["tags"] = frame["tags"].fillna("")
    predictor = Predictor(clicks, batch_size=64)

    for given in (frame, frame.drop(columns="click"), pyarrow.Table.from_pandas(frame)):
        found = predictor.predict(given)
        assert (found.dtype, found.shape) == (np.float32, (300,))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(predictor.predict(frame[7:9]), expected[7:9], rtol=1e-5)
    assert predictor.predict(frame[:0]).shape == (0,)
    with pytest.raises(DatasetFormatError, match="must have column 'site'"):
        predictor.predict(frame.drop(columns="site"))
    with pytest.raises(DatasetFormatError, match=r"row 1 .*'price'"):
        predictor.predict(frame[:3].assign(price=["1", "x", "2"]))


def test_rows_need_no_label(tmp_path, clicks):
    bare = write_csv(tmp_path / "bare.csv", without=["click"])

    report = predict_run(clicks, [bare], tmp_path / "scores.parquet")

    found = read(tmp_path / "scores.parquet")
    assert list(found) == ["row", "score"]
    np.testing.assert_allclose(found["score"], scores_of(clicks), rtol=1e-5)
    assert not report.has_labels


@pytest.mark.parametrize("seen", ["not at all", "empty"])
def test_groups_times_weights_and_the_split_are_not_read(tmp_path, seen):
    tree = SCHEMA.as_dict() | {"group": "session", "timestamp": "time", "weight": "w"}
    tree["split"] = {"by": "column", "column": "fold", "train": ["a"], "test": ["b"]}
    tree["split"]["validation"] = ["c"]
    others = {
        "session": [f"s{row // 4}" for row in range(300)],
        "time": [1_700_000_000 + row for row in range(300)],
        "w": [1.5] * 300,
        "fold": ["a"] * 200 + ["c"] * 50 + ["b"] * 50,
    }
    file = write_csv(tmp_path / "events.csv", more=others)
    prepare_table([file], tmp_path / "events", Schema.from_dict(tree))
    run(tmp_path / "events", tmp_path / "run")
    empty = {name: [""] * 300 for name in others} if seen == "empty" else {}
    new = write_csv(tmp_path / "new.csv", more=empty)

    predict_run(tmp_path / "run", [new], tmp_path / "scores.parquet")

    found = read(tmp_path / "scores.parquet")
    np.testing.assert_allclose(found["score"], scores_of(tmp_path / "run"), rtol=1e-5)
    assert np.array_equal(found["label"], Store(tmp_path / "events").labels)


def test_an_empty_group_is_a_missing_value_of_its_feature(tmp_path, clicks):
    new = write_csv(tmp_path / "new.csv", more={"user": [""] * 300})

    report = predict_run(clicks, [new], tmp_path / "scores.parquet")

    found = read(tmp_path / "scores.parquet")["score"]
    assert np.isfinite(found).all()
    assert np.abs(found - scores_of(clicks)).max() > 1e-3
    assert report.unknown == {}


def test_a_label_that_is_missing_is_null(tmp_path, clicks):
    new = write_csv(tmp_path / "new.csv", more={"click": [1, "", 0] * 100})

    report = predict_run(clicks, [new], tmp_path / "scores.parquet")

    labels = parquet.read_table(tmp_path / "scores.parquet").column("label")
    assert labels.to_pylist() == [1, None, 0] * 100
    assert report.has_labels
    np.testing.assert_allclose(
        read(tmp_path / "scores.parquet")["score"], scores_of(clicks), rtol=1e-5
    )


def test_data_of_positives_alone_has_no_label_to_read(tmp_path):
    tree = SCHEMA.as_dict() | {"negatives": {"item": "site", "per_positive": 1}}
    del tree["label"]
    file = write_csv(tmp_path / "clicks.csv", without=["click"])
    prepare_table([file], tmp_path / "clicks", Schema.from_dict(tree))
    run(tmp_path / "clicks", tmp_path / "run", "eval.ranking_k=5")

    report = predict_run(tmp_path / "run", [file], tmp_path / "scores.parquet")

    positives = np.flatnonzero(Store(tmp_path / "clicks").labels)
    np.testing.assert_allclose(
        read(tmp_path / "scores.parquet")["score"],
        scores_of(tmp_path / "run", positives),
        rtol=1e-5,
    )
    assert not report.has_labels


@pytest.mark.parametrize(
    ("suffix", "without", "settings"),
    [
        (".parquet", (), ()),
        (".csv", ("multi",), ()),
        (".parquet", ("multi",), ("embeddings=torch",)),
        (".csv", (), ("embeddings=torch",)),
        (".csv", (), ("precision=bf16",)),
        (".csv", ("dense",), ()),
    ],
)
def test_a_file_is_predicted_as_the_store_made_from_it(tmp_path, suffix, without, settings):
    tree = {key: value for key, value in SCHEMA.as_dict().items() if key not in without}
    file = write_csv(tmp_path / "clicks.csv")
    prepare_table([file], tmp_path / "clicks", Schema.from_dict(tree))
    run(tmp_path / "clicks", tmp_path / "run", *settings)
    if suffix == ".parquet":
        file = as_parquet(file)

    predict_run(tmp_path / "run", [file], tmp_path / "of_file.parquet")

    predict_run(tmp_path / "run", [tmp_path / "clicks"], tmp_path / "of_store.parquet")
    of_file, of_store = read(tmp_path / "of_file.parquet"), read(tmp_path / "of_store.parquet")
    np.testing.assert_allclose(of_file["score"], of_store["score"], rtol=1e-5)
    assert np.array_equal(of_file["label"], of_store["label"])
    assert of_file["score"].std() > 0
    tolerance = 2e-2 if "precision=bf16" in settings else 1e-5
    np.testing.assert_allclose(of_file["score"], scores_of(tmp_path / "run"), rtol=tolerance)


def as_parquet(file):
    """The table of a CSV file in a Parquet file, in two row groups."""
    from pyarrow import csv as arrow_csv

    path = file.with_suffix(".parquet")
    parquet.write_table(arrow_csv.read_csv(file), path, row_group_size=170)
    return path


def test_files_to_predict_are_not_hashed(tmp_path, clicks, monkeypatch):
    monkeypatch.setattr("recsys.datasets.tabular.read.hashlib", None)

    for file in (tmp_path / "clicks.csv", as_parquet(tmp_path / "clicks.csv")):
        report = predict_run(clicks, [file], tmp_path / f"scores of {file.name}.parquet")
        assert report.num_samples == 300


def test_a_row_that_cannot_be_encoded_is_named_by_its_file(tmp_path):
    tree = SCHEMA.as_dict() | {"dense": {"price": {"transform": "standardize"}}}
    prices = {"price": [row / 1000 for row in range(300)]}
    first = write_csv(tmp_path / "first.csv", more=prices)
    prepare_table([first], tmp_path / "clicks", Schema.from_dict(tree))
    run(tmp_path / "clicks", tmp_path / "run")
    second = write_csv(tmp_path / "second.csv", num_rows=3, more={"price": [1, 1e300, 1]})
    message = r"second\.csv, line 3, column 'price': .*got 1e\+300"

    with pytest.raises(DatasetFormatError, match=message):
        predict_run(tmp_path / "run", [first, second], tmp_path / "scores.parquet")
    with pytest.raises(DatasetFormatError, match=message):
        prepare_table([first, second], tmp_path / "like", like=tmp_path / "clicks")

    assert not (tmp_path / "scores.parquet").exists()
    assert not (tmp_path / "like").exists()


def test_a_row_without_a_finite_score_is_named(tmp_path):
    file = write_csv(tmp_path / "clicks.csv")
    schema = Schema.from_dict(SCHEMA.as_dict() | {"dense": {"price": {}}})
    prepare_table([file], tmp_path / "clicks", schema)
    run(tmp_path / "clicks", tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    state = load_file(folder.model_file)
    state["dense_arch.model._mlp.0._linear.weight"].fill_(1e10)
    save_file(state, folder.model_file)
    huge = write_csv(tmp_path / "huge.csv", num_rows=3, more={"price": [1, "1e30", 1]})
    prepare_table([huge], tmp_path / "huge", like=tmp_path / "clicks")
    message = ": a score must be finite.*; correct its dense features, or"

    with pytest.raises(DatasetFormatError, match=rf"huge\.csv, line 3{message}"):
        predict_run(tmp_path / "run", [file, huge], tmp_path / "scores.parquet")
    with pytest.raises(DatasetFormatError, match=rf"store .*huge, sample 1{message}"):
        predict_run(tmp_path / "run", [tmp_path / "huge"], tmp_path / "scores.parquet")

    assert not (tmp_path / "scores.parquet").exists()


def test_a_store_with_other_rows_for_its_values_is_refused(tmp_path, clicks):
    new = write_csv(tmp_path / "new.csv", seed=5)
    prepare_table([new], tmp_path / "new", SCHEMA)
    known = Store(tmp_path / "clicks")
    assert Store(tmp_path / "new").table_sizes == known.table_sizes
    assert RunFolder.open(clicks).read_record()["data"]["encoding"] == known.meta["encoding"]
    message = rf"store .*new: values must have the rows, .* --like {known.path} --out STORE`"

    with pytest.raises(ConfigError, match=message):
        evaluate_run(clicks, str(tmp_path / "new"))
    with pytest.raises(ConfigError, match=message):
        predict_run(clicks, [tmp_path / "new"], tmp_path / "scores.parquet")

    prepare_table([new], tmp_path / "like", like=known.path)
    assert evaluate_run(clicks, str(tmp_path / "like"))["test"].num_samples == 300
    prepare_table([tmp_path / "clicks.csv"], tmp_path / "same", SCHEMA)
    found, own = evaluate_run(clicks, str(tmp_path / "same")), evaluate_run(clicks)
    assert found["test"].as_dict() == own["test"].as_dict()


def test_a_store_with_its_dense_columns_in_another_order_is_refused(tmp_path):
    file = write_csv(tmp_path / "clicks.csv", more={"age": list(range(300))})
    for name, columns in (("store", ["price", "age"]), ("swapped", ["age", "price"])):
        dense = {column: {"transform": "standardize"} for column in columns}
        schema = Schema.from_dict(SCHEMA.as_dict() | {"dense": dense})
        prepare_table([file], tmp_path / name, schema)
    run(tmp_path / "store", tmp_path / "run")

    with pytest.raises(ConfigError, match=r"swapped: values must have the rows, and dense columns"):
        evaluate_run(tmp_path / "run", str(tmp_path / "swapped"))


def test_tomorrows_file_is_predicted_as_the_store_like_todays_and_told_of_its_unknown_values(
    tmp_path, clicks, capsys
):
    new = write_csv(tmp_path / "new.csv", seed=1, new_sites=5)
    prepare_table([new], tmp_path / "new", like=tmp_path / "clicks")

    report = predict_run(clicks, [new], tmp_path / "of_file.parquet")
    predict_run(clicks, [tmp_path / "new"], tmp_path / "of_store.parquet")
    metrics = evaluate_run(clicks, str(tmp_path / "new"))
    assert main(["evaluate", str(clicks), "--data", str(tmp_path / "new")]) == 0

    of_file, of_store = read(tmp_path / "of_file.parquet"), read(tmp_path / "of_store.parquet")
    for name in ("row", "label"):
        assert np.array_equal(of_file[name], of_store[name])
    np.testing.assert_allclose(of_file["score"], of_store["score"], rtol=1e-5)
    assert report.unknown["site"] == 5
    assert unknown_values(clicks, str(tmp_path / "new"))["test"] == report.unknown
    assert list(metrics) == ["test"]
    assert metrics["test"].num_samples == 300
    assert metrics["test"].groups.num_groups > 0
    assert "site 5" in capsys.readouterr().out


def test_files_are_predicted_one_after_the_other(tmp_path, clicks):
    first = write_csv(tmp_path / "first.csv", num_rows=70)
    second = write_csv(tmp_path / "second.csv", num_rows=50, seed=3)
    for name, files in (("both", [first, second]), ("one", [first]), ("other", [second])):
        predict_run(clicks, files, tmp_path / f"{name}.parquet")

    both, *parts = (read(tmp_path / f"{name}.parquet") for name in ("both", "one", "other"))
    assert both["row"].tolist() == list(range(120))
    np.testing.assert_allclose(
        both["score"], np.concatenate([each["score"] for each in parts]), rtol=1e-5
    )


def test_the_command_tells_what_it_did(tmp_path, clicks, capsys, monkeypatch):
    new = write_csv(tmp_path / "new.csv", new_sites=2, without=["click"])
    arguments = ["predict", str(clicks), str(new), "--out", str(tmp_path / "scores.parquet")]
    tuned = []
    monkeypatch.setattr("recsys._support.machine.tune_allocator", lambda: tuned.append(True))

    assert main(arguments) == 0
    assert tuned == [True]
    assert "site 2" in capsys.readouterr().out
    assert main(arguments) == 2


def test_a_model_in_two_tiers_predicts_as_a_resident_one(tmp_path):
    store = write_store(tmp_path / "store")
    run(store.path, tmp_path / "resident")
    run(store.path, tmp_path / "tiered", "budget=6KiB", "cold_tier=file")

    for name in ("resident", "tiered"):
        predict_run(tmp_path / name, [store.path], tmp_path / f"{name}.parquet")

    resident, tiered = (read(tmp_path / f"{name}.parquet") for name in ("resident", "tiered"))
    assert np.array_equal(resident["score"], tiered["score"])


def test_what_cannot_be_predicted_is_refused_and_leaves_no_file(tmp_path, clicks, small_config):
    file, bad, taken = (tmp_path / name for name in ("clicks.csv", "bad.csv", "taken.parquet"))
    bad.write_text(file.read_text() + "1,expensive,a,1,\n")
    taken.touch()
    train(small_config(), tmp_path / "synthetic", show_progress=False)
    store = write_store(tmp_path / "store")
    run(store.path, tmp_path / "of_store")
    out, before = tmp_path / "scores.parquet", sorted(tmp_path.iterdir())

    for run_dir, data, file_out, options, error, name in (
        (clicks, file, out, {"batch_size": 0}, ConfigError, "batch_size"),
        (clicks, file, taken, {}, AlreadyExists, "taken.parquet"),
        (clicks, file, tmp_path / "scores.csv", {}, ConfigError, ".parquet"),
        (clicks, tmp_path / "missing.csv", out, {}, FileNotFoundError, "missing.csv"),
        (clicks, bad, out, {}, DatasetFormatError, "bad.csv, line 302"),
        (clicks, store.path, out, {}, ConfigError, "features by table"),
        (tmp_path / "synthetic", file, out, {}, ConfigError, "synthetic:criteo-kaggle"),
        (tmp_path / "of_store", file, out, {}, StoreError, "schema"),
    ):
        with pytest.raises(error, match=name):
            predict_run(run_dir, [data], file_out, **options)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("seed", "changed"), [(5, {}), (0, {"missing_values": ["NA"]})])
def test_a_store_that_was_prepared_again_is_refused(tmp_path, clicks, seed, changed):
    (tmp_path / "clicks").rename(tmp_path / "old")
    file = write_csv(tmp_path / "clicks.csv", seed=seed)
    prepare_table([file], tmp_path / "clicks", Schema.from_dict(SCHEMA.as_dict() | changed))

    with pytest.raises(ConfigError, match="prepared again"):
        predict_run(clicks, [file], tmp_path / "scores.parquet")
    if seed:
        with pytest.raises(ConfigError, match="prepared again"):
            evaluate_run(clicks)


def test_a_store_that_was_moved_can_be_named(tmp_path, clicks):
    file, moved = tmp_path / "clicks.csv", tmp_path / "moved"
    predict_run(clicks, [file], tmp_path / "expected.parquet")
    (tmp_path / "clicks").rename(moved)

    with pytest.raises(StoreError, match=r"trained on the store .* which does not exist; go to"):
        evaluate_run(clicks)
    with pytest.raises(StoreError, match="recsys predict FILES with --store STORE"):
        predict_run(clicks, [file], tmp_path / "found.parquet")
    command = ["predict", clicks, file, "--store", moved, "--out", tmp_path / "found.parquet"]
    assert main(list(map(str, command))) == 0
    with pytest.raises(ConfigError, match="--store is for files"):
        predict_run(clicks, [moved], tmp_path / "other.parquet", store=moved)

    assert (tmp_path / "found.parquet").read_bytes() == (tmp_path / "expected.parquet").read_bytes()


def test_a_file_does_not_give_histories(tmp_path):
    schema = Schema.from_dict(
        SCHEMA.as_dict() | {"history": {"visited": {"of": "site", "max_length": 3}}}
    )
    file = write_csv(tmp_path / "clicks.csv")
    prepare_table([file], tmp_path / "clicks", schema)
    run(tmp_path / "clicks", tmp_path / "run")

    with pytest.raises(ConfigError, match=r"with histories .* --like"):
        predict_run(tmp_path / "run", [file], tmp_path / "scores.parquet")

    with pytest.warns(UserWarning, match="histories list rows of these files alone"):
        prepare_table([file], tmp_path / "again", like=tmp_path / "clicks")
    predict_run(tmp_path / "run", [tmp_path / "again"], tmp_path / "scores.parquet")
    np.testing.assert_allclose(
        read(tmp_path / "scores.parquet")["score"], scores_of(tmp_path / "run"), rtol=1e-5
    )
