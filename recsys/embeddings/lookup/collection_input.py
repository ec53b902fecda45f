"""Checks the input of a collection, and describes the place of an invalid id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.batch import require_all_in_bags, require_one_batch_size
from recsys.embeddings.rows.bag_input import require_bounds
from recsys.errors import IdOutOfRange, MalformedBags

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recsys.batch import Features

__all__ = [
    "id_error",
    "place_of",
    "require_bags",
    "require_features",
    "require_weights",
]


def require_features(features: Iterable[str], keys: Sequence[str]) -> None:
    """Check that the input has every feature that is looked up, once.

    Args:
        features: The features that are looked up.
        keys: The keys of the input. Others than these features may be there several times.

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


def require_bags(features: KeyedJaggedTensor, weights: Tensor | None, is_deferred: bool) -> None:
    """Check a `KeyedJaggedTensor` as its own class does not.

    Args:
        features: The input.
        weights: Its weights, if the lookup uses them.
        is_deferred: Whether kernels on a device check offsets later; then they are not read here.
            Those kernels do not look up values after the last bag, and do not refuse them.

    Raises:
        MalformedBags: its tensors do not fit together.
        ValueError: features have different batch sizes.
    """
    require_one_batch_size(features)
    is_given_offsets = features.offsets_or_none() is not None
    values, offsets, keys = features.values(), features.offsets(), features.keys()
    if values.dtype not in (torch.int32, torch.int64) or offsets.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise MalformedBags(
            f"values and offsets must be int64 or int32, got {values.dtype} and {offsets.dtype}"
        )
    batch_size = features.stride()
    if len(offsets) != len(keys) * batch_size + 1:
        raise MalformedBags(
            f"{len(keys)} features of {batch_size} samples need {len(keys) * batch_size + 1} "
            f"offsets, got {len(offsets)}"
        )
    if weights is not None and len(weights) != len(values):
        raise MalformedBags(f"{len(values)} values need as many weights, got {len(weights)}")
    if is_deferred:
        return

    def place(bag: int) -> str:
        return f"feature {keys[bag // batch_size]!r}, sample {bag % batch_size}"

    bounds = offsets.numpy()
    require_all_in_bags(len(values), require_bounds(bounds, len(values), place))
    lengths = features.lengths_or_none() if is_given_offsets else None
    if lengths is not None and not np.array_equal(np.diff(bounds), lengths.numpy()):
        raise MalformedBags(
            "lengths and offsets of a KeyedJaggedTensor must say the same, got lengths "
            f"{lengths.numpy()} and offsets {bounds}; pass one of them"
        )
    length_per_key = features.length_per_key_or_none()
    if length_per_key is not None and batch_size:
        own = np.diff(bounds[::batch_size]).tolist()
        if own != length_per_key:
            raise MalformedBags(
                "length_per_key of a KeyedJaggedTensor must be the sum of each feature's lengths, "
                f"{own}, got {length_per_key}; leave it out"
            )


def require_weights(features: Features, is_deferred: bool) -> Tensor:
    """The weights of all lookups.

    Args:
        features: The input.
        is_deferred: As for `require_bags`.

    Raises:
        MalformedBags: there are no weights, or one is nan.
    """
    weights = features.weights_or_none()
    if weights is None:
        raise MalformedBags(
            "is_weighted=True needs one weight per lookup, and the features have none"
        )
    if not is_deferred and weights.isnan().any():
        value = int(weights.isnan().nonzero()[0])
        raise MalformedBags(
            f"{place_of(features, value)}: the weight of id {int(features.values()[value])} "
            "is nan; every lookup needs a number"
        )
    return weights


def id_error(
    features: Features, lookups: Sequence[tuple[int, str]], sizes: Sequence[int], value: int
) -> IdOutOfRange:
    """The error for an invalid id.

    Args:
        features: The input.
        lookups: The table and the feature of each lookup.
        sizes: E of every table.
        value: Position of the id in `features.values()`.
    """
    bag = int(torch.searchsorted(features.offsets(), value, right=True)) - 1
    feature = features.keys()[bag // features.stride()]
    num_rows = min(sizes[table] for table, name in lookups if name == feature)
    return IdOutOfRange(
        f"{place_of(features, value)}: id {int(features.values()[value])} is not in "
        f"[0, {num_rows}); raise num_embeddings or hash the ids"
    )


def place_of(features: Features, value: int) -> str:
    """A value's feature and sample, for error messages."""
    bag = int(torch.searchsorted(features.offsets(), value, right=True)) - 1
    batch_size = features.stride()
    return f"feature {features.keys()[bag // batch_size]!r}, sample {bag % batch_size}"
