"""The clock of `recsys bench gpu`, the device's memory, and what the device can do at most.

On CUDA times are those between two events of the current stream. The host waits for the device
before the first and after the last, so a step that waits for the host is as slow as it is.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.bench.parts.products import Products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from recsys.bench.gpu.cases import Model

__all__ = [
    "Clock",
    "Limits",
    "allocated_bytes",
    "gemm_seconds",
    "measure_limits",
    "peak_bytes",
    "precision_of",
    "reset_peak",
]

_NUM_RUNS = 5


class Clock:
    """Measures seconds on a device.

    Args:
        device: CUDA, or the CPU to try the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def time(self, function: Callable[[], object]) -> float:
        """Seconds that a call takes, with everything that it queues on the device."""
        if not self._is_cuda:
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3

    def median(self, function: Callable[[], object]) -> float:
        """Median seconds of some calls, after one that is not measured."""
        function()
        return median(self.time(function) for _ in range(_NUM_RUNS))


class Limits(NamedTuple):
    """Measured bandwidths, in bytes per second.

    Attributes:
        to_device: Copies of one large piece of pinned memory to the device.
        to_host: The same in the other direction.
        on_device: Bytes read plus bytes written by a copy within the device's memory.
    """

    to_device: float
    to_host: float
    on_device: float


def measure_limits(device: torch.device, num_bytes: int) -> Limits:
    """Measure bandwidths.

    Args:
        device: The device.
        num_bytes: Bytes of a copy; on the device 4 times as many.
    """
    clock = Clock(device)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    large = torch.zeros(4 * num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    return Limits(
        to_device=num_bytes / clock.median(lambda: here.copy_(pinned, non_blocking=True)),
        to_host=num_bytes / clock.median(lambda: pinned.copy_(here, non_blocking=True)),
        on_device=2 * len(large) / clock.median(lambda: other.copy_(large)),
    )


def gemm_seconds(model: Model, num_sparse: int, device: torch.device) -> float:
    """Seconds of the matrix products of one step alone, forward and backward.

    Args:
        model: The dense part.
        num_sparse: Number of pooled vectors per sample.
        device: The device; its precision for float32 is set by the caller.
    """
    products = Products(
        model.batch_size, model.dense_arch, model.over_arch, num_sparse, model.precision, device
    )
    return Clock(device).median(products.by_torch)


@contextmanager
def precision_of(model: Model) -> Iterator[None]:
    """A context in which products of float32 matrices have the model's precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if model.precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on a CUDA device; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors since `reset_peak`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
