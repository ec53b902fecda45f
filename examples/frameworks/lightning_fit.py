"""Lightning: `Trainer.fit` with accumulation, clipping, and resuming from its checkpoint.

    pip install lightning
    python examples/frameworks/lightning_fit.py

`recsys.accelerate` stands in `configure_optimizers`, where the optimizer is made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning
import torch
from clicks import BATCH_SIZE, ClickModel, make_clicks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import recsys


class Clicks(lightning.LightningModule):
    """The click model as Lightning wants it."""

    def __init__(self, budget: str | None) -> None:
        super().__init__()
        self.model, self.budget = ClickModel(), budget
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of one mini-batch."""
        ids, labels = batch
        loss = binary_cross_entropy_with_logits(self.model(ids), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; with a budget, recsys updates the rows in its step."""
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        if self.budget:
            print(recsys.accelerate(self.model, optimizer=optimizer, budget=self.budget))
        return optimizer


def train(budget: str | None) -> list[float]:
    """Train for an epoch, save, and go on for another with a new model and a new trainer."""
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "clicks.ckpt")
        for num_epochs in (1, 2):
            torch.manual_seed(0)
            clicks = Clicks(budget)
            trainer = lightning.Trainer(
                accelerator="cpu",
                max_epochs=num_epochs,
                accumulate_grad_batches=2,
                gradient_clip_val=1.0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            loader = DataLoader(TensorDataset(*make_clicks()), batch_size=BATCH_SIZE)
            trainer.fit(clicks, loader, ckpt_path=checkpoint if checkpoint.exists() else None)
            trainer.save_checkpoint(checkpoint)
            losses += clicks.losses
    return losses


if __name__ == "__main__":
    plain, ours = train(None), train("128KiB")
    print(f"last loss: {plain[-1]:.6f} without recsys, {ours[-1]:.6f} with it")
