from math import log2

import numpy as np
import pytest

from recsys.datasets.store import Store, StoreWriter
from recsys.datasets.store_features import Feature
from recsys.train.ranking import rank_items

FEATURES = [
    Feature("genre", "genre"),
    Feature("history", "item", "sequence"),
    Feature("item", "item"),
    Feature("user", "user"),
]
ONES, SIZES = ["genre", "item", "user"], {"genre": 5, "item": 12, "user": 9}


@pytest.fixture
def write(tmp_path):
    """A function that writes a store: positives in every split, and negatives in training."""

    def write(samples, sizes, *, name="store", schema=None):
        """Samples are (label, group, item, history); the rest follows from them."""
        genres = np.arange(12) % 4 + 1
        writer = StoreWriter(
            tmp_path / name, dense_transform="none", features=FEATURES, has_groups=True
        )
        labels, groups, items, histories = zip(*samples, strict=True)
        items, groups = np.array(items, np.int32), np.array(groups, np.int32)
        bounds = np.cumsum([0, *sizes])
        splits = {
            split: range(*bounds[place : place + 2])
            for place, split in enumerate(("train", "test", "validation"))
        }
        about = {
            "convention": "table",
            "sources": [],
            "ranking": {"item": "item", "item_features": ["genre"]},
            "schema": schema or {},
        }
        with writer:
            writer.append(
                np.array(labels, np.int8),
                groups[:, None].astype(np.float32),
                np.stack([genres[items], items, groups % 9], 1).astype(np.int32),
                bag_values=np.array([row for each in histories for row in each], np.int32),
                bag_lengths=np.array([[len(each)] for each in histories]),
                groups=groups,
            )
            writer.finish(
                dense_names=["age"],
                splits=splits,
                about=about,
                table_sizes=SIZES,
                catalog=genres[:, None].astype(np.int32),
            )
        return Store(tmp_path / name)

    return write


def value_of(item, genre, user, dense, history):
    """A score of one candidate; it depends on every feature."""
    return float((item * 7 + user * 5 + int(dense) * 3 + sum(history) * item) % 11 + genre / 8)


def score(batch):
    features = batch.sparse_features
    item, genre, user = (features[name].values().tolist() for name in ("item", "genre", "user"))
    bags = features["history"]
    bounds = bags.offsets().tolist()
    return np.array(
        [
            value_of(
                item[place],
                genre[place],
                user[place],
                batch.dense_features[place, 0],
                bags.values()[bounds[place] : bounds[place + 1]].tolist(),
            )
            for place in range(len(batch))
        ],
        np.float32,
    )


def ranked_in_plain_python(samples, sizes, k, first_row=1):
    """Recall and NDCG of each question, and the items that were never found."""
    train, test = samples[: sizes[0]], samples[sizes[0] : sizes[0] + sizes[1]]
    questions = {}
    for label, group, item, history in test:
        if label:
            questions.setdefault((group, tuple(history)), []).append(item)
    recalls, ndcgs, num_unknown = [], [], 0
    for (group, history), right in sorted(questions.items()):
        known = {item for label, other, item, _ in train if label and other == group}
        answers = {item for item in right if item >= first_row}
        unknown = sum(item < first_row for item in right)
        scores = {
            item: value_of(item, item % 4 + 1, group % 9, group, history)
            for item in range(first_row, 12)
            if item not in known or item in answers
        }
        ranks = [sum(scores[item] <= other for other in scores.values()) for item in answers]
        total = len(answers) + unknown
        recalls.append(sum(rank <= k for rank in ranks) / total)
        best = sum(1 / log2(1 + place) for place in range(1, min(k, total) + 1))
        ndcgs.append(sum(1 / log2(1 + rank) for rank in ranks if rank <= k) / best)
        num_unknown += unknown
    return recalls, ndcgs, num_unknown


