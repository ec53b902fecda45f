"""Captures of CUDA graphs that leave everything else as it was."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from recsys._support.torch_compat import end_allocation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["GraphRecorder", "current_stream", "restored"]

_Result = TypeVar("_Result")


class GraphRecorder:
    """Records what functions launch as CUDA graphs; meanwhile other threads may move rows.

    All graphs are recorded on one stream, so one may contain the backward of another.

    Args:
        device: Where the functions launch.
        pool: The memory of the graphs, from `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        # By itself torch captures on a stream of the device that it captured on first.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = pool

    def warm_up(self, launches: Sequence[Callable[[], Any]]) -> None:
        """Call functions in turn, three times: libraries choose kernels and take memory."""
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            for launch in (*launches,) * 3:
                launch()
        before.wait_stream(self._stream)

    def record(self, launch: Callable[[], _Result]) -> tuple[_Result, Callable[[], None]]:
        """Record what a function launches; nothing runs yet.

        Returns:
            What the function returned, which each replay overwrites; and what replays.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = launch()
        return result, graph.replay


def current_stream(device: torch.device) -> Any:
    """Where this thread launches on a device; None if it has no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


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
