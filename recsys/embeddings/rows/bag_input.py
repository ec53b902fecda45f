"""Converts the arguments of `nn.EmbeddingBag` to one form: flat ids, offsets, weights.

Invalid arguments raise the exceptions that `nn.EmbeddingBag` raises. Decreasing offsets raise too:
torch does not check them, and reads out of bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.embeddings.rows.lookups import counts_up
from recsys.errors import IdOutOfRange, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "BagInput",
    "are_bounds",
    "read_bags",
    "read_ids",
    "require_bounds",
    "require_same_device",
]

_MODES = ("sum", "mean", "max")
_ID_TYPES = (torch.int64, torch.int32)


class BagInput(NamedTuple):
    """Bags of ids, one after the other.

    Shape:
        values (N,) int32 or int64; offsets (B + 1,), of the same dtype, from 0 to N; weights (N,).
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    is_one_hot: bool  # every bag has one id
    shape: torch.Size | None = None  # shape of the B ids given to nn.Embedding; None for bags
    given: Sequence[Tensor] = ()  # on a device, the arguments that these were made from

    @property
    def are_ids(self) -> bool:
        """Whether these are ids given to `nn.Embedding`, each of which is a bag."""
        return self.shape is not None

    def without(self, row: int) -> BagInput:
        """The same bags without the lookups of one row."""
        is_kept = self.values != row
        if bool(is_kept.all()):
            return self
        ends = torch.cat([is_kept.new_zeros(1, dtype=torch.int64), is_kept.cumsum(0)])
        return BagInput(
            self.values[is_kept],
            ends[self.offsets.long()].to(self.offsets.dtype),
            None if self.weights is None else self.weights[is_kept],
            is_one_hot=False,
            shape=self.shape,
        )

    def first_bad(self, num_rows: int) -> int | None:
        """The position of the first value that is not a row; None if all are."""
        bad = ((self.values < 0) | (self.values >= num_rows)).nonzero()
        return int(bad[0]) if len(bad) else None

    def id_error(self, position: int, num_rows: int, table: str = "weight") -> IdOutOfRange:
        """The exception for a value that is not a row of a table, which it names."""
        return IdOutOfRange(
            f"table {table!r}, {self._place(position)}: id {int(self.values[position])} is not in "
            f"[0, {num_rows}); raise num_embeddings or hash the ids"
        )

    def require_numbers(self) -> None:
        """Check that no weight is nan.

        Raises:
            MalformedBags: a weight is nan.
        """
        if self.weights is None:
            return
        weights = self.weights.detach()
        is_half = weights.dtype in (torch.float16, torch.bfloat16)  # numba supports neither
        position = int(_first_nan((weights.float() if is_half else weights).numpy()))
        if position >= 0:
            raise MalformedBags(
                f"sample {self._sample(position)}: per_sample_weights must be numbers, got nan at "
                f"position {position} (id {int(self.values[position])}); check the code that "
                "computes it"
            )

    def _place(self, position: int) -> str:
        """Where a value is, for error messages."""
        bag = self._sample(position)
        if self.shape is None or len(self.shape) == 1:
            return f"sample {bag}"
        index = ", ".join(str(int(each)) for each in np.unravel_index(bag, self.shape))
        return f"input[{index}]" if index else "input"

    def _sample(self, position: int) -> int:
        return int(torch.searchsorted(self.offsets, position, right=True)) - 1


def read_bags(
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    *,
    include_last_offset: bool,
    mode: str,
    dtype: torch.dtype,
    is_deferred: bool = False,
) -> BagInput:
    """Convert and check the arguments of `nn.EmbeddingBag.forward`.

    Args:
        ids: The `input` there: 2-D for bags of equal length, or 1-D with offsets.
        offsets: Where bags begin; for 1-D ids only.
        weights: One factor per id.
        include_last_offset: Whether the last number in `offsets` is the end of the last bag.
        mode: Pooling mode.
        dtype: Dtype of the rows.
        is_deferred: Whether values are not read here, because kernels on a device check them.

    Shape:
        ids (N,) or (B, L); offsets (B,) or (B + 1,); weights as ids.

    Raises:
        MalformedBags: shapes, dtypes or offsets are invalid.
        NotImplementedError: there are weights, and the mode is not "sum".
        ValueError: a weight is nan, or the mode is unknown.
    """
    _require_plain(ids)
    if weights is not None and ids.size() != weights.size():
        raise MalformedBags(
            f"per_sample_weights must have the input's shape {tuple(ids.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {_MODES}, got {mode!r}")
    if weights is not None and mode != "sum":
        raise NotImplementedError(
            f"per_sample_weights need mode='sum', got mode={mode!r}; scale the result, or leave "
            "them out"
        )
    if weights is not None and weights.dtype != dtype:
        raise MalformedBags(
            f"per_sample_weights must be {dtype} like the rows, got {weights.dtype}; convert them"
        )
    if ids.dim() == 2:
        values, bounds = ids.reshape(-1), _even_bounds(ids, offsets)
    elif ids.dim() == 1:
        values, bounds = ids, _require_one_dimension(offsets)
        if not include_last_offset:
            bounds = torch.cat([bounds, bounds.new_full((1,), len(values))])
    else:
        raise MalformedBags(f"input must have one or two dimensions, got {ids.dim()}")
    values, bounds = _one_id_type(values, bounds)
    if is_deferred:
        _require_an_end(bounds)
        return BagInput(
            values.contiguous(),
            bounds.contiguous(),
            None if weights is None else weights.reshape(-1),
            is_one_hot=ids.dim() == 2 and ids.shape[1] == 1,
            given=(ids,) if offsets is None else (ids, offsets),
        )
    is_one_hot = len(values) == len(bounds) - 1 and bool(counts_up(bounds.numpy()))
    if not is_one_hot and ids.dim() == 1:
        end = require_bounds(bounds.numpy(), len(values))
        if end != len(values):  # values after the end of the last bag are not used
            values = values[:end]
            weights = None if weights is None else weights[:end]
    bags = BagInput(
        values.contiguous(),
        bounds.contiguous(),
        None if weights is None else weights.reshape(-1),
        is_one_hot,
    )
    bags.require_numbers()
    return bags


