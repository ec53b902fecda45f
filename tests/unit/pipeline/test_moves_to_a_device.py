"""Mini-batches are moved to a GPU through page-locked memory."""

import pytest
import torch
from torch import nn

from recsys._support.user_code import fits_override
from recsys.batch import Batch, JaggedIds
from recsys.pipeline.window import MiniBatch


class Pinned:
    """A mini-batch that notes what is done with it."""

    def __init__(self, is_on_device):
        self.is_on_device, self.done = is_on_device, []

    def pin_memory(self):
        if self.is_on_device:
            raise RuntimeError("cannot pin: only dense CPU tensors can be pinned")
        self.done.append("pinned")
        return self

    def to(self, device, non_blocking=False):
        self.done.append(f"to {device}, {non_blocking}")
        return self


@pytest.mark.parametrize(
    ("device", "is_on_device", "done"),
    [
        ("cuda:0", False, ["pinned", "to cuda:0, True"]),
        ("cuda:0", True, ["to cuda:0, True"]),
        ("cpu", False, ["to cpu, True"]),
    ],
)
def test_copies_to_a_gpu_begin_in_page_locked_memory(device, is_on_device, done):
    batch = Pinned(is_on_device)
    found = MiniBatch({"part": [batch]})

    found.move(torch.device(device))

    assert found.batch == {"part": [batch]}
    assert batch.done == done


@pytest.mark.parametrize("kind", [torch.Tensor, JaggedIds, Batch, nn.Parameter])
def test_kinds_of_mini_batches_that_are_pinned(kind):
    assert fits_override(kind, "pin_memory", "to")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_mini_batches_go_to_a_gpu_and_stay_there():
    device = torch.device("cuda", 0)
    features = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[0, 1, 2], [3, 0, 1]]))
    batch = Batch(torch.rand(3, 5), features, torch.tensor([0, 1, 1]))
    moved = MiniBatch(batch)
    moved.move(device)
    again = MiniBatch(moved.batch)

    again.move(device)

    found = again.batch
    assert (
        found.sparse_features.values().data_ptr() == moved.batch.sparse_features.values().data_ptr()
    )
    for ours, theirs in (
        (found.dense_features, batch.dense_features),
        (found.sparse_features.values(), batch.sparse_features.values()),
        (found.labels, batch.labels),
    ):
        assert ours.device == device
        assert torch.equal(ours.cpu(), theirs)
