"""A small model with tables in one or two tiers, and steps that train it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import Adagrad
from recsys.embeddings.table import TableConfig
from recsys.train.checkpoint import Checkpoints, load_checkpoint

SIZES = (300, 7, 40)
DIM = 4


class Training:
    """A model and its optimizers; `step` trains it on a mini-batch that `number` fixes."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.losses: list[float] = []

    def step(self, number: int, most: int = 1_000_000) -> None:
        generator = torch.Generator().manual_seed(number)
        rows = torch.stack(
            [torch.randint(min(size, most), (12,), generator=generator) for size in SIZES]
        )
        labels = torch.rand(12, generator=generator)
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        pooled = self.model.tables(JaggedIds.from_one_hot(["0", "1", "2"], rows))
        loss = (self.model.top(pooled.values()).squeeze(1) - labels).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append(loss.item())

    def numbers(self) -> dict[str, Any]:
        """Every number of the training."""
        found = dict(self.model.state_dict())
        for place, optimizer in enumerate(self.optimizers):
            for key, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    found[f"{place} {key} {name}"] = torch.as_tensor(value)
        return {key: value.clone() for key, value in found.items()}


def make_training(tier: str = "resident", folder: Path | None = None, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    tables = [
        TableConfig(
            name=f"t{place}", num_embeddings=size, embedding_dim=DIM, feature_names=(str(place),)
        )
        for place, size in enumerate(SIZES)
    ]
    more: dict[str, Any] = {}
    if tier != "resident":
        more = {"budget": 4000, "cold_tier": tier}
    if tier == "file":
        more["cold_path"] = folder
    module = HotColdEmbeddingBagCollection(
        tables, optimizer=Adagrad(lr=0.1), auto_apply=False, **more
    )
    model = nn.Module()
    model.tables = module
    model.top = nn.Linear(DIM * len(SIZES), 1)
    model.register_buffer("count", torch.tensor(3))
    dense = torch.optim.Adam(model.top.parameters(), lr=0.01)
    return Training(model, [dense, module.row_optimizer])


def set_block_bytes(monkeypatch: Any, num_bytes: int) -> None:
    for module in ("format", "save"):
        monkeypatch.setattr(f"recsys.train.checkpoint.{module}.BLOCK_BYTES", num_bytes)


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def saved(training: Training, folder: Path, **more: Any) -> Checkpoints:
    return Checkpoints(folder, model=training.model, optimizers=training.optimizers, **more)


def begin(folder: Path, *how: Any) -> tuple[Training, Checkpoints]:
    """A training made in that way, and its checkpoints."""
    training = make_training(*how)
    return training, saved(training, folder)


def save_and_wait(checkpoints: Checkpoints, **more: Any) -> int | None:
    checkpoints.save(**more)
    return checkpoints.wait()


def load(training: Training, folder: Path, **more: Any) -> Any:
    return load_checkpoint(folder, model=training.model, optimizers=training.optimizers, **more)


def require_restores(training: Training, folder: Path, **more: Any) -> None:
    again = make_training(seed=1)
    load(again, folder, **more)
    require_equal(again.numbers(), training.numbers())
