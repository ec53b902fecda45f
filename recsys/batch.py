"""What one mini-batch is made of: dense features, jagged ids, labels; and what a lookup returns.

`JaggedIds` and `PooledEmbeddings` are the light counterparts of TorchRec's `KeyedJaggedTensor` and
`KeyedTensor`: the same layout, the methods that lookups and models need under the same names, and
no dependency. Modules here take either.

    keys    = ["cat_0", "cat_1"]          batch of 3 samples
    values  = [4, 9, 9 | 0, 2]            the rows of cat_0, then those of cat_1
    offsets = [0, 1, 3, 3, 4, 4, 5]       bag (f, b) begins at offsets[f * B + b]

               sample 0   sample 1   sample 2
    cat_0      [4]        [9, 9]     []
    cat_1      [0]        []         [2]

Shape letters: B samples, F features, N lookups, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from recsys.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "Batch",
    "Features",
    "JaggedIds",
    "Pooled",
    "PooledEmbeddings",
    "expand_to_one_batch_size",
    "places_of_samples",
    "require_one_batch_size",
    "varies_in_batch_size",
]


class Features(Protocol):
    """What modules ask of sparse input: `JaggedIds` and TorchRec's `KeyedJaggedTensor` have it."""

    def keys(self) -> list[str]:
        """Feature names, in order."""

    def values(self) -> Tensor:
        """Rows, (N,), key by key."""

    def offsets(self) -> Tensor:
        """Where each bag starts, (F * B + 1,)."""

    def weights_or_none(self) -> Tensor | None:
        """One weight per lookup, (N,), or None."""

    def stride(self) -> int:
        """B, the number of samples."""


class Pooled(Protocol):
    """What models ask of a lookup: `PooledEmbeddings` and TorchRec's `KeyedTensor` have it."""

    def keys(self) -> list[str]:
        """Feature names, in order."""

    def values(self) -> Tensor:
        """Pooled vectors side by side, (B, sum of dims)."""

    def to_dict(self) -> dict[str, Tensor]:
        """Vectors by feature name, (B, D) each."""


def varies_in_batch_size(features: object) -> bool:
    """Whether features of a `KeyedJaggedTensor` have batch sizes of their own."""
    varies = getattr(features, "variable_stride_per_key", None)
    inverse = getattr(features, "inverse_indices_or_none", None)
    return (varies is not None and varies()) or (inverse is not None and inverse() is not None)


def require_one_batch_size(features: object) -> None:
    """Refuse a `KeyedJaggedTensor` whose features have batch sizes of their own.

    Raises:
        ValueError: they do.
    """
    if varies_in_batch_size(features):
        raise ValueError(
            "features with batch sizes of their own (variable_stride_per_key, inverse_indices) are "
            "not supported here; expand them to one batch size"
        )


def expand_to_one_batch_size(features: KeyedJaggedTensor) -> JaggedIds:
    """Every feature's bags as often as the samples of the mini-batch use them.

    A `KeyedJaggedTensor` of features with batch sizes of their own says in `inverse_indices` which
    bag belongs to which sample. Values that several samples share are copied for each.

    Raises:
        ValueError: there are no `inverse_indices`, or they lack a feature.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "features with batch sizes of their own need inverse_indices, which say what bag "
            f"belongs to what sample; stride_per_key is {features.stride_per_key()}"
        )
    keys, (known, bag_of_FB) = features.keys(), inverse
    missing = [key for key in keys if key not in known]
    if missing:
        raise ValueError(f"inverse_indices lack features {missing}; they have {list(known)}")
    offsets = features.offsets()
    device, first_bags = offsets.device, [0, *features.stride_per_key()[:-1]]
    rows = torch.tensor([list(known).index(key) for key in keys], device=device)
    starts = torch.tensor(first_bags, device=device).cumsum(0)
    bags = (bag_of_FB[rows].long() + starts.unsqueeze(1)).flatten()
    begins, lengths = offsets[bags], offsets[bags + 1] - offsets[bags]
    expanded = torch.cat([offsets.new_zeros(1), lengths.cumsum(0).to(offsets.dtype)])
    of_values = torch.arange(int(expanded[-1]), device=device) + torch.repeat_interleave(
        begins - expanded[:-1], lengths
    )
    weights = features.weights_or_none()
    return JaggedIds._unchecked(
        keys,
        features.values()[of_values],
        expanded,
        None if weights is None else weights[of_values],
    )


def places_of_samples(offsets: Tensor, batch_size: int, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of some samples are among those of F features.

    Args:
        offsets: Where bags begin.
        batch_size: B.
        samples: Which, in any order.

    Returns:
        Places of values, (N',) int64, feature by feature, and where bags begin among them, (F * M +
        1,), of the offsets' dtype.

    Shape:
        offsets (F * B + 1,); samples (M,) int64.
    """
    num_features = (len(offsets) - 1) // batch_size if batch_size else 0
    first_bags = torch.arange(num_features, device=offsets.device) * batch_size
    bags = (first_bags[:, None] + samples).flatten()
    begins = offsets[bags].long()
    lengths = offsets[bags + 1].long() - begins
    ends = lengths.cumsum(0)
    chosen = torch.nn.functional.pad(ends, (1, 0))
    places = torch.arange(int(chosen[-1]), device=offsets.device)
    places = places + torch.repeat_interleave(begins - chosen[:-1], lengths)
    return places, chosen.to(offsets.dtype)


