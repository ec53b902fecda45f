"""What tests of `Paper` share: toy streams, and what trains on them.

Toy streams have few rows and short windows, so that rows that are not looked up in a window,
searches that do not converge and epochs that drop samples are all frequent.
"""

from random import Random

import numpy as np
import torch
from torch import nn

from recsys.batch import Batch, JaggedIds
from recsys.embeddings import (
    SGD,
    HotColdEmbeddingBagCollection,
    PopularityProfile,
    TableConfig,
    plan_hot_rows,
)
from recsys.embeddings.tiers.budget import floor_bytes, slot_bytes
from recsys.pipeline import FAE, HotColdLoader, Paper, Sequential, TrainPipeline
from recsys.pipeline.skip.paper import draw_places
from tests.unit.pipeline import paper_oracle

LR = 0.25
CPU = torch.device("cpu")
FIXED = FAE(rate=100, is_adaptive=False)
DIM = len(paper_oracle.FACTORS)


class Source:
    """Samples of a toy stream; the dense feature of a sample is its number."""

    num_dense, fingerprint = 1, "toy"

    def __init__(self, sizes, samples):
        self.num_samples = len(samples)
        self.table_sizes = {f"f{number}": size for number, size in enumerate(sizes)}
        self.splits = {"train": range(len(samples)), "test": range(0), "validation": range(0)}
        self._rows = torch.tensor([sample.rows for sample in samples]).T
        self._labels = torch.tensor([sample.label for sample in samples])

    def read(self, samples):
        chosen = torch.from_numpy(samples)
        ids = JaggedIds.from_one_hot(list(self.table_sizes), self._rows[:, chosen])
        return Batch(chosen.float()[:, None], ids, self._labels[chosen])

    def describe(self):
        return {}


class SumModel(nn.Module):
    """The oracle's model."""

    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.trained = []

    def forward(self, batch):
        pooled = self.embeddings(batch.sparse_features).values()
        factors = torch.tensor(paper_oracle.FACTORS, device=pooled.device)
        factors = factors.repeat(pooled.shape[1] // DIM)
        self.trained.append(batch.dense_features[:, 0].int().tolist())
        return (batch.labels[:, None] * pooled * factors).sum(), batch.labels


class Toy:
    """A toy stream, its hot rows, and what trains on it."""

    def __init__(self, seed, tier="resident", *, device=CPU, folder=None, **constants):
        self.device, self._folder = device, folder if tier == "file" else None
        is_tiered = tier != "resident"
        random = self.random = Random(seed)
        # With few rows, two tiers would take more memory than the rows.
        num_more = 100 if is_tiered else 0
        self.sizes = [random.randint(6, 12) + num_more for _ in range(random.randint(1, 3))]
        num_samples = random.randint(60, 160)
        self.samples = [
            paper_oracle.Sample(list(map(self._row, self.sizes)), random.randint(-16, 16) / 256)
            for _ in range(num_samples)
        ]
        self.rows = [
            [[random.randint(-64, 64) / 64 for _ in range(DIM)] for _ in range(size)]
            for size in self.sizes
        ]
        self.batch_size = random.randint(2, 6)
        self.paper = Paper(
            **{
                "first_snapshot": random.choice([0, 1, 2, 3, 3, 20]),
                "window_share": random.choice([0.05, 0.1, 0.2]),
                "tolerance": random.choice([0.02, 0.08, 0.2]),
                "sample_share": random.choice([0.1, 0.3]),
                "seed": seed,
            }
            | constants
        )
        self.source = Source(self.sizes, self.samples)
        self.tables = [
            TableConfig(name=name, embedding_dim=DIM, num_embeddings=size)
            for name, size in self.source.table_sizes.items()
        ]
        self.plan = self._plan() if is_tiered else None
        if self.plan is None:
            self.hot_rows = {
                (table, row) for table, size in enumerate(self.sizes) for row in range(size)
            }
            self.is_hot = np.array([max(sample.rows) < 5 for sample in self.samples])
        else:
            self.hot_rows = {
                (number, row)
                for number, table in enumerate(self.tables)
                for row in self.plan.pinned_rows(table.name).tolist()
            }
            self.is_hot = self.plan.find_hot_samples(self.source, range(num_samples))

    def _row(self, size):
        if size > 20 and self.random.random() < 0.1:
            return self.random.randrange(size)
        return min(int(self.random.expovariate(0.4)), size - 1)

    def _plan(self):
        profile = PopularityProfile.count(self.source)
        num_shared = len(self.sizes) * self.batch_size
        num_pinned = self.random.randint(2, 8 * len(self.sizes))
        budget = floor_bytes(
            sum(self.sizes), [(num_shared + num_pinned, slot_bytes(DIM, torch.float32, {}))]
        )
        return plan_hot_rows(
            profile, self.tables, budget, SGD(lr=LR), window_lookups=self.batch_size, small_share=0
        )

    def loader(self):
        return HotColdLoader(self.source, "train", self.batch_size, self.is_hot, FIXED, seed=3)

    def model(self):
        embeddings = HotColdEmbeddingBagCollection(
            tables=self.tables,
            plan=self.plan,
            optimizer=SGD(lr=LR),
            device=self.device,
            **({"cold_tier": "file", "cold_path": self._folder} if self._folder else {}),
        )
        with torch.no_grad():
            for weight, rows in zip(embeddings.table_weights(), self.rows, strict=True):
                weight.copy_(torch.tensor(rows))
        return SumModel(embeddings)

    def pipeline(self, model, schedule=Sequential()):  # noqa: B008
        return TrainPipeline(model, None, self.device, skip=self.paper, schedule=schedule)

    def oracle(self):
        """What the oracle says of two epochs."""
        names = (
            *("first_snapshot", "window_share", "target", "tolerance", "highest_threshold"),
            *("first_threshold", "max_tries", "sample_share"),
        )
        constants = paper_oracle.Constants(
            self.batch_size, **{name: getattr(self.paper, name) for name in names}
        )
        oracle = paper_oracle.Oracle(self.rows, self.samples, self.hot_rows, constants, LR)
        loader, epochs = self.loader(), []
        for epoch in range(2):
            order = [int(n) for batch in loader for n in batch.dense_features[:, 0]]
            hot = [number for number in order if self.is_hot[number]]
            cold = [number for number in order if not self.is_hot[number]]
            epochs.append(
                oracle.epoch(cold, hot, lambda left, num, e=epoch: self._draw(e, left, num))
            )
        return epochs, oracle.tables

    def _draw(self, epoch, num_left, num):
        return draw_places(self.paper.seed, epoch, num_left, num).tolist()
