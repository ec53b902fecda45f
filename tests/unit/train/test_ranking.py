from itertools import product
from math import log2, sqrt
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.config import load_config
from recsys.datasets import Store
from recsys.datasets.store_writer import Feature, StoreWriter
from recsys.models.archs import AbstractPooledModel
from recsys.train.build import autocast, build_model
from recsys.train.metrics import Rankings
from recsys.train.ranking import Items, ItemScorer, rank_items
from tests.train.judged_stores import SMALL_MODEL, write_store

FEATURES = [
    Feature("genre", "genre"),
    Feature("history", "item", "sequence"),
    Feature("item", "item"),
    Feature("user", "user"),
]
SIZES = {"genre": 5, "item": 12, "user": 9}


@pytest.fixture
def write(tmp_path):
    """A function that writes a store: positives in every split, and negatives in training."""

    def write(samples, sizes, *, schema=None, has_history=True, num_dense=1):
        """Samples are (label, group, item, history); the rest follows from them."""
        genres = np.arange(12) % 4 + 1
        features = [each for each in FEATURES if has_history or not each.is_bag]
        writer = StoreWriter(
            tmp_path / "store", dense_transform="none", features=features, has_groups=True
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
        rows = np.array([row for each in histories for row in each], np.int32)
        lengths = np.array([[len(each)] for each in histories])
        with writer:
            writer.append(
                np.array(labels, np.int8),
                groups[:, None].astype(np.float32)[:, :num_dense],
                np.stack([genres[items], items, groups % 9], 1).astype(np.int32),
                bag_values=rows if has_history else None,
                bag_lengths=lengths if has_history else None,
                groups=groups,
            )
            writer.finish(
                dense_names=["age"][:num_dense],
                splits=splits,
                about=about,
                table_sizes=SIZES,
                catalog=genres[:, None].astype(np.int32),
            )
        return Store(tmp_path / "store")

    return write


def value_of(age, item, history, genre, user):
    """A score of one candidate; it depends on every feature."""
    return (item * 7 + user * 5 + age * 3 + history * item) % 11 + genre / 8 - 6


class Sums(torch.nn.Module):
    """Pooled vectors of one column: sums of rows. In another order than that of the store."""

    sparse_feature_names = ("item", "history", "genre", "user")

    def forward(self, features):
        sums = []
        for name in self.sparse_feature_names:
            bags = features[name]
            totals = torch.nn.functional.pad(bags.values().cumsum(0), (1, 0))
            sums.append(totals[bags.offsets()].diff())
        return torch.stack(sums, 1).unsqueeze(-1).float()


class Scorer(AbstractPooledModel):
    """A model that gives candidates a score in plain Python, by default `value_of`."""

    def __init__(self, value=value_of):
        torch.nn.Module.__init__(self)  # it has no tables
        self.value = value
        self.sparse_arch = Sums()
        self.dense_arch = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.dense_arch.weight.fill_(1)

    def head(self, dense, pooled):
        candidates = torch.cat([dense, pooled.squeeze(-1)], 1).tolist()
        return torch.tensor([[float(self.value(*each))] for each in candidates])


class SampleScorer(torch.nn.Module):
    """As `Scorer`, in the form of a model of whole samples."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.sums = Sums()

    def forward(self, batch):
        pooled = self.sums(batch.sparse_features).squeeze(-1)
        samples = torch.cat([batch.dense_features, pooled], 1).tolist()
        logits = torch.tensor([float(value_of(*each)) for each in samples])
        return logits.sum(), (logits.sum(), logits, batch.labels)


def ranked_in_plain_python(samples, sizes, k, first_row=1, *, come_again=False):
    """Group, recall and NDCG of each question, and the number of answers without a row."""
    train, test = samples[: sizes[0]], samples[sizes[0] : sizes[0] + sizes[1]]
    known, asked = {}, {}
    for label, group, item, _ in train:
        if label:
            known.setdefault(group, set()).add(item)
    for label, group, item, history in test:
        if label:
            own = set() if come_again or item < first_row else known.get(group, set())
            asked.setdefault((group, tuple(history), item in own), []).append(item)
    questions, num_unknown = [], 0
    for (group, history, is_again), right in sorted(asked.items()):
        answers = {item for item in right if item >= first_row}
        unknown = sum(item < first_row for item in right)
        left_out = set() if come_again or is_again else known.get(group, set())
        scores = {
            item: value_of(group, item, sum(history), item % 4 + 1, group % 9)
            for item in range(first_row, 12)
            if item not in left_out
        }
        ranks = [sum(scores[item] <= other for other in scores.values()) for item in answers]
        total = len(answers) + unknown
        best = sum(1 / log2(1 + place) for place in range(1, min(k, total) + 1))
        ndcg = sum(1 / log2(1 + rank) for rank in ranks if rank <= k) / best
        questions.append((group, sum(rank <= k for rank in ranks) / total, ndcg))
        num_unknown += unknown
    return questions, num_unknown


def by_group(questions, column=1):
    """Recalls, or NDCGs, of the questions of each group."""
    found = {}
    for question in questions:
        found.setdefault(question[0], []).append(question[column])
    return found


def mean_and_error(questions, column):
    """Mean over groups of the means of their questions, and its standard error."""
    means = [mean(values) for values in by_group(questions, column).values()]
    return pytest.approx(mean(means)), pytest.approx(stdev(means) / sqrt(len(means)))


def random_samples(seed, sizes):
    rng = np.random.default_rng(seed)
    samples = []
    for place in range(sum(sizes)):
        label = int(place >= sizes[0] or rng.random() < 0.4)
        history = rng.integers(0, 12, rng.integers(0, 3)).tolist() if place % 3 else []
        samples.append((label, int(rng.integers(0, 14)), int(rng.integers(0, 12)), history))
    return samples


def rank(store, k, model=None, *, most_questions=0, batch_size=100):
    model = Scorer() if model is None else model
    return rank_items(
        SimpleNamespace(model=model) if hasattr(model, "head") else model,
        store,
        "test",
        k=k,
        most_questions=most_questions,
        batch_size=batch_size,
    )


@pytest.mark.parametrize("come_again", [True, False])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("k", "batch_size"), [(1, 7), (3, 1000), (5, 11)])
def test_all_items_are_ranked_for_every_question(
    write, monkeypatch, seed, k, batch_size, come_again
):
    sizes, first_row = (60, 40, 4), 1 + seed % 2
    missing = {"item": {"missing": "own"}, "user": {"missing": "rare"}}
    samples, schema = random_samples(seed, sizes), {"categorical": missing if seed % 2 else {}}
    questions, num_unknown = ranked_in_plain_python(
        samples, sizes, k, first_row, come_again=come_again
    )
    store = write(samples, sizes, schema=schema)
    store.meta["ranking"]["repeats"] = come_again
    if seed > 3:  # in parts
        monkeypatch.setattr("recsys.train.ranking._MOST_SCORES", 30)
        monkeypatch.setattr("recsys.train.ranking._BLOCK", 7)

    found = rank(store, k, batch_size=batch_size)

    recall, ndcg = mean_and_error(questions, 1), mean_and_error(questions, 2)
    assert (found["recall_at_k"], found["recall_standard_error"]) == recall
    assert (found["ndcg_at_k"], found["ndcg_standard_error"]) == ndcg
    assert found["num_rankings"] == len(questions)
    assert found["num_unknown_items"] == num_unknown > 0


@pytest.mark.parametrize("has_history", [True, False])
def test_a_model_of_samples_ranks_as_one_of_pooled_vectors(write, has_history):
    sizes = (60, 60, 4)
    store = write(random_samples(0, sizes), sizes, has_history=has_history)
    model = (SampleScorer(), Scorer())
    if not has_history:
        for each in (model[0].sums, model[1].sparse_arch):
            each.sparse_feature_names = ("item", "user", "genre", "user")

    found = [rank(store, 3, each, batch_size=7) for each in model]

    assert found[0] == found[1]
    assert 0 < found[0]["recall_at_k"] < 1


class AsSamples(torch.nn.Module):
    """A model whose vectors are not known: it scores samples."""

    def __init__(self, train_model):
        super().__init__()
        self.train_model, self.model = train_model, torch.nn.Identity()

    def forward(self, batch):
        return self.train_model(batch)


@torch.no_grad()
@pytest.mark.parametrize("name", ["two_tower", "sasrec"])
def test_a_retrieval_model_ranks_by_its_vectors_as_by_samples(tmp_path, name):
    store = write_store(tmp_path / "store", is_ranked=True)
    config = load_config(
        None, [f"model.name={name}", "model.embedding_dim=4"], data=str(store.path)
    )
    model, _ = build_model(config, store)

    found = [rank(store, 5, each, batch_size=7) for each in (model.eval(), AsSamples(model))]
    with torch.autocast("cpu", torch.bfloat16):
        blocks = ItemScorer(model, Items(store), 7).blocks(store.read(np.arange(3)))
        dtypes = {scores.dtype for _, scores in blocks}

    assert found[0] == found[1]
    assert 0 < found[0]["recall_at_k"] < 1
    assert dtypes == {torch.float32}


def test_groups_and_one_question_of_each_are_drawn_by_the_data_alone(write):
    sizes = (60, 60, 4)
    samples = random_samples(1, sizes)
    store = write(samples, sizes)
    groups = set()

    def listen(age, *others):
        groups.add(int(age))
        return value_of(age, *others)

    found = [rank(store, 3, Scorer(listen), most_questions=5) for _ in range(2)]

    assert found[0] == found[1]
    assert len(groups) == found[0]["num_rankings"] == 5
    recalls = by_group(ranked_in_plain_python(samples, sizes, 3)[0])
    possible = [mean(each) for each in product(*(recalls[group] for group in groups))]
    assert found[0]["recall_at_k"] in [pytest.approx(each) for each in possible]


def test_fewer_groups_than_questions_are_asked_equally_many(write):
    sizes = (60, 90, 4)
    samples = random_samples(3, sizes)
    store = write(samples, sizes)
    recalls = by_group(ranked_in_plain_python(samples, sizes, 3)[0]).values()
    per_group = 30 // len(recalls)

    found = rank(store, 3, most_questions=30)

    assert 1 < per_group < max(map(len, recalls))
    assert found["num_rankings"] == sum(min(per_group, len(each)) for each in recalls)
    assert rank(store, 3, most_questions=10_000) == rank(store, 3)


def scores_of_samples(dlrm, store, samples):
    """Scores of all items: every candidate as a sample with all of its features."""
    num_items = SIZES["item"]
    asked = torch.arange(len(samples)).repeat_interleave(num_items)
    batch = store.read(np.array(samples)).select(asked)
    features, rows = batch.sparse_features, torch.arange(num_items).repeat(len(samples))
    values = features.values().clone()
    genres = torch.from_numpy(store.catalog[:, 0].astype(np.int64))
    for name, column in (("item", rows), ("genre", genres[rows])):
        begin = int(features.offsets()[features.keys().index(name) * len(batch)])
        values[begin : begin + len(batch)] = column
    ids = JaggedIds(features.keys(), values, features.offsets())
    return dlrm(batch.dense_features, ids).view(len(samples), num_items).float().numpy()


@pytest.mark.parametrize(
    ("provider", "has_history", "num_dense", "precision", "tolerance"),
    [
        ("recsys", True, 1, "fp32", 1e-6),
        ("recsys", False, 1, "bf16", 1e-2),
        ("torch", True, 0, "fp32", 1e-6),
    ],
)
def test_scores_are_those_of_samples_with_the_item(
    write, monkeypatch, provider, has_history, num_dense, precision, tolerance
):
    sizes = (30, 14, 2)
    samples = random_samples(4, sizes)
    samples[30:44] = [(1, group, *samples[30 + group][2:]) for group in range(14)]
    store = write(samples, sizes, has_history=has_history, num_dense=num_dense)
    settings = [*SMALL_MODEL, f"embeddings={provider}", f"precision={precision}"]
    config = load_config(None, settings, data=str(store.path))
    dlrm = build_model(config, store)[0].model
    heard = {}

    class Listening(Rankings):
        def add(self, group, scores, *others):
            heard[group] = scores
            super().add(group, scores, *others)

    monkeypatch.setattr("recsys.train.ranking.Rankings", Listening)
    with torch.no_grad(), autocast(config):
        rank(store, 3, dlrm, batch_size=5)
        expected = scores_of_samples(dlrm, store, range(30, 44))

    assert list(heard) == list(range(14))
    np.testing.assert_allclose(
        np.stack(list(heard.values()))[:, 1:], expected[:, 1:], rtol=0, atol=tolerance
    )
    assert expected[:, 1:].std(1).min() > tolerance
