"""What tests of skipping share: data whose popular rows settle, models, and runs to compare."""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from recsys.batch import Batch, JaggedIds
from recsys.datasets import BatchLoader
from recsys.embeddings import HotColdEmbeddingBagCollection, RowWiseAdagrad, Staleness, TableConfig
from recsys.pipeline import (
    DropInput,
    FreezeRows,
    Guard,
    Importance,
    Observe,
    RandomDrop,
    Subsample,
    TrainPipeline,
)

SIZES = (900, 700, 800)
DIMS = (4, 4, 8)
BUDGET = 36_000
# A window of the least length, so that rows go stale within a short run.
STALENESS = Staleness(window=33, min_updates=4, patience=1, count_every=1, max_rows=64)
GUARD = Guard(every=64, steps=12)
IMPORTANCE = Importance(0.3, warm_up=0, bits=10, guard=None)
POLICIES = {
    "random_drop": RandomDrop(share=0.3, seed=5),
    "random_drop weighted": RandomDrop(0.3, weighted=True, refill=False),
    "importance": IMPORTANCE,
    "importance guarded": replace(IMPORTANCE, seed=3, guard=GUARD),
    "drop_input": DropInput(0.3, STALENESS, None),
    "drop_input guarded": DropInput(0.3, STALENESS, GUARD),
    "freeze_rows": FreezeRows(0.3, STALENESS, None),
    "freeze_rows guarded": FreezeRows(0.3, STALENESS, GUARD),
    "subsample": Subsample(0.2, 0.3, STALENESS, None),
    "observe": Observe(0.3, STALENESS),
}


class Clicks:
    """A source: few rows of each table are looked up most of the time."""

    num_dense = 3

    def __init__(self, num_samples=1600, seed=0, popular_share=0.8):
        generator = torch.Generator().manual_seed(seed)
        self.num_samples = num_samples
        self.fingerprint = f"clicks {num_samples} {seed} {popular_share}"
        self.table_sizes = {f"t_{number}": size for number, size in enumerate(SIZES)}
        self.splits = {
            "train": range(num_samples),
            "test": range(num_samples),
            "validation": range(1),
        }
        self._dense = torch.rand(num_samples, self.num_dense, generator=generator)
        popular = torch.rand(len(SIZES), num_samples, generator=generator) < popular_share
        self._rows = torch.stack(
            [
                torch.where(
                    is_popular,
                    torch.randint(0, 5, (num_samples,), generator=generator),
                    torch.randint(0, size, (num_samples,), generator=generator),
                )
                for is_popular, size in zip(popular, SIZES, strict=True)
            ]
        )
        self._labels = (torch.rand(num_samples, generator=generator) < 0.3).float()

    def read(self, samples):
        numbers = torch.from_numpy(np.asarray(samples))
        ids = JaggedIds.from_one_hot(list(self.table_sizes), self._rows[:, numbers])
        return Batch(self._dense[numbers], ids, self._labels[numbers])

    def describe(self):
        return {}


class Model(nn.Module):
    """Gives (loss, (loss, logits, labels)), and reads the weights of samples."""

    uses_sample_weights = True

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        tables = [
            TableConfig(name=f"t_{number}", num_embeddings=size, embedding_dim=dim)
            for number, (size, dim) in enumerate(zip(SIZES, DIMS, strict=True))
        ]
        self.embeddings = HotColdEmbeddingBagCollection(
            tables, optimizer=RowWiseAdagrad(lr=0.1), **options
        )
        self.layer = nn.Linear(sum(DIMS) + Clicks.num_dense, 1)

    def forward(self, batch):
        pooled = self.embeddings(batch.sparse_features).values()
        logits = self.layer(torch.cat([pooled, batch.dense_features], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, getattr(batch, "weights", None)
        )
        return loss, (loss.detach(), logits.detach(), batch.labels)


def options_of(tier, folder):
    """The model's options for a tier: "resident", "host" or "file"."""
    if tier == "resident":
        return {}
    if tier == "host":
        return {"budget": BUDGET}
    return {"budget": BUDGET, "cold_tier": "file", "cold_path": folder}


class Run:
    """A model, its optimizer, a pipeline and a loader."""

    def __init__(
        self, schedule, skip, options=None, *, batch_size=16, model=None, whole=None, **settings
    ):
        self.model = model or Model(**(options or {}))
        self.dense = torch.optim.Adagrad(self.model.layer.parameters(), lr=0.05)
        self.pipeline = TrainPipeline(
            self.model, self.dense, schedule=schedule, skip=skip, batch_size=whole, **settings
        )
        self.loader = BatchLoader(Clicks(), "train", batch_size, shuffle=True, seed=1)
        self.losses = []

    def train(self, num_steps=None, num_epochs=1):
        """Up to `num_steps` steps, or to the end of an epoch."""
        while self.loader.epoch < num_epochs:
            for loss, _ in self.pipeline.steps(self.loader):
                self.losses.append(loss.item())
                if len(self.losses) == num_steps:
                    return self
        return self

    def state(self):
        """All that a resumed run begins with."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "rows": self.model.embeddings.row_optimizer.state_dict(),
                "dense": self.dense.state_dict(),
                "pipeline": self.pipeline.state_dict(),
                "loader": self.loader.state_dict(),
            }
        )

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.model.embeddings.row_optimizer.load_state_dict(state["rows"])
        self.dense.load_state_dict(state["dense"])
        self.pipeline.load_state_dict(state["pipeline"])
        self.loader.load_state_dict(state["loader"])
        return self


def require_equal(expected, found):
    """Losses, rows and the state of all optimizers are equal to the last bit."""
    assert found.losses == expected.losses
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    for states in zip(optimizer_states(expected), optimizer_states(found), strict=True):
        assert states[0].keys() == states[1].keys()
        for key, known in states[0].items():
            for name, value in known.items():
                assert torch.equal(torch.as_tensor(states[1][key][name]), torch.as_tensor(value))


def optimizer_states(run):
    """Of the rows, then of the dense part."""
    optimizers = run.model.embeddings.row_optimizer, run.dense
    return [optimizer.state_dict()["state"] for optimizer in optimizers]
