"""What tests of `bench gpu` share: the program on the CPU, with one thread."""

import dataclasses

import pytest
import torch

from recsys.bench.gpu import run
from recsys.bench.gpu.cases import QUICK


@pytest.fixture
def one_thread(monkeypatch):
    """The program leaves the threads and the allocator of this process as they are."""
    monkeypatch.setattr(run, "set_num_threads", lambda _: None)
    monkeypatch.setattr(run, "tune_allocator", lambda: True)
    torch.set_num_threads(1)


@pytest.fixture
def quick_plan():
    """One model, a budget and the floor, on the CPU."""
    return dataclasses.replace(
        QUICK, device="cpu", presets=("kaggle",), shares=("0.5", "floor", "1")
    )
