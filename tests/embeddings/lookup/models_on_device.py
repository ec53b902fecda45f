"""Models whose calls of tables share nodes on a device, and their training."""

import torch
from torch import nn

import recsys

NUM_ROWS, DIM, NUM_SAMPLES = 30, 4, 7
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


class Model(nn.Module):
    """Calls tables in every way that shares a node.

    Args:
        join: Makes one tensor of all vectors.
    """

    def __init__(self, join="cat", dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        of_bag = {"sparse": True, "dtype": dtype}
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, **of_bag) for mode in ("sum", "mean", "sum")
        )
        self.jagged = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, **of_bag) for mode in ("sum", "mean")
        )
        self.padded = nn.EmbeddingBag(NUM_ROWS, DIM, mode="mean", padding_idx=0, **of_bag)
        self.sequence = nn.Embedding(NUM_ROWS, DIM, padding_idx=0, **of_bag)
        self.join = join

    def vectors(self, ids):
        """The vectors of ids (8, B)."""
        offsets = torch.arange(ids.shape[1], device=ids.device) // 2 * 2  # each other bag is empty
        return [
            *(bag(column.unsqueeze(1)) for bag, column in zip(self.bags, ids, strict=False)),
            self.bags[1](ids[3].int().unsqueeze(1)),  # a second lookup in one table
            *(bag(ids[4], offsets) for bag in (*self.jagged, *self.jagged)),
            self.jagged[0](ids[4].int(), offsets.int()),
            *(self.padded(each) for each in (ids[5:6].T, ids[5:8].T, ids[2:8].T)),
            self.sequence(ids[5:8].T).sum(1),  # not contiguous
        ]

    def forward(self, ids):
        vectors = self.vectors(ids)
        if self.join == "cat":
            return torch.cat(vectors, 1).square().sum()
        if self.join == "stack":
            return torch.stack(vectors, 1).square().sum()
        return sum((number + 1) * each.square() for number, each in enumerate(vectors)).sum()


def make_ids(seed, num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_ROWS, (8, num_samples), generator=generator)


def accelerated(device, optimizer="SGD", *, make=Model, budget=None, **others):
    model = make(**others)
    model = model if budget else model.to(device)
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return model, optimizer


def train(model, optimizer, ids):
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Bags(nn.Module):
    """Bags that are looked up one by one."""

    def __init__(self, num_bags=4):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in range(num_bags)
        )

    def vectors(self, ids):
        return [bag(column.unsqueeze(1)) for bag, column in zip(self.bags, ids, strict=False)]

    def forward(self, ids):
        return torch.cat(self.vectors(ids), 1).square().sum()


def trained_bags(device, num_bags=4):
    """Bags whose next step makes one node."""
    model, optimizer = accelerated(device, make=Bags, num_bags=num_bags)
    for seed in range(2):
        train(model, optimizer, make_ids(seed).to(device))
    return model, optimizer
