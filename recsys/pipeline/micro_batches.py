"""Selects samples of a mini-batch as a smaller one, and joins mini-batches, or outputs of parts.

Letters: B samples in the mini-batch, M samples in a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recsys.batch import JaggedIds
from recsys.pipeline.model_tables import is_torchrec, items_of

__all__ = [
    "concatenate",
    "count_samples",
    "join_outputs",
    "labelled_samples",
    "select_samples",
    "sizes_in",
]


def count_samples(batch: Any) -> int | None:
    """B, the number of samples of a mini-batch: that of the first features or tensor in it.

    Returns:
        None if there are none.
    """
    return next(sizes_in(batch), None)


def labelled_samples(batch: Any) -> int | None:
    """B; where tensors differ in length, such as the values of bags, that of `labels`.

    Returns:
        None if there are no tensors and features.

    Raises:
        ValueError: lengths differ, and there are no `labels`.
    """
    sizes = set(sizes_in(batch))
    if len(sizes) < 2:
        return next(iter(sizes), None)
    is_mapping = isinstance(batch, Mapping)
    labels = batch.get("labels") if is_mapping else getattr(batch, "labels", None)
    if isinstance(labels, Tensor) and labels.dim():
        return len(labels)
    raise ValueError(
        f"batch_size: it is not known how many samples a {type(batch).__name__} has whose tensors "
        f"have the lengths {sorted(sizes)}; name the labels of a mini-batch `labels`, or give it "
        "the methods __len__ and select(samples)"
    )


def sizes_in(value: Any, depth: int = 0) -> Iterator[int]:
    """The number of samples by each of the features and tensors in a mini-batch, in their order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield len(value)
        return
    if isinstance(value, JaggedIds) or is_torchrec(value):
        yield int(value.stride())
        return
    if hasattr(value, "select") and hasattr(value, "__len__"):
        yield len(value)
        return
    for part in items_of(value, depth):
        yield from sizes_in(part, depth + 1)


def select_samples(
    batch: Any, samples: Tensor, batch_size: int, setting: str = "schedule=Hotline"
) -> Any:
    """Select some samples of a mini-batch; the result has the type of the mini-batch.

    Args:
        batch: A tensor, a `KeyedJaggedTensor`, an object with `select(samples)`, or a dataclass,
            dictionary, tuple or list of these.
        samples: The samples' numbers, in the order of the result.
        batch_size: B.
        setting: Why samples are selected, for errors.

    Shape:
        samples (M,) int64; tensors (B, ...).

    Raises:
        TypeError: the mini-batch contains an object of another type.
        ValueError: a tensor does not have B samples.
    """

    def select(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.dim() or len(value) != batch_size:
                raise ValueError(
                    f"{setting}: tensors of a mini-batch must be (B, ...) with B = "
                    f"{batch_size} to be split, got {tuple(value.shape)}; give the mini-batch a "
                    "method select(samples)"
                )
            return value.index_select(0, samples.to(value.device))
        if hasattr(value, "select"):
            return value.select(samples)
        if is_torchrec(value):
            return JaggedIds.from_torchrec(value).select(samples).to_torchrec()
        found = _map(select, [value])
        if found is _NOTHING:
            raise TypeError(
                f"{setting}: {type(value).__name__} of a mini-batch cannot be split; give it a "
                "method select(samples)"
            )
        return found

    return select(batch)


def concatenate(batches: Sequence[Any], setting: str) -> Any:
    """Join mini-batches of one structure into one; samples keep their order.

    Args:
        batches: Mini-batches, as for `select_samples`. An object with `select` needs a class method
            `concatenate(parts)`, too.
        setting: Why they are joined, for errors.

    Raises:
        TypeError: the mini-batches contain an object of another type.
        ValueError: a constant in them, such as a string, is not the same in all.
    """

    def join(*values: Any) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return torch.cat(values)
        if hasattr(type(first), "concatenate"):
            return type(first).concatenate(values)
        if is_torchrec(first):
            parts = [JaggedIds.from_torchrec(value) for value in values]
            return JaggedIds.concatenate(parts).to_torchrec()
        found = _map(join, values)
        if found is first and not all(_is_same(value, first) for value in values):
            raise ValueError(
                f"{setting}: {first!r} in a mini-batch must be the same in all mini-batches whose "
                "samples are joined; give the mini-batch methods select(samples) and "
                "concatenate(parts)"
            )
        if found is _NOTHING:
            raise TypeError(
                f"{setting}: {type(first).__name__} of mini-batches cannot be joined; give it a "
                "class method concatenate(parts)"
            )
        return found

    return join(*batches)


def _is_same(value: Any, first: Any) -> bool:
    return value is first or (type(value) is type(first) and value == first)


def join_outputs(
    outputs: Sequence[Any], parts: Sequence[Tensor], sums: Sequence[Tensor] | None = None
) -> Any:
    """Join the outputs of parts into the output that the model would return for the mini-batch.

    Tensors have a row for each sample. Numbers and tensors without dimensions are counts if they
    are integers, else means over samples.

    Args:
        outputs: The output of each part, all of the same structure.
        parts: The samples of each part, (M,) int64.
        sums: The loss of each part, (), if the loss is a sum over samples. Numbers that equal the
            loss in every part are then added.

    Raises:
        TypeError: the outputs contain an object of another type.
        ValueError: a tensor does not have one row for each sample.
    """
    sizes = [len(part) for part in parts]
    shares = [size / sum(sizes) for size in sizes]

    def join(*values: Any) -> Any:
        first = values[0]
        if isinstance(first, Tensor) and first.dim():
            if [len(value) for value in values] != sizes:
                raise ValueError(
                    "schedule=Hotline: an output must have a row for each sample, or be a mean "
                    f"over samples, got {tuple(first.shape)} of {sizes[0]} samples; use another "
                    "schedule"
                )
            whole = first.new_empty(sum(sizes), *first.shape[1:])
            for value, part in zip(values, parts, strict=True):
                whole[part.to(whole.device)] = value
            return whole
        if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
            if sums is not None and all(map(_are_equal, values, sums)):
                return sum(values)
            return sum(value * share for value, share in zip(values, shares, strict=True))
        if isinstance(first, Tensor) or type(first) is int:
            return sum(values)
        found = _map(join, values)
        if found is _NOTHING:
            raise TypeError(
                f"schedule=Hotline: outputs of type {type(first).__name__} of two parts cannot be "
                "joined; return tensors, or use another schedule"
            )
        return found

    return join(*outputs)


def _are_equal(value: Tensor | float, loss: Tensor) -> bool:
    # The output may contain the loss, as a tensor or as a number.
    return float(value) == float(loss)


_NOTHING = object()


def _map(change: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Apply a function to the items of containers; `_NOTHING` if the values are no containers.

    Numbers, strings and similar constants are returned unchanged.

    Args:
        change: Maps the items at one position of all values to the item of the result.
        values: Containers of the same structure.
    """
    first: Any = values[0]
    if first is None or isinstance(
        first, str | bytes | bool | int | float | torch.device | torch.dtype
    ):
        return first
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        return replace(
            first, **{name: change(*(getattr(v, name) for v in values)) for name in names}
        )
    if isinstance(first, Mapping):
        return {key: change(*(value[key] for value in values)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(change, *values))
    if isinstance(first, list | tuple):
        return type(first)(map(change, *values))
    return _NOTHING
