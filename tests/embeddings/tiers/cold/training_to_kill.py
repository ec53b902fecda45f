"""A training on the file tier, in a process of its own, to be killed.

It prints the number of each step it has made. After step `CHECKPOINT_AT` it saves a checkpoint,
after `SYNC_AT` the folder is synced; with `--stop-there` it does nothing more then.
"""

import sys
import time
from pathlib import Path

import torch

from recsys.batch import JaggedIds
from recsys.embeddings import Adagrad, HotColdEmbeddingBagCollection, TableConfig
from recsys.pipeline import LookAhead, TrainPipeline

CHECKPOINT_AT, SYNC_AT = 6, 10
SIZES = {"users": 3000, "goods": 2000}


class Model(torch.nn.Module):
    """A collection whose pooled rows are drawn to a target; gives (loss, loss)."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        tables = [
            TableConfig(name=name, num_embeddings=size, embedding_dim=8)
            for name, size in SIZES.items()
        ]
        self.embeddings = HotColdEmbeddingBagCollection(
            tables, optimizer=Adagrad(lr=0.1), **options
        )

    def forward(self, batch):
        loss = (self.embeddings(batch).values() - 1).square().mean()
        return loss, loss.detach()


def in_files(folder):
    """The model with rows in a folder."""
    return Model(budget=60_000, cold_tier="file", cold_path=folder)


def batches(first=0):
    """Mini-batches without end, the same every time."""
    for step in range(first, sys.maxsize):
        generator = torch.Generator().manual_seed(step)
        values = [torch.randint(0, size, (64,), generator=generator) for size in SIZES.values()]
        yield JaggedIds.from_one_hot(list(SIZES), torch.stack(values))


def say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(folder, checkpoint, *options):
    """Train until the process is ended."""
    model = in_files(folder)
    pipeline = TrainPipeline(model, None, schedule=LookAhead(3))
    for step, _ in enumerate(pipeline.steps(batches()), 1):
        if step == CHECKPOINT_AT:
            state = {
                "model": model.state_dict(),
                "rows": model.embeddings.row_optimizer.state_dict(),
            }
            torch.save(state, Path(checkpoint))
        if step == SYNC_AT:
            pipeline.detach()
            model.embeddings.sync()
        say(step)
        if step == SYNC_AT and "--stop-there" in options:
            time.sleep(3600)
