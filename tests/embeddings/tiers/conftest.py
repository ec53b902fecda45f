"""What tests of transfers on streams share."""

import pytest
import torch

from recsys.embeddings.kernels import choice as kernel_choice
from tests.embeddings.tiers.fake_streams import FakeCuda, FakeEvent, FakeStream
from tests.host_copies import HOST_COPIES, reach_host
from tests.torch_kernels import BY_TORCH


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(FakeEvent, "host_waited_for", frozenset())
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *pair: fake.kept.append(pair))
    return fake


@pytest.fixture(params=[False, True], ids=["staged", "reached"])
def is_reached(request, monkeypatch):
    """Whether the device copies rows of the host by itself; the CPU stands in for it."""
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
    reach_host(monkeypatch, HOST_COPIES if request.param else None)
    return request.param
