"""Captures of CUDA graphs that leave everything else as it was."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.torch_compat import end_allocation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["graph_on", "restored"]


def graph_on(device: torch.device) -> Callable[..., Any]:
    """`torch.cuda.graph` for a device; meanwhile other threads may move rows and load data.

    By itself torch captures on a stream of the device that it captured on first.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return partial(torch.cuda.graph, stream=stream, capture_error_mode="thread_local")


@contextmanager
def restored(device: torch.device, pool: Any) -> Iterator[None]:
    """Restore random generators, which warm-up uses; after an error, all that a capture changes."""
    if device.type != "cuda":
        with torch.random.fork_rng([]):
            yield
        return
    generator = torch.cuda.default_generators[device.index]
    with (
        torch.random.fork_rng([device]),
        torch.cuda.device(device),
        torch.cuda.stream(torch.cuda.current_stream(device)),
    ):
        unused = generator.clone_state()
        try:
            yield
        except BaseException:
            # torch leaves the generator, and after an invalid capture the allocator, capturing.
            generator.graphsafe_set_state(unused)
            with suppress(Exception):  # it raises if no capture has begun, or if it has ended
                end_allocation(device.index, pool)
            raise
