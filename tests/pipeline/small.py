"""What tests of pipelines share: a model, mini-batches, and budgets down to the floor."""

from dataclasses import dataclass

import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from tests.budget import floor_bytes, slot_bytes


@dataclass
class MiniBatch:
    """As a loader gives it."""

    sparse_features: JaggedIds
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return MiniBatch(self.sparse_features.to(device), self.labels.to(device))


class Model(nn.Module):
    """A collection and a layer; gives (loss, predictions)."""

    def __init__(self, tables, optimizer, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **options)
        self.layer = nn.Linear(sum(table.embedding_dim for table in tables), 1)

    def forward(self, batch):
        predictions = self.layer(self.embeddings(batch.sparse_features).values()).squeeze(1)
        return (predictions - batch.labels).square().mean(), predictions.detach()


def make_tables(sizes, dims):
    return [
        TableConfig(name=f"t_{number}", num_embeddings=size, embedding_dim=dim)
        for number, (size, dim) in enumerate(zip(sizes, dims, strict=True))
    ]


def make_batch(tables, seed, num_samples=4, share=1.0):
    """Mini-batches of a seed are the same; `share` of each table's rows are looked up."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(tables), num_samples), generator=generator)
    values = [
        torch.randint(
            0, max(1, int(table.num_embeddings * share)), (int(count),), generator=generator
        )
        for table, count in zip(tables, lengths.sum(1), strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    features = JaggedIds([table.name for table in tables], torch.cat(values), offsets)
    return MiniBatch(features, torch.rand(num_samples, generator=generator))


def budget_for(tables, optimizer, batches, num_more=0):
    """Bytes with which the rows of one mini-batch fit, and so many more (or fewer) of each dim."""
    slots = {}
    for batch in batches:
        needs = {}
        for table in tables:
            features = batch.sparse_features[table.name]
            dim = table.embedding_dim
            needs[dim] = needs.get(dim, 0) + len(features.values().unique())
        for dim, need in needs.items():
            slots[dim] = max(slots.get(dim, 1), need)
    num_rows = sum(table.num_embeddings for table in tables)
    return floor_bytes(
        num_rows,
        [
            (max(1, count + num_more), slot_bytes(dim, torch.float32, optimizer.state_sizes(dim)))
            for dim, count in slots.items()
        ],
    )


def dense_optimizer(model):
    return torch.optim.SGD(model.layer.parameters(), lr=0.1)


def run_plain(model, optimizer, batches):
    """A plain loop; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        if not model.embeddings.row_optimizer.steps_in_backward:
            model.embeddings.row_optimizer.step()
        losses.append(loss.item())
    return losses


def run(pipeline, iterator):
    """Until the iterator ends; the losses."""
    losses = []
    while True:
        try:
            loss, _ = pipeline.progress(iterator)
        except StopIteration:
            return losses
        losses.append(loss.item())


def require_equal(expected, found):
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    states = [model.embeddings.row_optimizer.state_dict()["state"] for model in (expected, found)]
    for table, known in states[0].items():
        for name, value in known.items():
            assert torch.equal(torch.as_tensor(states[1][table][name]), torch.as_tensor(value))


TABLES = make_tables([300, 260, 270], [4, 4, 8])
