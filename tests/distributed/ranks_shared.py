"""Tables, data and models that the ranks and the one-process runs share. No TorchRec here."""

import os

import torch
from torch import nn

DIM = {"t0": 8, "t1": 8, "t2": 8, "t3": 4, "t4": 4}
ROWS = {"t0": 100, "t1": 37, "t2": 500, "t3": 1, "t4": 211}
# f0 is looked up in two tables; t3 has fewer rows than there are ranks.
FEATURES = {"t0": ["f0"], "t1": ["f1"], "t2": ["f2", "f0"], "t3": ["f3"], "t4": ["f4"]}
KEYS = ["f0", "f1", "f2", "f3", "f4"]
LIMITS = {"f0": 100, "f1": 37, "f2": 500, "f3": 1, "f4": 211}
# The names of pooled vectors, in the order in which the models read them.
OUTPUTS = {
    "f0@t0": "t0",
    "f1": "t1",
    "f2": "t2",
    "f0@t2": "t2",
    "f3": "t3",
    "f4": "t4",
}
NUM_DENSE, BATCH_SIZE, NUM_STEPS = 6, 32, 6
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
LR, EPS = 0.1, 1e-8
KINDS = ("table_wise", "row_wise", "mixed")
IS_STRESS = os.environ.get("HYPOTHESIS_PROFILE") == "stress"
WORLDS = (2, 4) if IS_STRESS else (2,)


def is_row_wise(kind, number):
    return kind == "row_wise" or (kind == "mixed" and number % 2 == 0)


def rows_of_rank(rank, world, kind):
    """The tables of a rank, each with its first row there and the end of them."""
    for number, name in enumerate(ROWS):
        first, last = 0, ROWS[name]
        if is_row_wise(kind, number):
            block = -(-ROWS[name] // world)
            first, last = min(rank * block, last), min((rank + 1) * block, last)
            last = max(last, first + 1)  # without rows, it has one that is never looked up
        elif number % world != rank:
            continue
        yield name, first, last


def first_rows(name):
    generator = torch.Generator().manual_seed(1 + list(ROWS).index(name))
    return torch.rand(ROWS[name], DIM[name], generator=generator) - 0.5


def global_batch(step, batch_size=BATCH_SIZE, is_weighted=False):
    """Lengths (F, B), values of each feature, dense, labels, weights; for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(0, 4, (len(KEYS), batch_size), generator=generator)
    values = []
    for key, of_key in zip(KEYS, lengths, strict=True):
        drawn = torch.rand(int(of_key.sum()), generator=generator)
        values.append((drawn**3 * LIMITS[key]).long())
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    labels = torch.randint(0, 2, (batch_size,), generator=generator).float()
    weights = None
    if is_weighted:
        weights = [torch.rand(len(each), generator=generator) for each in values]
    return lengths, values, dense, labels, weights


def part(lengths, values, begin, end, weights=None):
    """Values, lengths and weights of some samples, key after key."""
    bounds = [torch.cat([torch.zeros(1, dtype=torch.long), each.cumsum(0)]) for each in lengths]

    def cut(whole):
        pieces = [
            each[bound[begin] : bound[end]] for each, bound in zip(whole, bounds, strict=True)
        ]
        return torch.cat(pieces)

    return (
        cut(values),
        lengths[:, begin:end].reshape(-1),
        None if weights is None else cut(weights),
    )


class OverArch(nn.Module):
    """From pooled vectors and dense features to a logit; the same numbers in every process."""

    def __init__(self):
        super().__init__()
        width = NUM_DENSE + sum(DIM[table] for table in OUTPUTS.values())
        generator = torch.Generator().manual_seed(7)
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, 1)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.rand(each.shape, generator=generator) * 0.4 - 0.2)

    def forward(self, dense, pooled):
        """pooled: a vector (B, D) by name of output."""
        joined = torch.cat([dense, *(pooled[name] for name in OUTPUTS)], 1)
        return self.second(self.first(joined).relu()).squeeze(1)


def loss_of(logits, labels):
    """The mean over the samples of one rank; 0 for a rank without samples."""
    found = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return found / max(1, len(labels))


SEQUENCE_DIM = 8  # collections without pooling have one


def first_sequence_rows(name):
    generator = torch.Generator().manual_seed(100 + list(ROWS).index(name))
    return torch.rand(ROWS[name], SEQUENCE_DIM, generator=generator) - 0.5


def pool_in_order(rows, lengths):
    """A sum of each sample's rows that depends on their order."""
    number = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    samples = torch.arange(len(lengths)).repeat_interleave(lengths)
    weighted = rows / (1 + number).unsqueeze(1)
    return torch.zeros(len(lengths), rows.shape[1]).index_add(0, samples, weighted)


class SequenceArch(nn.Module):
    """As `OverArch`, of vectors of `SEQUENCE_DIM`."""

    def __init__(self):
        super().__init__()
        width = NUM_DENSE + SEQUENCE_DIM * len(OUTPUTS)
        generator = torch.Generator().manual_seed(8)
        self.last = nn.Linear(width, 1)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.rand(each.shape, generator=generator) * 0.4 - 0.2)

    def forward(self, dense, pooled):
        """pooled: a vector (B, D) by name of output."""
        joined = torch.cat([dense, *(pooled[name] for name in OUTPUTS)], 1)
        return self.last(joined).squeeze(1)
