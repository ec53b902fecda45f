"""Time by kernel of one training step, by torch's profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    import torch

    from recsys.bench.gpu.providers import AbstractProvider

__all__ = ["kernels_of_step"]

_NUM_LISTED = 25
_NUM_STEPS_BEFORE = 3  # they fill the window of the schedule


def kernels_of_step(provider: AbstractProvider, device: torch.device) -> list[dict[str, Any]]:
    """The kernels that take most of a step, on a CPU the operations.

    Args:
        provider: Makes the step, and some before it.
        device: The device.

    Returns:
        `name`, `calls`, `device_ms` and `host_ms` of each, without what it calls.
    """
    is_cuda = device.type == "cuda"
    provider.prepare(_NUM_STEPS_BEFORE + 1)
    for _ in range(_NUM_STEPS_BEFORE):
        provider.step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        provider.step().item()
    found = [
        {
            "name": event.key,
            "calls": event.count,
            "device_ms": event.self_device_time_total / 1e3,
            "host_ms": event.self_cpu_time_total / 1e3,
        }
        for event in profiler.key_averages()
    ]
    found.sort(key=lambda each: each["device_ms" if is_cuda else "host_ms"], reverse=True)
    return found[:_NUM_LISTED]
