"""The CUDA streams on which backward has filled a ledger; what reads it waits for them.

Autograd runs the backward of a lookup on the stream of its forward. At the end of a pass it has the
caller's stream wait for those on which a `grad` was set. A ledger is no `grad`, so that is done
here.
"""

from __future__ import annotations

import torch

from recsys._support.torch_compat import current_stream_number

__all__ = ["BackwardStreams"]


class BackwardStreams:
    """The streams that have queued the gradients and ids of a ledger, on one device."""

    def __init__(self) -> None:
        self._by_number: dict[int, torch.cuda.Stream] = {}

    def note(self, device: torch.device) -> None:
        """Note the current stream of a CUDA device, in backward."""
        number = current_stream_number(device)
        if number not in self._by_number:
            self._by_number[number] = torch.cuda.current_stream(device)

    def wait(self) -> None:
        """Have the current stream wait for the others, and forget all."""
        while self._by_number:
            number, stream = self._by_number.popitem()
            if number != current_stream_number(stream.device):
                torch.cuda.current_stream(stream.device).wait_stream(stream)
