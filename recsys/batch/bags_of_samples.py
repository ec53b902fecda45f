"""Where the bags of samples are in jagged data, and whether each sample has one bag per feature."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.errors import MalformedBags

__all__ = [
    "places_of_samples",
    "require_all_in_bags",
    "require_one_batch_size",
]


def require_one_batch_size(features: object) -> None:
    """Refuse a `KeyedJaggedTensor` whose features have different batch sizes.

    Raises:
        ValueError: the batch sizes differ, or samples share bags by `inverse_indices`.
    """
    varies = getattr(features, "variable_stride_per_key", None)
    inverse = getattr(features, "inverse_indices_or_none", None)
    if (varies is not None and varies()) or (inverse is not None and inverse() is not None):
        raise ValueError(
            "features must have one batch size, got a KeyedJaggedTensor with "
            "stride_per_key_per_rank or inverse_indices; repeat the bags that samples share"
        )


def require_all_in_bags(num_values: int, end: int) -> None:
    """Refuse a `KeyedJaggedTensor` with values after the last bag, as TorchRec does.

    Args:
        num_values: Number of its values.
        end: The end of its last bag.

    Raises:
        MalformedBags: there are more values.
    """
    if num_values > end:
        raise MalformedBags(
            f"lengths must add up to the number of values, {num_values}, got {end}; correct the "
            f"lengths, or pass values()[:{end}]"
        )


def places_of_samples(offsets: Tensor, batch_size: int, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the values of chosen samples, for F features.

    Args:
        offsets: Where bags begin, for all samples.
        batch_size: B.
        samples: The chosen samples, in any order.

    Shape:
        offsets (F * B + 1,); samples (M,) int64; results: positions (N',) int64, feature by
        feature, and the offsets of the chosen bags (F * M + 1,).
    """
    num_features = (len(offsets) - 1) // batch_size if batch_size else 0
    first_bags = torch.arange(num_features, device=offsets.device) * batch_size
    bags = (first_bags[:, None] + samples).flatten()
    begins = offsets[bags].long()
    lengths = offsets[bags + 1].long() - begins
    chosen = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = torch.arange(int(chosen[-1]), device=offsets.device)
    positions = positions + torch.repeat_interleave(begins - chosen[:-1], lengths)
    return positions, chosen.to(offsets.dtype)
