"""Launches that repeat from step to step: recorded once as a CUDA graph, then replayed.

Launching a dozen small kernels takes the host longer than a GPU needs to run them; a graph is one
launch. What changes from step to step is copied to where the graph reads it, and everything else
must be in the key: sizes, settings, and the addresses of memory that is not copied.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys._support.cuda.graphs import GraphRecorder, restored
from recsys._support.torch_compat import current_stream_number

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import Tensor

__all__ = ["Replays", "are_replaying", "replaying"]

# Device types whose launches can be recorded. Tests add "cpu".
_CAN_RECORD = {"cuda"}
_MOST_RECORDED = 16  # by one `Replays`; each keeps a graph and its memory
_MOST_SEEN = 64
_steps = threading.local()


@contextmanager
def replaying(is_on: bool = True) -> Iterator[None]:
    """Record and replay launches in this context; outside of it, `Replays` only launches."""
    before = getattr(_steps, "are_replayed", False)
    _steps.are_replayed = is_on
    try:
        yield
    finally:
        _steps.are_replayed = before


def are_replaying() -> bool:
    """Whether `Replays` may replay launches now."""
    return getattr(_steps, "are_replayed", False)


class _Recorded(NamedTuple):
    """A graph.

    Attributes:
        inputs: Where it reads what is copied.
        replay: Launches it.
        result: What the recorded function returned; the next replay overwrites it.
        reads: Whatever else has memory that it reads, to keep it.
    """

    inputs: Sequence[Tensor]
    replay: Callable[[], None]
    result: Tensor | None
    reads: Any = None


class Replays:
    """The recorded launches of one function."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded] = {}
        self._seen: dict[Hashable, None] = {}  # in the order of their first calls
        self._has_failed = False

    def run(
        self,
        key: Hashable,
        launch: Callable[..., Tensor | None],
        inputs: Sequence[Tensor],
        reads: Any = None,
    ) -> Tensor | None:
        """Call a function that launches kernels; from the second call with a key on, replay them.

        A graph has addresses. So the memory of everything that the launches use must be in `inputs`
        or in `reads`, or last as long as this object; or its address is in the key, and each call
        with this address means what is there then.

        Args:
            key: Everything that the launches depend on, besides the numbers in `inputs`.
            launch: Called with `inputs`, or with copies of them. It must wait for nothing. In its
                first call with a key, which is not recorded, it may upload what it then caches in
                `reads`.
            inputs: Tensors on one device whose numbers change from call to call.
            reads: Owns memory that the launches use.

        Returns:
            What the function returns; later calls leave it as it is.
        """
        device = inputs[0].device
        is_on = are_replaying() and device.type in _CAN_RECORD
        if not is_on or self._has_failed:
            return launch(*inputs)
        # Graphs of one stream share memory, so a graph is replayed on the stream that recorded it.
        stream = current_stream_number(device)
        key = key, stream, *((each.shape, each.dtype) for each in inputs)
        found = self._recorded.get(key)
        if found is None:
            if key not in self._seen or len(self._recorded) >= _MOST_RECORDED:
                self._seen[key] = None
                if len(self._seen) > _MOST_SEEN:
                    del self._seen[next(iter(self._seen))]  # the oldest
                return launch(*inputs)
            try:
                found = self._recorded[key] = _record(launch, inputs, reads)
            except Exception as error:  # torch's or the GPU's; without a graph it may work
                self._has_failed = True
                warnings.warn(
                    f"steps cannot be replayed as CUDA graphs ({error}), so their kernels are "
                    "launched one by one",
                    stacklevel=2,
                )
                return launch(*inputs)
        for place, given in zip(found.inputs, inputs, strict=True):
            place.copy_(given)
        found.replay()
        return None if found.result is None else found.result.clone()


@cache
def _pool(device: torch.device, stream: int) -> Any:
    """The memory of all graphs that run on a stream, one after the other."""
    return torch.cuda.graph_pool_handle()


def _record(
    launch: Callable[..., Tensor | None], inputs: Sequence[Tensor], reads: Any
) -> _Recorded:
    """Record what a function launches; nothing runs yet."""
    device = inputs[0].device
    places = [each.clone() for each in inputs]
    pool = _pool(device, current_stream_number(device))
    with restored(device, pool):
        result, replay = GraphRecorder(device, pool).record(partial(launch, *places))
    return _Recorded(places, replay, result, reads)
