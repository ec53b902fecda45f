"""`JaggedIds`: the rows that several samples look up, feature by feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys._support.memory import lasting_tensors
from recsys._support.torch_compat import are_functorch_transforms_active
from recsys.batch.bags_of_samples import places_of_samples, require_one_batch_size
from recsys.errors import MalformedBags, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["JaggedIds", "cannot_import_torchrec"]


def cannot_import_torchrec(user: str, error: ImportError | OSError) -> MissingDependency:
    """The error for `user`, which needs TorchRec, if importing it raised `error`.

    A release of FBGEMM, which TorchRec imports, loads only beside the release of torch that it was
    built for; beside another one its import raises OSError, and not ImportError.
    """
    if isinstance(error, ImportError):
        return MissingDependency(
            f"{user} needs TorchRec, which is not installed ({error}); install it by "
            "pip install 'recsys[torchrec]'"
        )
    return MissingDependency(
        f"{user} needs TorchRec, and its FBGEMM does not load beside torch {torch.__version__} "
        f"({error}); install releases of torch, torchrec and fbgemm-gpu that belong together: "
        "README, 'Installing'"
    )


def _list_of_names(keys: Sequence[str]) -> list[str]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise MalformedBags(f"JaggedIds: keys must be a list of feature names, got {keys!r}")
    if len(set(keys)) != len(keys):
        raise MalformedBags(f"JaggedIds: keys must be distinct, got {list(keys)}")
    if not keys:
        raise MalformedBags("JaggedIds: keys must name at least one feature, got none")
    return list(keys)


def _require_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise MalformedBags(
                f"JaggedIds: {name} must be a torch.Tensor, got {type(value).__name__}; convert it "
                "with torch.as_tensor"
            )


def _outlasts_its_context(made: Tensor) -> bool:
    """Whether a tensor made now has its numbers after what torch traces or captures."""
    return not (
        torch.compiler.is_compiling()
        or are_functorch_transforms_active()
        or (made.is_cuda and torch.cuda.is_current_stream_capturing())  # filled by replays alone
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
        self._offsets: Tensor | None = offsets  # None until asked for, if known to count up
        self._is_known_one_hot = False
        self._weights = weights
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
        if weights is not None and not weights.is_floating_point():
            raise MalformedBags(
                f"JaggedIds: weights must be floating point, got {weights.dtype}; convert them "
                "with .float()"
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

        Args:
            keys: Names of the features.
            rows_FB: Rows of every feature, sample by sample; not copied if contiguous.

        Shape:
            rows_FB (F, B) int32 or int64.

        Raises:
            MalformedBags: `rows_FB` is no tensor (F, B) of these dtypes, or the names are no list
                of texts, not distinct, or none.
        """
        _list_of_names(keys)
        _require_tensors(rows_FB=rows_FB)
        if rows_FB.dim() != 2 or rows_FB.shape[0] != len(keys):
            raise MalformedBags(
                f"JaggedIds: one-hot rows must be (F, B) with F = {len(keys)}, "
                f"got {tuple(rows_FB.shape)}"
            )
        if rows_FB.dtype not in (torch.int32, torch.int64):
            raise MalformedBags(
                f"JaggedIds: one-hot rows must be int32 or int64, got {rows_FB.dtype}; convert "
                "them with .long()"
            )
        return cls._unchecked_one_hot(keys, rows_FB)

    def keys(self) -> list[str]:
        """Feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Rows, (N,), feature by feature."""
        return self._values

    def offsets(self) -> Tensor:
        """Bag boundaries, (F * B + 1,)."""
        if self._offsets is not None:
            return self._offsets
        rows = self._values
        with lasting_tensors():
            offsets = torch.arange(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
        if _outlasts_its_context(offsets):
            self._offsets = offsets
        return offsets

    def lengths(self) -> Tensor:
        """Bag sizes, (F * B,)."""
        return self.offsets()[1:] - self.offsets()[:-1]

    def weights_or_none(self) -> Tensor | None:
        """Lookup weights, (N,), or None."""
        return self._weights

    def is_known_one_hot(self) -> bool:
        """Whether `from_one_hot` made this. If False, every bag may still have one row."""
        return self._is_known_one_hot

    def stride(self) -> int:
        """B, the number of samples."""
        if self._is_known_one_hot:
            return self._values.numel() // len(self._keys)  # `len` of a tensor is Python
        return (self.offsets().numel() - 1) // len(self._keys)

    def __getitem__(self, key: str) -> JaggedIds:
        """The bags of one feature, or KeyError; reads two offsets on the host."""
        if key not in self._keys:
            raise KeyError(f"JaggedIds has no feature {key!r}; it has {self._keys}")
        batch_size = self.stride()
        begin = self._keys.index(key) * batch_size
        offsets = self.offsets()[begin : begin + batch_size + 1]
        lookups = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if self._weights is None else self._weights[lookups]
        return JaggedIds([key], self._values[lookups], offsets - offsets[0], weights)

    def select(self, samples: Tensor) -> JaggedIds:
        """The chosen samples, in the order given; a copy.

        Shape:
            samples (M,) int32 or int64.

        Raises:
            MalformedBags: `samples` are of another shape or dtype.
        """
        if samples.dim() != 1 or samples.dtype not in (torch.int32, torch.int64):
            raise MalformedBags(
                "JaggedIds.select: samples must be numbers, (M,) int32 or int64, got "
                f"{tuple(samples.shape)} {samples.dtype}; of a mask, give mask.nonzero()[:, 0]"
            )
        batch_size, samples = self.stride(), samples.to(self._values.device)
        if self._is_known_one_hot:
            rows_FM = self._values.view(len(self._keys), batch_size).index_select(1, samples)
            return self._unchecked_one_hot(self._keys, rows_FM)
        positions, offsets = places_of_samples(self.offsets(), batch_size, samples)
        weights = None if self._weights is None else self._weights[positions]
        return self._unchecked(self._keys, self._values[positions], offsets, weights)

    @classmethod
    def concatenate(cls, parts: Sequence[JaggedIds]) -> JaggedIds:
        """The samples of several inputs with the same features, one input after the other; a copy.

        Args:
            parts: The inputs.

        Raises:
            MalformedBags: there is no input, features differ, or only some of the inputs have
                weights.
        """
        if not parts:
            raise MalformedBags("JaggedIds.concatenate: give at least one input, got none")
        keys = parts[0].keys()
        for part in parts:
            if part.keys() != keys:
                raise MalformedBags(
                    f"JaggedIds.concatenate: keys must be the same, got {keys} and {part.keys()}"
                )
        if all(part.is_known_one_hot() for part in parts):
            rows = [part.values().view(len(keys), part.stride()) for part in parts]
            return cls._unchecked_one_hot(keys, torch.cat(rows, 1))
        known = [part.weights_or_none() for part in parts]
        weights = [weight for weight in known if weight is not None]
        if weights and len(weights) < len(parts):
            raise MalformedBags(
                "JaggedIds.concatenate: only some of the inputs have weights; give all of them "
                "weights, or none"
            )
        bounds = [
            part.offsets()[:: part.stride()].tolist() if part.stride() else [0] * (len(keys) + 1)
            for part in parts
        ]

        def by_feature(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat(
                [
                    tensor[bound[feature] : bound[feature + 1]]
                    for feature in range(len(keys))
                    for tensor, bound in zip(tensors, bounds, strict=True)
                ]
            )

        values = by_feature([part.values() for part in parts])
        lengths = torch.cat([part.lengths().view(len(keys), part.stride()) for part in parts], 1)
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(values.dtype)
        return cls._unchecked(keys, values, offsets, by_feature(weights) if weights else None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedIds:
        """A copy on `device`, or `self` if it is there already.

        Args:
            device: Device of the result.
            non_blocking: Whether to return before a copy from page-locked memory is finished.
        """
        if self._values.device == torch.device(device):
            return self
        if self._is_known_one_hot:  # offsets count up
            moved = self._values.to(device, non_blocking=non_blocking)
            return self._unchecked_one_hot(self._keys, moved)
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedIds:
        """A copy in page-locked memory, for asynchronous transfer."""
        if self._is_known_one_hot:
            return self._unchecked_one_hot(self._keys, self._values.pin_memory())
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses these tensors."""
        for tensor in (self._values, self._offsets, self._weights):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, change: Callable[[Tensor], Tensor]) -> JaggedIds:
        weights = None if self._weights is None else change(self._weights)
        return self._unchecked(self._keys, change(self._values), change(self.offsets()), weights)

    @classmethod
    def _unchecked(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> JaggedIds:
        """Skip the checks, which read all offsets; for offsets that are valid by construction."""
        ids = object.__new__(cls)
        ids._keys, ids._values, ids._offsets, ids._weights = list(keys), values, offsets, weights
        ids._is_known_one_hot = False
        return ids

    @classmethod
    def _unchecked_one_hot(cls, keys: Sequence[str], rows_FB: Tensor) -> JaggedIds:
        """One value for each feature and sample, in any shape."""
        ids = cls._unchecked(keys, rows_FB.reshape(-1), None, None)
        ids._is_known_one_hot = True
        return ids

    def to_torchrec(self) -> KeyedJaggedTensor:
        """The same tensors as a `torchrec.KeyedJaggedTensor`; nothing is copied.

        Raises:
            MissingDependency: TorchRec is not installed, or does not fit this torch.
        """
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except (ImportError, OSError) as error:
            raise cannot_import_torchrec("JaggedIds.to_torchrec", error) from error
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self.lengths(),  # without them TorchRec cannot count those of no sample
            offsets=self.offsets(),
        )

    @classmethod
    def from_torchrec(cls, features: KeyedJaggedTensor) -> JaggedIds:
        """The tensors of a `torchrec.KeyedJaggedTensor`; nothing is copied unless dtypes differ.

        Args:
            features: Features of one batch size.

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
