"""Models of the user's that share tensors, and those that a run could not save."""

import sys
from pathlib import Path

import pytest

from recsys.config import load_config
from recsys.errors import ConfigError
from recsys.train import export_run_checkpoint, train
from tests.commands import recsys
from tests.train.resumed_runs import evaluated, load_model, require_equal

CODE = """
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.size = num_dense + 4 * len(embeddings.output_keys())
        self.top = nn.Linear(self.size, 1)

    def inputs(self, batch):
        pooled = self.embeddings(batch.sparse_features).values()
        return torch.cat([batch.dense_features, pooled], 1)

    def forward(self, batch):
        return self.top(self.inputs(batch))


class Tied(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.first, self.second = (nn.Linear(self.size, self.size) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, batch):
        return self.top(self.second(self.first(self.inputs(batch))))


class Tower(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.top = nn.Linear(self.size, 3)


class Towers(nn.Module):
    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.user, self.item = (Tower(embeddings, num_dense) for _ in range(2))

    def forward(self, batch):
        return (self.user(batch) * self.item(batch)).sum(1)


class Extra(Base):
    def get_extra_state(self):
        return {"size": self.size}

    def set_extra_state(self, state):
        self.size = state["size"]


class Lazy(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.top = nn.LazyLinear(1)


class Complex(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))


class Expanded(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.register_buffer("scale", torch.ones(1).expand(3))


class Buffers(Base):
    def __init__(self, embeddings, num_dense):
        super().__init__(embeddings, num_dense)
        self.register_buffer("mask", torch.arange(self.size) > 0)
        self.register_buffer("order", torch.arange(self.size, dtype=torch.int32))

    def forward(self, batch):
        return self.top(self.inputs(batch) * self.mask)
"""


@pytest.fixture
def config_of(table_store, tmp_path, monkeypatch):
    """Returns the configuration of a class in `CODE`."""
    (tmp_path / "shared_models.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    settings = [
        "model.embedding_dim=4",
        "batch_size=16",
        "num_threads=1",
        "optimizer.lr=0.01",
        "checkpoint.every_steps=3",
    ]
    store = str(table_store())
    yield lambda name: load_config(
        None, [*settings, f"model.name=shared_models:{name}"], data=store
    )
    sys.modules.pop("shared_models", None)


def run(config, **more):
    return train(config, RUN, show_progress=False, **more)


RUN = Path("run")


@pytest.mark.slow(but=("Towers",))
@pytest.mark.parametrize("name", ["Tied", "Towers"])
def test_tensors_with_two_names_are_saved_once_loaded_and_exported(config_of, name):
    config = config_of(name)
    record = run(config)
    model = load_model(RUN)

    assert len(model) < {"Tied": 9, "Towers": 10}[name]
    assert evaluated(RUN) == record["metrics"]
    (RUN / "run.json").unlink()
    assert run(config, resume=True)["metrics"] == record["metrics"]
    require_equal(load_model(RUN), model)
    recsys("export", RUN, "--to", "torch-export", "--out", "program.pt2")
    export_run_checkpoint(RUN, "checkpoint.safetensors")
    Path("checkpoint.safetensors").rename(RUN / "model.safetensors")
    assert evaluated(RUN) == record["metrics"]


def test_buffers_of_whole_numbers_and_bits_are_saved_and_loaded(config_of):
    record = run(config_of("Buffers"))

    assert evaluated(RUN) == record["metrics"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Extra", "_extra_state"),
        ("Lazy", "top.weight"),
        ("Expanded", "scale"),
        ("Complex", "turn"),
    ],
)
def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(config_of, name, key):
    with pytest.raises(ConfigError, match=key):
        run(config_of(name))

    assert not RUN.exists()
