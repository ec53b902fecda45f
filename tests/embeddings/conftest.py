"""What tests of embeddings share."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.lookup.one_table.device_calls import DeviceCalls
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tests.host_copies import reach_host
from tests.torch_kernels import BY_TORCH, BY_TRITON

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]


class NoRoundTrips(TorchDispatchMode):
    """Refuses what would wait for a device, if there were one."""

    _WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "repeat_interleave")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in func.name() for name in self._WAITING), func.name()
        assert func.name() != "aten::equal"
        if func.name() in ("aten::index.Tensor", "aten::index_put_"):
            assert not any(each is not None and each.dtype == torch.bool for each in args[1])
        return func(*args, **kwargs or {})


@pytest.fixture
def no_round_trips():
    """A context in which no operation of torch may wait for a device."""
    return NoRoundTrips()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device; the CPU stands in for one, by operations of torch in place of Triton kernels."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
    found = torch.device(request.param, *([0] if request.param == "cuda" else []))
    yield found
    errors_on(found).forget()


@pytest.fixture(params=["torch", "triton"])
def each_way(request, monkeypatch, device):
    """The kernels of `device`: operations of torch, then Triton's in its interpreter."""
    if request.param == "triton" and not torch.cuda.is_available():
        copies = kernel_choice.kernels_on(device).host_copies
        monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TRITON)
        reach_host(monkeypatch, copies)


@pytest.fixture(params=OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def optimizer(request):
    """Each of our optimizers in turn, for tests that name none."""
    return request.param


@pytest.fixture(params=OPTIMIZERS[1:], ids=lambda optimizer: type(optimizer).__name__)
def optimizer_with_state(request):
    """Each that keeps state by the row."""
    return request.param


@pytest.fixture
def refused(monkeypatch):
    """Gets whether each call was refused, and left to `fused_lookup`."""
    found, look_up = [], DeviceCalls.look_up

    def note(*arguments, **options):
        result = look_up(*arguments, **options)
        found.append(result is None)
        return result

    monkeypatch.setattr(DeviceCalls, "look_up", note)
    return found