def read_ids(ids: Tensor) -> BagInput:
    """Convert the argument of `nn.Embedding.forward` to bags of one id.

    Args:
        ids: The `input` there.

    Shape:
        ids any shape, with N elements.

    Raises:
        MalformedBags: `ids` is nested, or neither int64 nor int32.
    """
    _require_plain(ids)
    _require_id_type(ids)
    bounds = torch.arange(ids.numel() + 1, dtype=ids.dtype, device=ids.device)
    return BagInput(ids.reshape(-1), bounds, None, is_one_hot=True, shape=ids.shape)


def _require_plain(ids: Tensor) -> None:
    if ids.is_nested:
        raise MalformedBags(
            "input must be a plain tensor, got a nested one; pass its values(), and to a bag also "
            "its offsets()"
        )


def _require_id_type(ids: Tensor) -> None:
    if ids.dtype not in _ID_TYPES:
        raise MalformedBags(f"input must be int64 or int32, got {ids.dtype}; convert it by .long()")


def _even_bounds(ids: Tensor, offsets: Tensor | None) -> Tensor:
    num_bags, length = ids.shape
    if offsets is not None:
        raise MalformedBags(
            f"input of shape {tuple(ids.shape)} has one bag per row, so offsets must be None; "
            "flatten the input, or leave offsets out"
        )
    if length == 0:
        raise MalformedBags(
            f"input of shape {tuple(ids.shape)} has no ids; pass empty bags as a 1-D input with "
            "offsets"
        )
    _require_id_type(ids)
    return torch.arange(0, num_bags * length + 1, length, dtype=ids.dtype, device=ids.device)


def _require_one_dimension(offsets: Tensor | None) -> Tensor:
    if offsets is None or offsets.dim() != 1:
        found = "None" if offsets is None else f"{offsets.dim()} dimensions"
        raise MalformedBags(f"a 1-D input needs 1-D offsets, got {found}; pass where bags begin")
    return offsets


def _one_id_type(values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to the larger of their two dtypes."""
    if values.dtype == bounds.dtype and values.dtype in _ID_TYPES:
        return values, bounds
    both = torch.promote_types(values.dtype, bounds.dtype)
    if both not in _ID_TYPES:
        raise MalformedBags(
            f"input and offsets must be int64 or int32, got {values.dtype} and {bounds.dtype}; "
            "convert them by .long()"
        )
    return values.to(both), bounds.to(both)


def _require_an_end(bounds: Tensor | NDArray[Any]) -> None:
    if not len(bounds):
        raise MalformedBags("with include_last_offset, offsets must not be empty; pass at least 0")


def require_bounds(
    bounds: NDArray[Any], num_values: int, place: Callable[[int], str] = "sample {}".format
) -> int:
    """Check that offsets begin at 0, do not decrease and do not exceed the number of values.

    Args:
        bounds: Where each bag begins, and where the last one ends.
        num_values: Number of values.
        place: Formats a bag's number for the error message.

    Returns:
        The end of the last bag.

    Raises:
        MalformedBags: the offsets are invalid.
    """
    _require_an_end(bounds)
    bad = int(_first_bad_bound(bounds, num_values))
    if bad < 0:
        return int(bounds[-1])
    if bad == 0:
        rule = f"offsets[0] must be 0, got {bounds[0]}; add a bag for the ids before the first one"
    elif bounds[bad] > num_values:
        rule = (
            f"{place(bad - 1)}: offsets must not exceed the input's length {num_values}, got "
            f"{bounds[bad]}; cut the offsets to the input"
        )
    else:
        rule = (
            f"{place(bad - 1)}: offsets must not decrease, got {bounds[bad]} after "
            f"{bounds[bad - 1]}; sort the bags"
        )
    raise MalformedBags(rule)


def require_same_device(values: Tensor, device: torch.device) -> None:
    """Check that ids are on the device where rows are looked up.

    Raises:
        ValueError: they are not.
    """
    if values.device != device:
        raise ValueError(
            f"ids must be on the device where rows are looked up, {device}, got {values.device}; "
            f"move them by .to('{device}')"
        )


def are_bounds(bounds: NDArray[Any], num_values: int) -> bool:
    """Whether offsets begin at 0, do not decrease, and end at the number of values."""
    return bounds[-1] == num_values and _first_bad_bound(bounds, num_values) < 0


@kernel
def _first_bad_bound(bounds: NDArray[Any], num_values: int) -> int:
    """The first invalid bound: not 0 at the start, decreasing, or too large; -1 if none is."""
    last = np.int64(0)
    for number in range(len(bounds)):
        bound = np.int64(bounds[number])
        if bound < last or bound > num_values or (number == 0 and bound != 0):
            return number
        last = bound
    return -1


@kernel
def _first_nan(weights_N: NDArray[Any]) -> int:
    for number in range(len(weights_N)):
        if np.isnan(weights_N[number]):
            return number
    return -1
