"""Retrieval models and their softmax beside formulas, written anew for one sample at a time."""

from math import log, sqrt

import pytest
import torch
from torch.nn.functional import gelu

from recsys import JaggedIds
from recsys.models import RetrievalTrain, SASRec, TwoTower
from tests.models.formulas import over_arch
from tests.models.sequence_data import (
    DIM,
    HISTORIES,
    NUM_DENSE,
    SIZES,
    TABLE_OF,
    make_batch,
    make_collection,
    rows_of,
    sum_of,
)

NUM_STEPS, NUM_HEADS = 4, 2
MODELS = {
    TwoTower: {"layer_sizes": (6,)},
    SASRec: {"num_steps": NUM_STEPS, "num_heads": NUM_HEADS, "dropout": 0.0},
}


def make_catalog():
    return torch.randint(0, SIZES["category"], (SIZES["item"], 1), generator=seeded(3))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make_model(kind, **settings):
    torch.manual_seed(0)
    items = (["item", "category"], make_catalog())
    return kind(make_collection(), HISTORIES, *items, NUM_DENSE, **MODELS[kind] | settings)


class Formulas:
    """The vectors of users and items, on the parameters of a model as float64 leaves."""

    def __init__(self, model):
        self.parameters = {
            name: value.detach().double().requires_grad_()
            for name, value in model.named_parameters()
        }

    def weight(self, name):
        return self.parameters[name]

    def rows(self, batch, feature, sample):
        return rows_of(self.parameters, batch, feature, sample)

    def sum(self, batch, feature, sample):
        return sum_of(self.parameters, batch, feature, sample)

    def linear(self, name, vector):
        return self.weight(f"{name}.weight") @ vector + self.weight(f"{name}.bias")

    def item(self, row):
        category = int(make_catalog()[row, 0])
        tables = (("item", row), ("category", category))
        return sum(
            self.weight(f"embedding_collection.embeddings.t_{table}.weight")[number]
            for table, number in tables
        )

    def two_tower(self, batch, sample):
        vectors = []
        for name in ("item_history", "category_history", "user", "tags"):
            vector = self.sum(batch, name, sample)
            if name in HISTORIES:
                vector = vector / max(1, len(self.rows(batch, name, sample)))
            vectors.append(vector)
        joined = torch.cat([batch.dense_features[sample].double(), *vectors])
        return sum(vectors) + over_arch(self.parameters, joined, "mlp")

    def sasrec(self, batch, sample):
        total = self.linear(
            "others",
            torch.cat(
                [
                    batch.dense_features[sample].double(),
                    self.sum(batch, "user", sample),
                    self.sum(batch, "tags", sample),
                ]
            ),
        )
        for kind, name in enumerate(("item_history", "category_history")):
            steps = self.rows(batch, name, sample)[-NUM_STEPS:]
            total = total + (self.last_step(steps, kind) if steps else self.weight("no_history"))
        return self.norm("norm", total)

    def last_step(self, steps, kind):
        positions, kinds = self.weight("positions"), self.weight("kinds")
        first = NUM_STEPS - len(steps)
        steps = [
            step * sqrt(DIM) + positions[first + place] + kinds[kind]
            for place, step in enumerate(steps)
        ]
        for number in range(2):
            steps = self.block(f"blocks.{number}", steps)
        return steps[-1]

    def block(self, name, steps):
        parts = [
            self.linear(f"{name}.inputs", self.norm(f"{name}.norm", step)).view(3, NUM_HEADS, -1)
            for step in steps
        ]
        found = []
        for place, step in enumerate(steps):
            heads = []
            for head in range(NUM_HEADS):
                query = parts[place][0, head]
                keys = torch.stack([part[1, head] for part in parts[: place + 1]])
                values = torch.stack([part[2, head] for part in parts[: place + 1]])
                heads.append(torch.softmax(keys @ query / sqrt(len(query)), 0) @ values)
            inner = step + self.linear(f"{name}.output", torch.cat(heads))
            hidden = self.linear(f"{name}.mlp.1", self.norm(f"{name}.mlp.0", inner))
            found.append(inner + self.linear(f"{name}.mlp.3", gelu(hidden)))
        return found

    def norm(self, name, vector):
        centred = vector - vector.mean()
        scaled = centred / (centred.square().mean() + 1e-5).sqrt()
        return scaled * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")


def users_of(reference, kind, batch):
    user = reference.two_tower if kind is TwoTower else reference.sasrec
    return torch.stack([user(batch, sample) for sample in range(len(batch))])


def positives_of(batch):
    samples = batch.labels.nonzero()[:, 0].tolist()
    return samples, batch.sparse_features["item"].values()[samples].tolist()


