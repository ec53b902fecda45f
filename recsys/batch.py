"""Mini-batches, the sources they are read from, and the result of a lookup.

`JaggedIds` and `PooledEmbeddings` are the light counterparts of TorchRec's `KeyedJaggedTensor` and
`KeyedTensor`: the same layout and method names, without the dependency. Modules accept either.

    keys    = ["cat_0", "cat_1"]          batch of 3 samples
    values  = [4, 9, 9 | 0, 2]            the rows of cat_0, then those of cat_1
    offsets = [0, 1, 3, 3, 4, 4, 5]       bag (f, b) begins at offsets[f * B + b]

               sample 0   sample 1   sample 2
    cat_0      [4]        [9, 9]     []
    cat_1      [0]        []         [2]

Shape letters: B samples, F features, I dense features, N lookups, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from recsys.errors import MalformedBags, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "Batch",
    "Features",
    "JaggedIds",
    "Pooled",
    "PooledEmbeddings",
    "SampleSource",
    "expand_to_one_batch_size",
    "places_of_samples",
    "require_one_batch_size",
    "varies_in_batch_size",
]


class Features(Protocol):
    """Sparse input of a module: `JaggedIds` or TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> list[str]:
        """Feature names, in order."""

    def values(self) -> Tensor:
        """Rows, (N,), feature by feature."""

    def offsets(self) -> Tensor:
        """Where each bag starts, (F * B + 1,)."""

    def weights_or_none(self) -> Tensor | None:
        """One weight per lookup, (N,), or None."""

    def stride(self) -> int:
        """B, the number of samples."""


class Pooled(Protocol):
    """Result of a lookup: `PooledEmbeddings` or TorchRec's `KeyedTensor`."""

    def keys(self) -> list[str]:
        """Feature names, in order."""

    def values(self) -> Tensor:
        """Pooled vectors side by side, (B, sum of dims)."""

    def to_dict(self) -> dict[str, Tensor]:
        """Vectors by feature name, (B, D) each."""


class SampleSource(Protocol):
    """A sequence of labelled samples with dense and categorical features.

    A source that holds its rows in one array may offer it as `sparse`, (num_samples, F) int32. Then
    lookups are counted in that array, and `read` is not called.
    """

    @property
    def num_samples(self) -> int:
        """Samples in all splits together."""

    @property
    def num_dense(self) -> int:
        """I, the number of dense features."""

    @property
    def table_sizes(self) -> dict[str, int]:
        """`num_embeddings` by categorical feature, in column order."""

    @property
    def splits(self) -> dict[str, range]:
        """The sample numbers of "train", "test" and "validation"."""

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Several threads may call it at once.

        Shape:
            samples (B,) in [0, num_samples); result: dense_features (B, I) float32,
            sparse_features with one int64 lookup per feature and sample, labels (B,) float32.
        """

    @property
    def fingerprint(self) -> str:
        """Equal for sources with equal samples under equal numbers, different for all others."""

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record; JSON types only."""


def varies_in_batch_size(features: object) -> bool:
    """Whether the features of a `KeyedJaggedTensor` have different batch sizes."""
    varies = getattr(features, "variable_stride_per_key", None)
    inverse = getattr(features, "inverse_indices_or_none", None)
    return (varies is not None and varies()) or (inverse is not None and inverse() is not None)


def require_one_batch_size(features: object) -> None:
    """Refuse a `KeyedJaggedTensor` whose features have different batch sizes.

    Raises:
        ValueError: the batch sizes differ.
    """
    if varies_in_batch_size(features):
        raise ValueError(
            "features with different batch sizes (variable_stride_per_key, inverse_indices) are "
            "not supported here; expand them to one batch size"
        )


def expand_to_one_batch_size(features: KeyedJaggedTensor) -> JaggedIds:
    """Repeat bags that several samples share, so that every feature has one bag per sample.

    In a `KeyedJaggedTensor` whose features have different batch sizes, `inverse_indices` says which
    bag belongs to which sample. The result holds copies of the values.

    Raises:
        ValueError: there are no `inverse_indices`, or they lack a feature.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "features with different batch sizes need inverse_indices, which say which bag "
            f"belongs to which sample; stride_per_key is {features.stride_per_key()}"
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
    places, expanded = _places_of_bags(offsets, bags)
    weights = features.weights_or_none()
    weights = None if weights is None else weights[places]
    return JaggedIds._unchecked(keys, features.values()[places], expanded, weights)


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
    return _places_of_bags(offsets, (first_bags[:, None] + samples).flatten())


def _places_of_bags(offsets: Tensor, bags: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the values of these bags, bag by bag, and the offsets of the chosen bags."""
    begins = offsets[bags].long()
    lengths = offsets[bags + 1].long() - begins
    chosen = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(int(chosen[-1]), device=offsets.device)
    places = places + torch.repeat_interleave(begins - chosen[:-1], lengths)
    return places, chosen.to(offsets.dtype)


def _list_of_names(keys: Sequence[str]) -> list[str]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise MalformedBags(f"JaggedIds: keys must be a list of feature names, got {keys!r}")
    return list(keys)


