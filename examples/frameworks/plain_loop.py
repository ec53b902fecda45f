"""A loop in plain PyTorch, with one line for recsys.

python examples/frameworks/plain_loop.py
"""

from __future__ import annotations

import torch
from clicks import BATCH_SIZE, ClickModel, make_clicks
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import recsys


def train(budget: str | None) -> list[float]:
    """Train for two epochs; returns the loss of every step."""
    torch.manual_seed(0)
    model = ClickModel()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    if budget:
        print(recsys.accelerate(model, optimizer=optimizer, budget=budget))  # the one line
    losses = []
    for _ in range(2):
        for ids, labels in DataLoader(TensorDataset(*make_clicks()), batch_size=BATCH_SIZE):
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(ids), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    plain, ours = train(None), train("128KiB")
    print(f"last loss: {plain[-1]:.6f} without recsys, {ours[-1]:.6f} with it")
