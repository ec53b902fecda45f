"""Small tables, mini-batches with histories, and layers written anew, for tests of DIN and TBSM."""

import torch
from torch import nn

from recsys import Batch, JaggedIds
from recsys.embeddings import HotColdEmbeddingCollection, TableConfig

DIM = 4
NUM_DENSE = 3
SIZES = {"item": 150, "category": 12, "user": 40, "tag": 9}
TABLE_OF = {
    "user": "user",
    "tags": "tag",
    "item_history": "item",
    "item": "item",
    "category_history": "category",
    "category": "category",
}
HISTORIES = {"item_history": "item", "category_history": "category"}


def make_tables(dim=DIM):
    return [
        TableConfig(
            name=f"t_{table}",
            num_embeddings=size,
            embedding_dim=dim,
            feature_names=tuple(name for name, own in TABLE_OF.items() if own == table),
        )
        for table, size in SIZES.items()
    ]


def make_collection(**options):
    return HotColdEmbeddingCollection(make_tables(), **options)


def make_batch(lengths, seed=0, num_dense=NUM_DENSE, num_popular=0, category_lengths=None):
    """A mini-batch whose histories have these lengths; `tags` have 0 to 3 rows.

    With `category_lengths`, the history of categories has those.

    The first `num_popular` samples look up the first two rows of each table alone.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, ones = torch.tensor(lengths).long(), torch.ones(len(lengths), dtype=torch.int64)
    of_categories = lengths if category_lengths is None else torch.tensor(category_lengths)
    of_history = {"item_history": lengths, "category_history": of_categories}
    tags = torch.randint(0, 4, (len(lengths),), generator=generator)
    of_feature = {name: tags if name == "tags" else of_history.get(name, ones) for name in TABLE_OF}
    values = [
        torch.randint(0, SIZES[TABLE_OF[name]], (int(each.sum()),), generator=generator)
        for name, each in of_feature.items()
    ]
    for rows, each in zip(values, of_feature.values(), strict=True):
        rows[: int(each[:num_popular].sum())] %= 2
    offsets = nn.functional.pad(torch.cat(list(of_feature.values())).cumsum(0), (1, 0))
    return Batch(
        torch.rand(len(lengths), num_dense, generator=generator),
        JaggedIds(list(TABLE_OF), torch.cat(values), offsets),
        torch.randint(0, 2, (len(lengths),), generator=generator).float(),
    )


class Reference:
    """The parameters of a model as float64 leaves, and layers and lookups on them.

    Everything is written for one sample, without code of the library.
    """

    def __init__(self, model):
        self.parameters = {
            name: value.detach().double().requires_grad_()
            for name, value in model.named_parameters()
        }

    def rows(self, batch, feature, sample):
        """The rows of one bag, one by one."""
        ids = batch.sparse_features[feature]
        begin, end = ids.offsets()[sample : sample + 2].tolist()
        table = self.parameters[f"embedding_collection.embeddings.t_{TABLE_OF[feature]}.weight"]
        return [table[row] for row in ids.values()[begin:end].tolist()]

    def sum(self, batch, feature, sample):
        total = torch.zeros(DIM, dtype=torch.float64)
        for row in self.rows(batch, feature, sample):
            total = total + row
        return total

    def linear(self, name, vector):
        return self.parameters[f"{name}.weight"] @ vector + self.parameters[f"{name}.bias"]

    def perceptrons(self, name, vector):
        number = 0
        while f"{name}._mlp.{number}._linear.weight" in self.parameters:
            vector = self.linear(f"{name}._mlp.{number}._linear", vector).clamp(min=0)
            number += 1
        return vector

    def top(self, name, vector):
        """Perceptrons and a linear layer."""
        return self.linear(f"{name}.model.1", self.perceptrons(f"{name}.model.0", vector))


def require_equal(model, batch, reference, expected_logits):
    """Logits and all gradients of a loss are those of the reference."""
    weights = torch.linspace(1, 2, len(batch), dtype=torch.float64)

    logits = model(batch.dense_features, batch.sparse_features)
    (logits.squeeze(1) * weights.float()).sum().backward()
    (expected_logits * weights).sum().backward()

    assert logits.shape == (len(batch), 1)
    torch.testing.assert_close(logits.squeeze(1).double(), expected_logits, rtol=1e-6, atol=1e-6)
    for name, value in model.named_parameters():
        expected = reference.parameters[name].grad
        if expected is None:  # no sample has a step
            expected = torch.zeros_like(reference.parameters[name])
        gradient = value.grad.to_dense().double()
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6, msg=name)
