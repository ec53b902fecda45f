"""Recommendations and baselines, beside predictions and plain Python."""

import json
from math import log2, sqrt

import numpy as np
import pandas as pd
import pytest

from recsys.cli import main
from recsys.config import load_config
from recsys.datasets import Schema, Store, write_store
from recsys.errors import ConfigError, DatasetFormatError
from recsys.train import Recommender, train
from tests.journeys.journey import require_equal

NUM_USERS, NUM_ITEMS = 30, 17
SETTINGS = (
    "model.embedding_dim=8",
    "batch_size=32",
    "optimizer.name=adam",
    "optimizer.lr=0.02",
    "num_threads=1",
    "eval.ranking_k=3",
)
MODELS = {
    "dlrm": ("model.dense_arch=[8, 8]", "model.over_arch=[8, 1]"),
    "din": ("model.over_arch=[8, 1]",),
    "two_tower": ("model.two_tower.mlp=[8]", "model.two_tower.dropout=0.1"),
    "sasrec": ("model.sasrec.num_steps=4", "model.sasrec.id_dropout=0.1"),
}


def table(seed=0, num_users=NUM_USERS):
    """Users in turns; an item mostly tells the next one."""
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, NUM_ITEMS, num_users)]
    for _ in range(6):
        is_told = rng.random(num_users) < 0.8
        drawn = rng.integers(0, NUM_ITEMS, num_users)
        items.append(np.where(is_told, (3 * items[-1] + 1) % NUM_ITEMS, drawn))
    items = np.concatenate(items)
    users = np.tile(np.arange(num_users), 7)
    return pd.DataFrame(
        {
            "user": [f"user {user}" for user in users],
            "item": 100 + items,
            "genre": [f"genre {item % 4}" for item in items],
            "city": users % 3,
        }
    )


def schema(*, has_history=True, per_positive=2):
    tree = {
        "group": "user",
        "categorical": {
            "item": {"values": "integer"},
            "genre": {},
            "city": {"values": "integer"},
        },
        "split": {"by": "last_one_out"},
        "negatives": {"item": "item", "item_columns": ["genre"], "per_positive": per_positive},
    }
    if has_history:
        tree["history"] = {
            "recent": {"of": "item", "max_length": 4},
            "genres": {"of": "genre", "max_length": 3},
        }
    else:
        tree["categorical"]["user"] = {}
    return Schema.from_dict(tree)


def train_on(folder, name, *settings, **of_schema):
    """A run of a model on the table."""
    store = folder / "store"
    if not store.exists():
        write_store(table(), schema(**of_schema), store)
    own = (*SETTINGS, f"model.name={name}", *MODELS[name], *settings)
    train(load_config(None, own, data=str(store)), folder / name, show_progress=False)
    return folder / name


def with_next_rows(items):
    """For every user and item, a group that has the user's rows, and then a row of the item."""
    rows = table()
    of_users = {user: rows[rows.user == user] for user in rows.user.unique()}
    parts = []
    for user, own in of_users.items():
        for item in items:
            city = own.city.iloc[0]
            last = {"item": item, "genre": f"genre {(item - 100) % 4}", "city": city}
            part = pd.concat([own, pd.DataFrame([last])], ignore_index=True)
            parts.append(part.assign(user=f"{user}|{item}", asker=user))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.filterwarnings("ignore:histories list rows of these files alone")
@pytest.mark.parametrize("name", MODELS)
def test_the_best_items_are_those_that_score_highest_as_the_next_row(tmp_path, name):
    run = train_on(tmp_path, name)
    rows = table()
    every = np.sort(rows.item.unique())
    asked = with_next_rows(every)
    write_store(asked.drop(columns="asker"), None, tmp_path / "next", like=tmp_path / "store")
    scores = tmp_path / "scores.parquet"
    assert main(["predict", str(run), str(tmp_path / "next"), "--out", str(scores)]) == 0
    is_last = ~asked.duplicated("user", keep="last")
    asked["score"] = pd.read_parquet(scores).score.to_numpy()
    expected = asked[is_last].sort_values(["asker", "score"], ascending=[True, False])

    users = pd.DataFrame({"user": rows.user.unique()[::-1]})
    recommender = Recommender(run, batch_size=7)
    found = recommender.top(users, 5, with_seen=True)
    unseen = recommender.top(users, 10**12)

    assert list(found.columns) == ["user", "item", "rank", "score"]
    assert found.user.drop_duplicates().tolist() == users.user.tolist()
    for user in users.user:
        of_user = expected[expected.asker == user]
        best = found[found.user == user]
        assert best["rank"].tolist() == [1, 2, 3, 4, 5]
        probabilities = 1 / (1 + np.exp(-best.score.to_numpy()))
        np.testing.assert_allclose(probabilities, of_user.score.to_numpy()[:5], atol=1e-5)
        known = rows[rows.user == user].item
        assert set(unseen[unseen.user == user].item) == {*every} - {*known}


