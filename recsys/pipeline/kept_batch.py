"""A check that a mini-batch is still what the iterator returned, when its turn comes.

A loader that fills the same tensors again for each mini-batch changes those that wait. A plain loop
does not notice; here another mini-batch would be trained on in their place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recsys._support.torch_compat import version_of
from recsys.pipeline.inputs import is_torchrec, items_of

__all__ = ["KeptBatch"]


class KeptBatch:
    """The tensors of a mini-batch that waits, and their versions.

    A change that torch does not count, such as one through numpy or of tensors that were made in
    inference mode, is not seen.

    Args:
        batch: The mini-batch.
    """

    def __init__(self, batch: Any) -> None:
        self._tensors = [each for each in _tensors_in(batch) if not each.is_inference()]
        self._versions = list(map(version_of, self._tensors))

    def require_unchanged(self) -> None:
        """Check that no tensor was changed in place.

        Raises:
            RuntimeError: one was.
        """
        now = list(map(version_of, self._tensors))
        if now != self._versions:
            pairs = zip(self._tensors, self._versions, now, strict=True)
            shape = next(tuple(tensor.shape) for tensor, before, after in pairs if before != after)
            raise RuntimeError(
                f"a tensor of shape {shape} of a mini-batch was changed in place while the "
                "mini-batch waited for its step, which would train on other samples now; have the "
                "iterator return new tensors for each mini-batch (.clone()), or take none ahead: "
                "schedule=Sequential(), and no skip="
            )


_HOLD_NO_TENSORS = (int, float, str, bytes, type(None), nn.Module)


def _tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a mini-batch, also inside its containers and attributes."""
    found, waiting = [], [(batch, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif is_torchrec(value):  # what it computes of these are views and copies
            parts = value.values(), value.weights_or_none(), value.offsets_or_none()
            found += [each for each in (*parts, value.lengths_or_none()) if each is not None]
        else:
            waiting += [
                (part, depth + 1)
                for part in items_of(value, depth)
                if not isinstance(part, _HOLD_NO_TENSORS)
            ]
    return found
