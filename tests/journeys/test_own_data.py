"""Journey 2: from a table of one's own to predictions, and to rankings."""

import json
import re

import numpy as np
import pyarrow.csv
import pyarrow.parquet as parquet
import pytest

from recsys.datasets import Store
from tests.commands import options, recsys
from tests.journeys.journey import (
    NUM_ROWS,
    SMALL,
    auc,
    auc_of,
    clicks,
    record_of,
    require_equal,
    sessions,
)

RECIPE = options(*SMALL, "epochs=4")


def write(path, table):
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        delimiter = {".csv": ",", ".tsv": "\t"}[path.suffix]
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return path


def prepare_and_train(folder, name):
    """The commands of the README, on a file of this name; returns the run."""
    file, schema = write(folder / name, clicks(0)), folder / f"{name}.toml"
    store, run = folder / f"{name}-store", folder / f"{name}-run"
    schema.write_text(recsys("inspect", file))
    recsys("prepare", "table", file, "--schema", schema, "--out", store)
    recsys("train", store, "--run", run, *RECIPE)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return prepare_and_train(folder, "clicks.csv")


def by_user(labels, scores, users):
    """GAUC, from its definition: the AUCs of users who have both labels, by their samples."""
    groups = [(labels[users == user], scores[users == user]) for user in np.unique(users)]
    both = [group for group in groups if 0 < group[0].mean() < 1]
    return np.average([auc(*group) for group in both], weights=[len(group[0]) for group in both])


def test_tomorrows_rows_are_encoded_as_todays_and_predicted(trained, tmp_path):
    tomorrow = write(tmp_path / "tomorrow.csv", clicks(1))
    store, scores, figures = (tmp_path / name for name in ("store", "scores.parquet", "f.json"))

    like = trained.parent / "clicks.csv-store"
    recsys("prepare", "table", tomorrow, "--like", like, "--out", store)
    recsys("evaluate", trained, "--data", store, "--json", figures)
    recsys("predict", trained, tomorrow, "--out", scores)
    recsys("predict", trained, store, "--out", tmp_path / "of_store.parquet")

    found = parquet.read_table(scores).to_pandas()
    metrics = json.loads(figures.read_text())["metrics"]["test"]
    users = clicks(1)["user_id"].to_numpy()
    assert len(found) == NUM_ROWS
    assert auc_of(trained) > 0.65
    assert metrics["auc"] == pytest.approx(auc(found["label"], found["score"]), abs=1e-6)
    assert metrics["gauc"] == pytest.approx(
        by_user(found["label"].to_numpy(), found["score"].to_numpy(), users), abs=1e-6
    )
    of_store = parquet.read_table(tmp_path / "of_store.parquet")
    assert of_store["score"].to_pylist() == found["score"].to_list()


@pytest.mark.parametrize("name", ["clicks.tsv", "clicks.parquet"])
def test_a_tsv_and_a_parquet_file_give_the_model_of_the_csv_file(trained, tmp_path, name):
    require_equal(prepare_and_train(tmp_path, name), trained)


def test_pairs_become_recommendations_that_beat_popular_items(pytestconfig, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = sessions(0).rename_columns(["user", "item"])
    write(tmp_path / "pairs.csv", pairs)
    text = (pytestconfig.rootpath / "README.md").read_text()
    [commands] = re.findall(r"```sh\n(recsys inspect pairs.*?)```", text, re.DOTALL)
    lines = commands.replace("\\\n", "").splitlines()
    inspect, prepare, train, recommend = (line.split()[1:] for line in lines)

    schema = recsys(*inspect[: inspect.index(">")])
    schema = re.sub(r"^\[negatives\].*$", r"\g<0>\nper_positive = 0", schema, flags=re.MULTILINE)
    (tmp_path / "schema.toml").write_text(schema)
    recsys(*prepare)
    recsys(
        *train, *options("model.embedding_dim=16", "batch_size=64", "epochs=10", "num_threads=1")
    )
    recsys(*recommend)

    found = record_of(tmp_path / "run")["metrics"]["test"]
    assert found["recall_at_k"] > 2 * found["popularity_recall_at_k"]
    recs = parquet.read_table("recs.parquet").to_pandas()
    assert len(recs) == 20 * 250
    assert pairs.to_pandas().merge(recs, on=["user", "item"]).empty  # a user's own items


def test_sessions_become_histories_and_negatives_and_are_ranked(tmp_path):
    file, store, run = write(tmp_path / "s.csv", sessions(0)), tmp_path / "store", tmp_path / "run"

    recsys("prepare", "table", file, "--schema", "session_clicks", "--out", store)
    recsys("train", store, "--run", run, *RECIPE, *options("eval.ranking_k=10"))

    assert Store(store).num_samples > NUM_ROWS
    found = record_of(run)["metrics"]["test"]
    assert 0 < found["ndcg_at_k"] <= found["recall_at_k"] <= 1
    assert found["recall_at_k"] > 10 / 200  # that of chance