def require_equal(train, batch, reference, expected):
    """The loss and all of its gradients are those of the reference."""
    loss, (_, logits, labels) = train(batch)
    loss.backward()
    expected.backward()

    assert torch.equal(labels, batch.labels)
    assert logits.shape == (len(batch),)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    for name, value in train.model.named_parameters():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad.to_dense()
        wanted = reference.parameters[name].grad
        wanted = torch.zeros_like(value).double() if wanted is None else wanted
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("most_logits", [1 << 22, 200], ids=["one block", "blocks"])
@pytest.mark.parametrize("lengths", [[3, 0, 1, 8, 5], [0, 0, 0]], ids=["mixed", "empty"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_full_softmax_has_the_loss_and_gradients_of_an_eager_one(
    monkeypatch, kind, lengths, most_logits
):
    monkeypatch.setattr("recsys.models.retrieval._MOST_LOGITS", most_logits)
    batch = make_batch(lengths)
    batch.labels = torch.tensor([1.0, 0, 1, 1, 0])[: len(lengths)]
    batch.weights = torch.linspace(0.5, 2, len(lengths))
    train = RetrievalTrain(make_model(kind))
    reference = Formulas(train.model)
    users = users_of(reference, kind, batch)
    items = torch.stack([reference.item(row) for row in range(SIZES["item"])])
    samples, targets = positives_of(batch)
    shares = torch.log_softmax(users @ items.T, 1)
    losses = [
        -shares[sample, target] * batch.weights[sample].double()
        for sample, target in zip(samples, targets, strict=True)
    ]

    require_equal(train, batch, reference, sum(losses) / len(losses))


@pytest.mark.parametrize("kind", MODELS)
def test_decay_adds_the_square_of_each_row_that_a_sample_looks_up(kind):
    batch = make_batch([3, 0, 1])
    batch.labels = torch.zeros(3)  # no positive sample, so decay is all of the loss
    train = RetrievalTrain(make_model(kind), row_decay=0.1)
    reference = Formulas(train.model)
    rows = [row for name in TABLE_OF for n in range(3) for row in reference.rows(batch, name, n)]

    require_equal(train, batch, reference, 0.05 / 3 * sum(row.square().sum() for row in rows))


@pytest.mark.parametrize("kind", MODELS)
def test_the_sampled_softmax_lowers_logits_by_the_log_of_what_is_expected(kind):
    batch = make_batch([3, 0, 1, 8, 5])
    batch.labels = torch.tensor([1.0, 0, 1, 1, 1])
    rows = batch.sparse_features["item"].values()
    rows[4] = rows[0]  # the target of a sample comes again as that of another
    counts = torch.randint(1, 9, (SIZES["item"],), generator=seeded(1))
    train = RetrievalTrain(make_model(kind), 40, counts)
    torch.manual_seed(5)
    drawn = torch.randint(SIZES["item"], (40,)).tolist()
    reference = Formulas(train.model)
    users = users_of(reference, kind, batch)
    samples, targets = positives_of(batch)
    # The item of a sample in the mini-batch has its category from the sample.
    vectors = [
        reference.sum(batch, "item", s) + reference.sum(batch, "category", s) for s in samples
    ]
    vectors += [reference.item(row) for row in drawn]
    losses = []
    for place, (sample, target) in enumerate(zip(samples, targets, strict=True)):
        logits = []
        for other, (row, vector) in enumerate(zip(targets + drawn, vectors, strict=True)):
            expected = len(targets) * float(counts[row] / counts.sum()) + 40 / SIZES["item"]
            if other == place:
                own = len(logits)
            if other == place or row != target:
                logits.append(users[sample] @ vector - log(expected))
        losses.append(-torch.log_softmax(torch.stack(logits), 0)[own])

    torch.manual_seed(5)
    require_equal(train, batch, reference, sum(losses) / len(losses))


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_products_of_the_vectors_of_user_and_item(kind):
    batch, model = make_batch([3, 0, 1, 8, 5]), make_model(kind).eval()
    rows = batch.sparse_features["item"].values()
    categories = batch.sparse_features["category"].values()
    categories.copy_(make_catalog()[rows, 0])

    users, _ = model.vectors(batch.dense_features, batch.sparse_features)
    expected = (users * model.items(rows)).sum(1, keepdim=True)
    _, (loss, logits, _) = RetrievalTrain(model).eval()(batch)

    assert torch.equal(model(batch.dense_features, batch.sparse_features), expected)
    assert torch.equal(logits, expected[:, 0])
    assert loss == 0  # it is for training


@pytest.mark.parametrize("kind", MODELS)
def test_steps_that_are_dropped_have_neither_a_part_nor_a_gradient(kind):
    batch, empty = make_batch([3, 0, 1, 8, 5]), make_batch([3, 0, 1, 8, 5])
    features = empty.sparse_features
    lengths = features.lengths().view(6, 5).clone()
    lengths[[2, 4]] = 0  # the histories, in the order of `TABLE_OF`
    kept = [features[name].values() for name in TABLE_OF if name not in HISTORIES]
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    empty.sparse_features = JaggedIds(list(TABLE_OF), torch.cat(kept), offsets)
    model = make_model(kind, id_dropout=1.0)

    dropped = model(batch.dense_features, batch.sparse_features)

    assert torch.equal(dropped, model(empty.dense_features, empty.sparse_features))
    assert not torch.equal(dropped, model.eval()(batch.dense_features, batch.sparse_features))


def test_a_mini_batch_without_positives_has_loss_0_and_no_gradient():
    batch = make_batch([3, 1])
    batch.labels = torch.zeros(2)
    train = RetrievalTrain(make_model(TwoTower))

    loss, _ = train(batch)
    loss.backward()

    assert loss == 0
    assert not any(
        value.grad.to_dense().any() for value in train.parameters() if value.grad is not None
    )


def test_features_must_be_those_of_the_collection():
    with pytest.raises(ValueError, match="nosuch"):
        TwoTower(make_collection(), HISTORIES, ["nosuch"], make_catalog()[:, :0], NUM_DENSE)
