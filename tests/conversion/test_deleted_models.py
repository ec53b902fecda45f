"""What is left of an accelerated model that was deleted: its memory, its tables, its optimizer."""

import gc
import weakref

import pytest
import torch
from torch import nn

import recsys


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(300, 4, sparse=True)
        self.items = nn.EmbeddingBag(200, 4, mode="sum", sparse=True)

    def forward(self, ids):
        return self.users(ids[:, 0] % 300) * self.items(ids % 200)


def train(model, optimizer, num_steps=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randint(0, 300, (8, 2), generator=generator)).square().sum().backward()
        optimizer.step()


def trained(tier, folder):
    """A trained model and its optimizer. `tier` is "plain", "resident", "host" or "file"."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if tier != "plain":
        options = {} if tier == "resident" else {"budget": "8KiB", "cold_tier": tier}
        if tier == "file":
            options["cold_path"] = folder
        recsys.accelerate(model, optimizer=optimizer, **options, always=True)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("tier", ["resident", "host", "file"])
def test_a_deleted_model_frees_its_memory(tier, tmp_path):
    model, optimizer = trained(tier, tmp_path / "rows")
    parts = [*model.parameters(), *model.users.groups(), optimizer]
    alive = [weakref.ref(part) for part in parts]

    del model, optimizer, parts
    gc.collect()

    assert [part() for part in alive] == [None] * len(alive)


@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("collects", [False, True])
def test_a_table_kept_from_a_deleted_model_has_its_newest_rows(tier, collects, tmp_path):
    expected = [*trained("resident", None)[0].parameters()]

    found = [*trained(tier, tmp_path / "rows")[0].parameters()]
    if collects:
        gc.collect()

    for weight, other in zip(found, expected, strict=True):
        assert torch.equal(weight.detach(), other.detach())
