"""Hugging Face Accelerate: accumulation, clipping, and its saved state.

    pip install accelerate
    python examples/frameworks/hf_accelerate.py

`recsys.accelerate` comes before `Accelerator.prepare`, which wraps the optimizer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from clicks import BATCH_SIZE, ClickModel, make_clicks
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import recsys


def train(budget: str | None) -> list[float]:
    """Train for an epoch, save, and go on for another with a new model; returns all losses."""
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            torch.manual_seed(0)
            model = ClickModel()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
            if budget:
                print(recsys.accelerate(model, optimizer=optimizer, budget=budget))
            loader = DataLoader(TensorDataset(*make_clicks()), batch_size=BATCH_SIZE)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            if any(Path(folder).iterdir()):
                accelerator.load_state(folder)
            for ids, labels in loader:
                with accelerator.accumulate(model):
                    loss = binary_cross_entropy_with_logits(model(ids), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    plain, ours = train(None), train("128KiB")
    print(f"last loss: {plain[-1]:.6f} without recsys, {ours[-1]:.6f} with it")