class JaggedIds:
    """Rows to look up, for F features and B samples.

    Args:
        keys: Feature names, distinct.
        values: Rows, key-major.
        offsets: Bag boundaries, key-major; `offsets[0] == 0` and `offsets[-1] == N`.
        weights: One weight per lookup, or None.

    Shape:
        values (N,) int32 or int64; offsets (F * B + 1,) of the same dtype; weights (N,) floating
        point.

    Raises:
        ValueError: shapes, dtypes or (on the CPU) the offsets are not as above.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
    ) -> None:
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets
        self._is_known_one_hot = False
        self._weights = weights
        if not self._keys:
            raise ValueError("JaggedIds: keys must name at least one feature, got none")
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"JaggedIds: keys must be distinct, got {self._keys}")
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "JaggedIds: values must be (N,) int32 or int64, "
                f"got {tuple(values.shape)} {values.dtype}"
            )
        if offsets.dim() != 1 or offsets.dtype != values.dtype:
            raise ValueError(
                f"JaggedIds: offsets must be (F * B + 1,) {values.dtype} like values, "
                f"got {tuple(offsets.shape)} {offsets.dtype}"
            )
        if len(offsets) < 1 or (len(offsets) - 1) % len(self._keys):
            raise ValueError(
                f"JaggedIds: offsets must have F * B + 1 entries with F = {len(self._keys)}, "
                f"got {len(offsets)}"
            )
        if weights is not None and weights.shape != values.shape:
            raise ValueError(
                f"JaggedIds: weights must have one entry per lookup, {tuple(values.shape)}, "
                f"got {tuple(weights.shape)}"
            )
        # Reading a CUDA tensor here would synchronise the device on every batch.
        if offsets.device.type == "cpu":
            first, last = int(offsets[0]), int(offsets[-1])
            if first != 0 or last != len(values):
                raise ValueError(
                    f"JaggedIds: offsets must start at 0 and end at N = {len(values)}, "
                    f"got {first} and {last}"
                )
            if bool((offsets[1:] < offsets[:-1]).any()):
                bag = int((offsets[1:] < offsets[:-1]).nonzero()[0])
                raise ValueError(
                    f"JaggedIds: offsets must not decrease, got {int(offsets[bag])} then "
                    f"{int(offsets[bag + 1])} at feature {self._keys[bag // self.stride()]!r}, "
                    f"sample {bag % self.stride()}"
                )

    @classmethod
    def from_one_hot(cls, keys: Sequence[str], rows_FB: Tensor) -> JaggedIds:
        """One lookup per feature and sample.

        Shape:
            rows_FB (F, B) int32 or int64, contiguous (then nothing is copied).
        """
        if rows_FB.dim() != 2 or rows_FB.shape[0] != len(keys):
            raise ValueError(
                f"JaggedIds: one-hot rows must be (F, B) with F = {len(keys)}, "
                f"got {tuple(rows_FB.shape)}"
            )
        offsets = torch.arange(rows_FB.numel() + 1, dtype=rows_FB.dtype, device=rows_FB.device)
        return cls._unchecked(keys, rows_FB.reshape(-1), offsets, None, is_known_one_hot=True)

    def keys(self) -> list[str]:
        """Feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Rows, (N,), key by key."""
        return self._values

    def offsets(self) -> Tensor:
        """Bag boundaries, (F * B + 1,)."""
        return self._offsets

    def lengths(self) -> Tensor:
        """Bag sizes, (F * B,)."""
        return self._offsets[1:] - self._offsets[:-1]

    def weights_or_none(self) -> Tensor | None:
        """Lookup weights, (N,), or None."""
        return self._weights

    def is_known_one_hot(self) -> bool:
        """Whether they come from `from_one_hot`; others may have one row per bag all the same."""
        return self._is_known_one_hot

    def stride(self) -> int:
        """B, the number of samples."""
        return (self._offsets.numel() - 1) // len(self._keys)  # `len` of a tensor is Python

    def __getitem__(self, key: str) -> JaggedIds:
        """The bags of one feature, its offsets starting at 0 (reads two offsets to the host)."""
        if key not in self._keys:
            raise KeyError(f"JaggedIds has no feature {key!r}; it has {self._keys}")
        batch_size = self.stride()
        begin = self._keys.index(key) * batch_size
        offsets = self._offsets[begin : begin + batch_size + 1]
        lookups = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if self._weights is None else self._weights[lookups]
        return JaggedIds([key], self._values[lookups], offsets - offsets[0], weights)

    def select(self, samples: Tensor) -> JaggedIds:
        """Some samples, in the order given; values are copied.

        Shape:
            samples (M,) int64.
        """
        batch_size, samples = self.stride(), samples.to(self._values.device)
        if self._is_known_one_hot:
            rows_FM = self._values.view(len(self._keys), batch_size)[:, samples]
            return self.from_one_hot(self._keys, rows_FM)
        places, offsets = places_of_samples(self._offsets, batch_size, samples)
        weights = None if self._weights is None else self._weights[places]
        return self._unchecked(self._keys, self._values[places], offsets, weights)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedIds:
        """A copy on `device`; itself where it is there already."""
        if self._values.device == torch.device(device):
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedIds:
        """A copy in page-locked memory, for asynchronous transfer."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses these tensors."""
        for tensor in (self._values, self._offsets, self._weights):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, change: Callable[[Tensor], Tensor]) -> JaggedIds:
        weights = None if self._weights is None else change(self._weights)
        return self._unchecked(
            self._keys,
            change(self._values),
            change(self._offsets),
            weights,
            is_known_one_hot=self._is_known_one_hot,
        )

    @classmethod
    def _unchecked(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        *,
        is_known_one_hot: bool = False,
    ) -> JaggedIds:
        """For offsets that are right by construction: checking reads all of them."""
        ids = object.__new__(cls)
        ids._keys, ids._values, ids._offsets, ids._weights = list(keys), values, offsets, weights
        ids._is_known_one_hot = is_known_one_hot
        return ids

    def to_torchrec(self) -> KeyedJaggedTensor:
        """The same tensors as a `torchrec.KeyedJaggedTensor`; nothing is copied.

        Raises:
            MissingDependency: TorchRec is not installed.
        """
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError as error:
            raise MissingDependency(
                "JaggedIds.to_torchrec needs TorchRec; install recsys[torchrec]"
            ) from error
        return KeyedJaggedTensor(
            keys=self._keys, values=self._values, offsets=self._offsets, weights=self._weights
        )

    @classmethod
    def from_torchrec(cls, features: KeyedJaggedTensor) -> JaggedIds:
        """The tensors of a `torchrec.KeyedJaggedTensor`; nothing is copied unless dtypes differ.

        Raises:
            ValueError: its features have batch sizes of their own.
        """
        require_one_batch_size(features)
        values = features.values()
        return cls(
            features.keys(), values, features.offsets().to(values.dtype), features.weights_or_none()
        )

    def __repr__(self) -> str:
        return (
            f"JaggedIds(keys={self._keys}, num_lookups={len(self._values)}, "
            f"batch_size={self.stride()}, is_weighted={self._weights is not None})"
        )