def random_samples(seed, sizes):
    rng = np.random.default_rng(seed)
    samples = []
    for place in range(sum(sizes)):
        label = int(place >= sizes[0] or rng.random() < 0.4)
        history = rng.integers(0, 12, rng.integers(0, 3)).tolist() if place % 3 else []
        samples.append((label, int(rng.integers(0, 14)), int(rng.integers(0, 12)), history))
    return samples


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("k", "batch_size"), [(1, 7), (3, 1000), (5, 11)])
def test_all_items_are_ranked_for_every_question(write, seed, k, batch_size):
    sizes = (60, 25, 4)
    samples = random_samples(seed, sizes)
    recalls, ndcgs, num_unknown = ranked_in_plain_python(samples, sizes, k)

    found = rank_items(
        score, write(samples, sizes), "test", k=k, num_groups=0, batch_size=batch_size
    )

    assert found.recall_at_k == pytest.approx(np.mean(recalls))
    assert found.ndcg_at_k == pytest.approx(np.mean(ndcgs))
    assert found.num_rankings == len(recalls)
    assert found.num_unknown_items == num_unknown


def test_more_questions_than_scores_held_at_a_time_are_ranked_in_parts(write, monkeypatch):
    sizes = (60, 25, 4)
    store = write(random_samples(0, sizes), sizes)
    whole = rank_items(score, store, "test", k=3, num_groups=0, batch_size=50)

    monkeypatch.setattr("recsys.train.ranking._MOST_SCORES", 30)
    monkeypatch.setattr("recsys.train.ranking._BLOCK", 7)

    assert rank_items(score, store, "test", k=3, num_groups=0, batch_size=50) == whole


def test_groups_are_drawn_by_the_data_alone(write):
    sizes = (60, 60, 4)
    samples = random_samples(1, sizes)
    store = write(samples, sizes)
    groups = []

    def listen(batch):
        groups.extend(batch.dense_features[:, 0].int().tolist())
        return score(batch)

    found = [rank_items(listen, store, "test", k=3, num_groups=5, batch_size=50) for _ in range(2)]

    drawn = set(groups)
    assert found[0] == found[1]
    assert len(drawn) == 5
    own = [
        each
        for place, each in enumerate(samples)
        if place < sizes[0] or place >= sizes[0] + sizes[1] or each[1] in drawn
    ]
    kept = (sizes[0], len(own) - sizes[0] - sizes[2], sizes[2])
    assert found[0].recall_at_k == pytest.approx(np.mean(ranked_in_plain_python(own, kept, 3)[0]))


def test_what_a_group_chose_in_training_takes_no_place_and_its_negatives_do(write):
    # Group 0 chose items 1 and 2 and refused 3; it chooses 2 again, and 4.
    samples = [(1, 0, 1, []), (1, 0, 2, []), (0, 0, 3, []), (1, 0, 2, []), (1, 0, 4, [])]
    store = write([*samples, (1, 1, 5, [])], (3, 2, 1))
    order = {1: 12.0, 3: 11.0, 2: 10.0, 4: 9.0}

    def by_order(batch):
        items = batch.sparse_features["item"].values().tolist()
        return np.array([order.get(item, -item) for item in items], np.float32)

    hits = [
        rank_items(by_order, store, "test", k=k, num_groups=0, batch_size=100).recall_at_k
        for k in (1, 2, 3)
    ]

    assert hits == [0, 0.5, 1]


def test_rankings_by_popularity_stand_beside_those_of_the_model(write):
    # Item 5 has two positives, 7 and 3 one each; negatives do not count.
    train = [
        (1, 1, 7, []),
        (1, 2, 5, []),
        (1, 3, 5, []),
        (0, 2, 9, []),
        (0, 3, 9, []),
        (1, 4, 3, []),
    ]
    store = write([*train, (1, 0, 7, []), (1, 6, 9, [])], (6, 1, 1))

    found = {k: rank_items(score, store, "test", k=k, num_groups=0, batch_size=100) for k in (2, 3)}

    assert [each.popularity_recall_at_k for each in found.values()] == [0, 1]  # after 5 and 3
    assert found[3].popularity_ndcg_at_k == pytest.approx(1 / log2(4))


def test_the_row_of_missing_values_is_no_item(write):
    sizes = (30, 25, 4)
    samples = random_samples(2, sizes)
    schema = {"categorical": {"item": {"missing": "own"}, "user": {"missing": "rare"}}}
    recalls, _, num_unknown = ranked_in_plain_python(samples, sizes, 4, first_row=2)

    found = rank_items(
        score, write(samples, sizes, schema=schema), "test", k=4, num_groups=0, batch_size=64
    )

    assert found.recall_at_k == pytest.approx(np.mean(recalls))
    assert found.num_unknown_items == num_unknown > 0
