"""Reads every form of input into `Bags`, and explains what is wrong with one.

Forward of each module calls it. Shapes and types are checked here, ids and offsets by the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.batch import JaggedIds, require_all_in_bags, require_one_batch_size
from recsys.embeddings.kernels.cpu.row_map import BAD_OFFSETS, LEFT_OUT
from recsys.embeddings.rows.bags import Bags
from recsys.embeddings.rows.tables import compute_dtype
from recsys.errors import IdOutOfRange, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from recsys.batch import Features
    from recsys.embeddings.rows.bags import Lookups
    from recsys.embeddings.rows.tables import TableGroup

__all__ = [
    "explain",
    "read_bag_call",
    "read_bags",
    "read_features",
    "read_ids",
    "require_features",
    "without_row",
]

CPU = torch.device("cpu")
_ID_TYPES = (torch.int64, torch.int32)


def read_bags(
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    num_samples: int,
    num_bags: int,
    dtype: torch.dtype,
    origin: torch.Size | Sequence[str] = (),
    device: torch.device = CPU,
) -> Bags:
    """The input of a lookup; the kernel checks and copies its numbers.

    Args:
        ids: N ids in any shape.
        offsets: Where bags begin, with or without the end of the last; None if all bags have the
            same number of ids.
        weights: A factor for each id, in any shape; None for 1.
        num_samples: B.
        num_bags: Bags of all features.
        dtype: That of the computation; weights are converted to it.
        origin: As for `Bags`.
        device: Where kernels run. On a GPU, they check weights, too.

    Raises:
        MalformedBags: dtypes or shapes do not fit, or a weight is nan.
    """
    if ids.device != device or (offsets is not None and offsets.device != device):
        raise MalformedBags(
            f"ids and offsets must be on {device}, where rows are looked up, got ids on "
            f"{ids.device}; move them; or if you have moved the module, build it with device= "
            "instead, or call recsys.restore and accelerate the model there"
        )
    if offsets is not None and offsets.dtype is not ids.dtype:
        both = torch.promote_types(ids.dtype, offsets.dtype)
        ids, offsets = ids.to(both), offsets.to(both)
    if ids.dtype not in _ID_TYPES:
        raise MalformedBags(f"ids must be int64 or int32, got {ids.dtype}; convert them by .long()")
    num_ids = ids.numel()
    if offsets is not None and (offsets.dim() != 1 or not 0 <= offsets.numel() - num_bags <= 1):
        raise MalformedBags(
            f"offsets must have one number for each of {num_bags} bags, and may have the end of "
            f"the last, got shape {tuple(offsets.shape)}"
        )
    if offsets is None and num_ids != num_bags and (not num_bags or num_ids % num_bags):
        raise MalformedBags(f"{num_ids} ids are not {num_bags} bags of one length; give offsets")
    if weights is not None:
        if weights.numel() != num_ids:
            raise MalformedBags(f"weights must be as many as ids, {num_ids}, got {weights.numel()}")
        weights = weights.reshape(-1).to(dtype).contiguous()
    ids, offsets = ids.contiguous(), None if offsets is None else offsets.contiguous()
    bags = Bags(ids, offsets, weights, num_samples, num_bags, origin)
    if weights is not None and ids.is_cpu and bool(weights.isnan().any()):
        position = int(weights.isnan().nonzero()[0])
        raise MalformedBags(
            f"{_location(bags, position)}: the weight of id {int(ids.reshape(-1)[position])} is "
            "nan; check the code that computes it"
        )
    return bags


def read_bag_call(
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    *,
    include_last_offset: bool,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Bags:
    """The arguments of `nn.EmbeddingBag.forward` as the bags of one feature.

    Args:
        ids: The `input` there: (B, L) for bags of equal length, or (N,) with offsets.
        offsets: Where bags begin; for one-dimensional ids only.
        weights: A factor for each id, with mode "sum".
        include_last_offset: Whether the last number in `offsets` is the end of the last bag.
        mode: "sum" or "mean".
        dtype: Of the rows.
        device: As for `read_bags`.

    Raises:
        MalformedBags: shapes or dtypes are invalid.
        NotImplementedError: there are weights, and the mode is not "sum".
    """
    if ids.is_nested:
        raise MalformedBags(
            "input must be a plain tensor, got a nested one; pass its values() and offsets()"
        )
    if weights is not None and weights.shape != ids.shape:
        raise MalformedBags(
            f"per_sample_weights must have the input's shape {tuple(ids.shape)}, got "
            f"{tuple(weights.shape)}"
        )
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
        if offsets is not None or not ids.shape[1]:
            raise MalformedBags(
                f"input of shape {tuple(ids.shape)} has one bag per row, so offsets must be None "
                "and rows must have ids; flatten the input, or leave offsets out"
            )
        num_bags = ids.shape[0]
    elif ids.dim() == 1 and offsets is not None and offsets.dim() == 1:
        num_bags = offsets.numel() - int(include_last_offset)
        if num_bags < 0:
            raise MalformedBags(
                "with include_last_offset, offsets must not be empty; pass at least 0"
            )
        # Ids after the end of the last bag are not used; on a GPU, kernels refuse them.
        if include_last_offset and ids.is_cpu:
            end = int(offsets[-1])
            if 0 <= end < ids.numel():
                ids, weights = ids[:end], None if weights is None else weights[:end]
    else:
        found = "None" if offsets is None else f"{offsets.dim()} dimensions"
        raise MalformedBags(
            "input must have two dimensions, or one with 1-D offsets, got "
            f"{ids.dim()} dimensions and offsets of {found}"
        )
    return read_bags(ids, offsets, weights, num_bags, num_bags, compute_dtype(dtype), (), device)


def read_ids(ids: Tensor, dtype: torch.dtype, device: torch.device) -> Bags:
    """The argument of `nn.Embedding.forward`, of any shape, as bags of one id.

    Raises:
        MalformedBags: the ids are nested, or neither int64 nor int32.
    """
    if ids.is_nested:
        raise MalformedBags("input must be a plain tensor, got a nested one; pass its values()")
    sizes = ids.numel(), ids.numel()
    return read_bags(ids, None, None, *sizes, compute_dtype(dtype), ids.shape, device)


def require_features(features: Iterable[str], keys: Sequence[str]) -> None:
    """Check that the input of a collection has every feature that is looked up, once.

    Args:
        features: The features that are looked up.
        keys: Those of the input; others than these features may be there several times.

    Raises:
        KeyError: a feature is missing.
        MalformedBags: a feature is there more than once.
    """
    wanted = list(dict.fromkeys(features))
    missing = [feature for feature in wanted if feature not in keys]
    if missing:
        raise KeyError(f"features {missing} are missing; the batch has {keys}")
    repeated = [feature for feature in wanted if keys.count(feature) > 1]
    if repeated:
        raise MalformedBags(
            f"features {repeated} must be in the batch once, but its keys are {keys}; give each "
            "feature a name of its own, or drop the one that is not meant"
        )


def read_features(
    features: Features, *, is_weighted: bool, dtype: torch.dtype, device: torch.device = CPU
) -> Bags:
    """The input of a collection.

    Args:
        features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.
        is_weighted: Whether each id has a weight.
        dtype: Of the rows.
        device: As for `read_bags`.

    Raises:
        MalformedBags: tensors do not fit together, or weights are missing or nan.
        ValueError: features have different batch sizes.
    """
    keys, values, weights = features.keys(), features.values(), None
    if isinstance(features, JaggedIds):
        if (
            features.is_known_one_hot() and not is_weighted and values.device == device
        ):  # nothing to check
            size = values.numel()
            return Bags(values.contiguous(), None, None, size // len(keys), size, keys)
        offsets = None if features.is_known_one_hot() else features.offsets()
    else:
        require_one_batch_size(features)
        offsets = features.offsets()
        _require_consistent(features)
    if is_weighted:
        weights = features.weights_or_none()
        if weights is None:
            raise MalformedBags("is_weighted=True needs a weight for each id; the input has none")
    sizes = features.stride(), features.stride() * len(keys)
    return read_bags(values, offsets, weights, *sizes, compute_dtype(dtype), keys, device)


def _require_consistent(features: Any) -> None:
    """Check a `KeyedJaggedTensor` as its own class does not.

    Raises:
        MalformedBags: lengths, offsets and values contradict each other.
    """
    keys, size = features.keys(), features.stride()
    values, offsets = features.values(), features.offsets()
    if offsets.dtype not in _ID_TYPES or len(offsets) != len(keys) * size + 1:
        raise MalformedBags(
            f"{len(keys)} features of {size} samples need {len(keys) * size + 1} offsets of int64 "
            f"or int32, got {len(offsets)} of {offsets.dtype}"
        )
    if not offsets.is_cpu:
        return
    lengths = features.lengths_or_none() if features.offsets_or_none() is not None else None
    if lengths is not None and not torch.equal(offsets.diff(), lengths.to(offsets.dtype)):
        raise MalformedBags(
            "lengths and offsets of a KeyedJaggedTensor must say the same, got lengths "
            f"{lengths.tolist()} and offsets {offsets.tolist()}; pass one of them"
        )
    require_all_in_bags(values.numel(), int(offsets[-1]))
    by_key = features.length_per_key_or_none()
    if by_key is not None and size and offsets[::size].diff().tolist() != by_key:
        raise MalformedBags(
            "length_per_key of a KeyedJaggedTensor must be the sum of each feature's lengths, "
            f"{offsets[::size].diff().tolist()}, got {by_key}; leave it out"
        )


def without_row(bags: Bags, row: int) -> Bags:
    """The same bags without the lookups of one row."""
    ids, offsets, weights, num_samples, num_bags, _ = bags
    if not ids.is_cpu:
        return bags._replace(ids=ids.masked_fill(ids == row, LEFT_OUT))
    is_kept = ids.reshape(-1) != row
    if bool(is_kept.all()):
        return bags
    if offsets is not None and len(offsets):
        are_good = int(offsets[0]) == 0 and bool((offsets.diff() >= 0).all())
        end = int(offsets[-1])
        if not are_good or end > ids.numel() or (len(offsets) > num_bags and end < ids.numel()):
            return bags  # the lookup refuses it
    ends = torch.cat([is_kept.new_zeros(1, dtype=ids.dtype), is_kept.cumsum(0, dtype=ids.dtype)])
    if offsets is None:
        length = ids.numel() // num_bags
        offsets = torch.arange(0, ids.numel() + 1, length, dtype=ids.dtype)
    return Bags(
        ids.reshape(-1)[is_kept],
        ends[offsets.long()],
        None if weights is None else weights[is_kept],
        num_samples,
        num_bags,
    )


def explain(group: TableGroup, lookups: Lookups, bags: Bags, code: int) -> Exception:
    """The error for a code that a lookup kernel returned."""
    if code == BAD_OFFSETS:
        return MalformedBags(
            f"offsets must ascend from 0 to the number of ids, {bags.ids.numel()}, got "
            f"{_bad_offset(bags)}"
        )
    value = int(bags.ids.reshape(-1)[code])
    for table, position, _ in lookups.locations:
        first, end = _ids_of_feature(bags, position)
        if first <= code < end and not 0 <= value < group.sizes[table]:
            return IdOutOfRange(
                f"table {group.names[table]!r}, {_location(bags, code)}: id {value} is "
                f"not in [0, {group.sizes[table]}); raise num_embeddings or hash the ids"
            )
    raise AssertionError("the kernel refused a row that exists")


def _ids_of_feature(bags: Bags, position: int) -> tuple[int, int]:
    """The range of ids of a feature."""
    first, end = position * bags.num_samples, (position + 1) * bags.num_samples
    if bags.offsets is None:
        length = bags.ids.numel() // max(bags.num_bags, 1)
        return first * length, end * length
    bounds = [*bags.offsets.tolist(), bags.ids.numel()]
    return bounds[first], bounds[end]


def _bad_offset(bags: Bags) -> str:
    """The first offset that does not ascend."""
    assert bags.offsets is not None
    offsets = bags.offsets
    floor = torch.nn.functional.pad(offsets, (1, 0))[:-1]
    is_bad = (offsets < floor) | (offsets > bags.ids.numel())
    is_bad[:1] |= offsets[:1] != 0
    is_bad[bags.num_bags :] |= offsets[bags.num_bags :] != bags.ids.numel()
    position = int(is_bad.int().argmax())
    of_bag = f", where {_name(bags, position)} begins" if position < bags.num_bags else ""
    return f"offsets[{position}] = {int(offsets[position])} after {int(floor[position])}{of_bag}"


def _location(bags: Bags, code: int) -> str:
    """Where an id is, for errors."""
    if isinstance(bags.origin, torch.Size) and len(bags.origin) != 1:
        index = ", ".join(
            str(int(coordinate)) for coordinate in np.unravel_index(code, bags.origin)
        )
        return f"input[{index}]" if index else "input"
    if bags.offsets is None:
        return _name(bags, code // max(bags.ids.numel() // bags.num_bags, 1))
    return _name(bags, int(torch.searchsorted(bags.offsets, code, right=True)) - 1)


def _name(bags: Bags, bag: int) -> str:
    """The name of a bag, for errors."""
    position, sample = divmod(bag, bags.num_samples)
    is_named = not isinstance(bags.origin, torch.Size) and len(bags.origin) > 0
    return f"feature {bags.origin[position]!r}, sample {sample}" if is_named else f"sample {sample}"