class PooledEmbeddings:
    """One pooled vector per feature and sample, side by side.

    Args:
        keys: Feature names, in column order.
        length_per_key: Columns of each feature.
        values: The vectors.

    Shape:
        values (B, sum(length_per_key)).
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        if len(self._keys) != len(self._length_per_key):
            raise ValueError(
                f"PooledEmbeddings: length_per_key must have one entry per key, got "
                f"{len(self._length_per_key)} for {len(self._keys)} keys"
            )
        if values.dim() != 2 or values.shape[1] != sum(self._length_per_key):
            raise ValueError(
                f"PooledEmbeddings: values must be (B, {sum(self._length_per_key)}), "
                f"got {tuple(values.shape)}"
            )

    def keys(self) -> list[str]:
        """Feature names, in column order."""
        return self._keys

    def values(self) -> Tensor:
        """All vectors, (B, sum of dims)."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._length_per_key

    def __getitem__(self, key: str) -> Tensor:
        """The vectors of one feature, (B, D)."""
        if key not in self._keys:
            raise KeyError(f"PooledEmbeddings has no feature {key!r}; it has {self._keys}")
        position = self._keys.index(key)
        begin = sum(self._length_per_key[:position])
        return self._values[:, begin : begin + self._length_per_key[position]]

    def to_dict(self) -> dict[str, Tensor]:
        """Vectors by feature name; views, not copies."""
        return dict(
            zip(self._keys, torch.split(self._values, self._length_per_key, dim=1), strict=True)
        )

    def __repr__(self) -> str:
        return f"PooledEmbeddings(keys={self._keys}, shape={tuple(self._values.shape)})"


@dataclass
class Batch:
    """One mini-batch, with TorchRec's field names: either library's `DLRMTrain` takes it.

    Shape:
        dense_features (B, I) float32; labels (B,) float32.
    """

    dense_features: Tensor
    sparse_features: JaggedIds
    labels: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`."""
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def select(self, samples: Tensor) -> Batch:
        """Some samples, in the order given, as a batch.

        Shape:
            samples (M,) int64.
        """
        return Batch(
            self.dense_features[samples],
            self.sparse_features.select(samples),
            self.labels[samples],
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return Batch(
            self.dense_features.pin_memory(),
            self.sparse_features.pin_memory(),
            self.labels.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def __len__(self) -> int:
        return len(self.labels)
