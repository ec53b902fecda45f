"""An ordinary PyTorch model, trained plain and then with one line of recsys between.

    python examples/swap_one_line.py

The losses are the same; the seconds of both are printed. See `accelerate_classic.py` for a
measurement with AUC on real data.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import recsys

NUM_TABLES, NUM_ROWS, DIM, BATCH_SIZE = 26, 20_000, 16, 1024


class ClickModel(nn.Module):
    """One `nn.EmbeddingBag` per feature, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in range(NUM_TABLES)
        )
        self.layers = nn.Sequential(nn.Linear(NUM_TABLES * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of a mini-batch: ids (NUM_TABLES, B, 1), result (B,)."""
        pooled = [bag(of_table) for bag, of_table in zip(self.bags, ids, strict=True)]
        return self.layers(torch.cat(pooled, dim=1)).squeeze(1)


def make_batches(num_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of ids and labels; a few ids are frequent, as in real clicks."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num_batches):
        drawn = torch.rand(NUM_TABLES, BATCH_SIZE, 1, generator=generator)
        ids = (NUM_ROWS * drawn**4).long()
        num_odd = (ids % 2).sum(0).squeeze(1)
        batches.append((ids, (num_odd > NUM_TABLES / 2).float()))
    return batches


def train(num_batches: int, *, is_accelerated: bool) -> tuple[list[float], float]:
    """Train one epoch; returns the loss of every step, and the seconds."""
    torch.manual_seed(0)
    model = ClickModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if is_accelerated:
        print(recsys.accelerate(model, optimizer=optimizer))  # the one line
    batches, losses = make_batches(num_batches), []
    begin = time.perf_counter()
    for ids, labels in batches:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - begin


def main(num_batches: int = 100) -> None:
    train(1, is_accelerated=True)  # compiles the kernels, which is not training time
    plain, seconds_plain = train(num_batches, is_accelerated=False)
    ours, seconds = train(num_batches, is_accelerated=True)
    difference = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    print(f"last loss: {plain[-1]:.5f} plain, {ours[-1]:.5f} accelerated")
    print(f"largest difference of a loss: {difference:.0e}")
    print(f"seconds: {seconds_plain:.2f} plain, {seconds:.2f} accelerated")


if __name__ == "__main__":
    main()