@pytest.mark.filterwarnings("ignore:tables .* cold tier")
def test_the_command_writes_what_the_class_returns_on_a_tiered_model_too(tmp_path, capsys):
    run = train_on(tmp_path, "two_tower", "budget=1500", "cold_tier=file")
    pd.DataFrame({"age": [1, 2, 3], "user": ["user 3", "user 1", "user 3"]}).to_csv(
        tmp_path / "users.csv", index=False
    )
    out = tmp_path / "recs.parquet"

    words = ["recommend", run, "--users", tmp_path / "users.csv", "--top", 4, "--out", out]
    assert main(list(map(str, words))) == 0

    users = pd.DataFrame({"user": ["user 3", "user 1"]})
    pd.testing.assert_frame_equal(pd.read_parquet(out), Recommender(run).top(users, 4))
    assert "8 recommendations in" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:histories list rows of these files alone")
def test_users_of_a_store_that_is_like_the_runs_are_known_by_their_rows_there(tmp_path):
    run, rows = train_on(tmp_path, "sasrec"), table()
    twin = rows[rows.user == "user 3"].assign(user="twin")
    write_store(twin, None, tmp_path / "new", like=tmp_path / "store")

    expected = Recommender(run).top(pd.DataFrame({"user": ["user 3"]}))
    found = Recommender(run, store=tmp_path / "new").top(pd.DataFrame({"user": ["twin"]}))

    pd.testing.assert_frame_equal(found.assign(user="user 3"), expected)


def test_a_user_without_samples_is_named(tmp_path):
    run = train_on(tmp_path, "two_tower")
    with pytest.raises(DatasetFormatError, match="user 99"):
        Recommender(run).top(pd.DataFrame({"user": ["user 1", "user 99"]}))


@pytest.mark.filterwarnings("ignore:tables .* cold tier")
@pytest.mark.parametrize("num_sampled", [0, 8])
@pytest.mark.parametrize("name", ["two_tower", "sasrec"])
def test_training_on_a_budget_and_from_a_checkpoint_equals_training_at_once(
    tmp_path, name, num_sampled
):
    keys = f"model.{name}.num_sampled={num_sampled}"
    whole = train_on(tmp_path, name, keys, "epochs=3", per_positive=0)
    settings = (*SETTINGS, f"model.name={name}", *MODELS[name], keys, "checkpoint.every_steps=2")
    parts = tmp_path / "parts"
    for epochs, is_later, budget in ((1, False, ""), (3, True, "1500")):
        own = (*settings, f"epochs={epochs}", f"budget={budget}")
        config = load_config(None, own, data=str(tmp_path / "store"))
        train(config, parts, resume=is_later, show_progress=False)

    require_equal(parts, whole)
    found, expected = (json.loads((run / "run.json").read_text()) for run in (parts, whole))
    assert found["metrics"] == expected["metrics"]
    assert found["tiers"]["lookup_hit_rate"] < 1


def test_models_of_labels_refuse_a_store_of_positives_alone(tmp_path):
    write_store(table(), schema(per_positive=0), tmp_path / "store")
    store = Store(tmp_path / "store")
    assert len(store.splits["train"]) == 5 * NUM_USERS
    assert "one value" not in " ".join(store.meta["findings"])
    with pytest.raises(ConfigError, match="per_positive"):
        train_on(tmp_path, "dlrm")


def baselines_in_plain_python(store_has_history):
    """Recall and NDCG at 3 of popularity and item_knn on the last row of each user."""
    rows = table()
    train_rows = rows.groupby("user").head(5)
    groups = train_rows.groupby("user").item.agg(list).to_dict()
    users_of = train_rows.groupby("item").user.agg(set).to_dict()
    items = sorted(users_of)
    counts = train_rows.item.value_counts()

    def cosine(a, b):
        if a == b or a not in users_of:
            return 0.0
        return len(users_of[a] & users_of[b]) / sqrt(len(users_of[a]) * len(users_of[b]))

    found = {"popularity": [], "item_knn": []}
    for user in rows.user.unique():
        own = rows[rows.user == user].item.tolist()
        known, right = (own[-5:-1] if store_has_history else groups[user]), own[-1]
        again = store_has_history or right in groups[user]
        candidates = [item for item in items if again or item not in groups[user]]
        scores = {
            "popularity": {item: counts[item] for item in candidates},
            "item_knn": {item: sum(cosine(a, item) for a in known) for item in candidates},
        }
        for name, of_items in scores.items():
            rank = sum(of_items[right] <= score + 1e-9 for score in of_items.values())
            found[name].append((rank <= 3, (rank <= 3) / log2(1 + rank)))
    tables = {
        name: pd.DataFrame(values, columns=["recall", "ndcg"]) for name, values in found.items()
    }
    return {
        f"{name}_{metric}_{of_metric}": statistic(table[metric])
        for name, table in tables.items()
        for metric in table
        for of_metric, statistic in (("at_k", pd.Series.mean), ("standard_error", pd.Series.sem))
    }


@pytest.mark.parametrize("has_history", [True, False])
def test_baselines_stand_beside_the_ranking_of_a_model(tmp_path, capsys, has_history):
    run = train_on(tmp_path, "two_tower", has_history=has_history)
    figures = tmp_path / "figures.json"
    assert main(["evaluate", str(run), "--json", str(figures)]) == 0

    found = json.loads(figures.read_text())["metrics"]["test"]
    expected = baselines_in_plain_python(has_history)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "item knn recall at 3" in capsys.readouterr().out
