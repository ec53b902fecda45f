"""DeepCTR-Torch, whose tables are `nn.Embedding`s: its DeepFM, compiled and fitted.

    pip install deepctr-torch
    python examples/frameworks/deepctr_fit.py

`recsys.accelerate` stands between `compile`, which makes the optimizer, and `fit`. Its default
penalty reads every row of every table in each step. It is turned off here: with it, a budget has no
effect on memory and is refused at the first step.
"""

from __future__ import annotations

import torch
from clicks import BATCH_SIZE, SIZES, make_clicks
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM

import recsys


def train(budget: str | None) -> list[float]:
    """Train for two epochs; returns the mean loss of each."""
    columns = [
        SparseFeat(f"feature_{number}", size, embedding_dim=16) for number, size in enumerate(SIZES)
    ]
    model = DeepFM(
        columns,
        columns,
        dnn_hidden_units=(16,),
        l2_reg_linear=0,
        l2_reg_embedding=0,
        seed=0,
    )
    model.compile(torch.optim.Adagrad(model.parameters(), lr=0.05), "binary_crossentropy")
    if budget:
        print(recsys.accelerate(model, optimizer=model.optim, budget=budget))
    ids, labels = make_clicks()
    features = {column.name: of.numpy() for column, of in zip(columns, ids.T, strict=True)}
    history = model.fit(
        features, labels.numpy(), batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"]


if __name__ == "__main__":
    plain, ours = train(None), train("128KiB")
    print(f"last loss: {plain[-1]:.6f} without recsys, {ours[-1]:.6f} with it")