def _require_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise MalformedBags(
                f"JaggedIds: {name} must be a torch.Tensor, got {type(value).__name__}; convert it "
                "with torch.as_tensor"
            )


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
        MalformedBags: shapes or dtypes are wrong, or (on the CPU) offsets do not ascend from 0
            to N.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys = _list_of_names(keys)
        _require_tensors(values=values, offsets=offsets)
        if weights is not None:
            _require_tensors(weights=weights)
        self._values = values
        self._offsets = offsets
        self._is_known_one_hot = False
        self._weights = weights
        if not self._keys:
            raise MalformedBags("JaggedIds: keys must name at least one feature, got none")
        if len(set(self._keys)) != len(self._keys):
            raise MalformedBags(f"JaggedIds: keys must be distinct, got {self._keys}")
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise MalformedBags(
                "JaggedIds: values must be (N,) int32 or int64, "
                f"got {tuple(values.shape)} {values.dtype}"
            )
        if offsets.dim() != 1 or offsets.dtype != values.dtype:
            raise MalformedBags(
                f"JaggedIds: offsets must be (F * B + 1,) {values.dtype} like values, "
                f"got {tuple(offsets.shape)} {offsets.dtype}"
            )
        if len(offsets) < 1 or (len(offsets) - 1) % len(self._keys):
            raise MalformedBags(
                f"JaggedIds: offsets must have F * B + 1 entries with F = {len(self._keys)}, "
                f"got {len(offsets)}"
            )
        if weights is not None and weights.shape != values.shape:
            raise MalformedBags(
                f"JaggedIds: weights must have one entry per lookup, {tuple(values.shape)}, "
                f"got {tuple(weights.shape)}"
            )
        # Reading a CUDA tensor here would synchronise the device on every batch.
        if offsets.device.type == "cpu":
            first, last = int(offsets[0]), int(offsets[-1])
            if first != 0 or last != len(values):
                raise MalformedBags(
                    f"JaggedIds: offsets must start at 0 and end at N = {len(values)}, "
                    f"got {first} and {last}"
                )
            if bool((offsets[1:] < offsets[:-1]).any()):
                bag = int((offsets[1:] < offsets[:-1]).nonzero()[0])
                raise MalformedBags(
                    f"JaggedIds: offsets must not decrease, got {int(offsets[bag])} then "
                    f"{int(offsets[bag + 1])} at feature {self._keys[bag // self.stride()]!r}, "
                    f"sample {bag % self.stride()}"
                )

    @classmethod
    def from_one_hot(cls, keys: Sequence[str], rows_FB: Tensor) -> JaggedIds:
        """One lookup per feature and sample.

        Shape:
            rows_FB (F, B) int32 or int64, else MalformedBags; not copied if contiguous.
        """
        _list_of_names(keys)
        _require_tensors(rows_FB=rows_FB)
        if rows_FB.dim() != 2 or rows_FB.shape[0] != len(keys):
            raise MalformedBags(
                f"JaggedIds: one-hot rows must be (F, B) with F = {len(keys)}, "
                f"got {tuple(rows_FB.shape)}"
            )
        offsets = torch.arange(rows_FB.numel() + 1, dtype=rows_FB.dtype, device=rows_FB.device)
        ids = cls._unchecked(keys, rows_FB.reshape(-1), offsets, None)
        ids._is_known_one_hot = True
        return ids

    def keys(self) -> list[str]:
        """Feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Rows, (N,), feature by feature."""
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
        """Whether `from_one_hot` made this. If False, every bag may still have one row."""
        return self._is_known_one_hot

    def stride(self) -> int:
        """B, the number of samples."""
        return (self._offsets.numel() - 1) // len(self._keys)  # `len` of a tensor is Python

    def __getitem__(self, key: str) -> JaggedIds:
        """The bags of one feature, or KeyError; reads two offsets on the host."""
        if key not in self._keys:
            raise KeyError(f"JaggedIds has no feature {key!r}; it has {self._keys}")
        batch_size = self.stride()
        begin = self._keys.index(key) * batch_size
        offsets = self._offsets[begin : begin + batch_size + 1]
        lookups = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if self._weights is None else self._weights[lookups]
        return JaggedIds([key], self._values[lookups], offsets - offsets[0], weights)

    def select(self, samples: Tensor) -> JaggedIds:
        """The chosen samples, in the order given; a copy.

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
        """A copy on `device`, or `self` if it is there already."""
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
        ids = self._unchecked(self._keys, change(self._values), change(self._offsets), weights)
        ids._is_known_one_hot = self._is_known_one_hot
        return ids

    @classmethod
    def _unchecked(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> JaggedIds:
        """Skip the checks, which read all offsets; for offsets that are valid by construction."""
        ids = object.__new__(cls)
        ids._keys, ids._values, ids._offsets, ids._weights = list(keys), values, offsets, weights
        ids._is_known_one_hot = False
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
            ValueError: its features have different batch sizes.
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

    Raises:
        ValueError: lengths do not fit keys or values.
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
        """The vectors of one feature, (B, D); a view. Raises KeyError for an unknown feature."""
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
    """One mini-batch; the field names are TorchRec's, so TorchRec's `DLRMTrain` accepts it too.

    Shape:
        dense_features (B, I) float32; labels (B,) float32.

    Raises:
        MalformedBags: the three parts have different numbers of samples.
    """

    dense_features: Tensor
    sparse_features: JaggedIds
    labels: Tensor

    def __post_init__(self) -> None:
        features: object = self.sparse_features
        if not isinstance(features, JaggedIds):
            return  # TorchRec's know their own rules
        num_samples = features.stride()
        for name in ("dense_features", "labels"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (num_samples,):
                shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                raise MalformedBags(
                    f"Batch: {name} must be a tensor of {num_samples} samples, as sparse_features "
                    f"has, got {shown}"
                )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def select(self, samples: Tensor) -> Batch:
        """The chosen samples, in the order given; a copy.

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
        return self._map(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def _map(self, change: Callable[[Any], Any]) -> Batch:
        return Batch(change(self.dense_features), change(self.sparse_features), change(self.labels))

    def __len__(self) -> int:
        return len(self.labels)
