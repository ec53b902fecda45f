"""Checks a rank's own mini-batch before its ids go to other ranks.

Afterwards an error could name neither the rank nor the id: row-wise, TorchRec renumbers ids. Ranks
also give what they send the same dtypes and order, because none of them learns those of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.batch import require_one_batch_size
from recsys.embeddings.kernels.cpu.row_map import BAD_OFFSETS
from recsys.embeddings.lookup.inputs import explain, read_features, require_features
from recsys.embeddings.rows.bags import Lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrec import EmbeddingBagConfig

    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["InputChecks"]


class InputChecks:
    """The rules of a collection's input.

    Args:
        tables: The configs of the collection.
        is_weighted: Whether every lookup has a weight.
        needs_samples: Whether a rank must have samples.

    Attributes:
        waits_for_device: Whether ids on CUDA are checked, too, for which the host waits.
    """

    waits_for_device = False

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, is_weighted: bool, needs_samples: bool
    ) -> None:
        self._tables = _Tables(
            [table.name for table in tables], [int(table.num_embeddings) for table in tables]
        )
        self._is_weighted, self._needs_samples = is_weighted, needs_samples
        self._known_keys: list[str] | None = None  # of the last input, which have been checked
        self._lookups = [
            (number, feature)
            for number, table in enumerate(tables)
            for feature in table.feature_names
        ]
        self._limits: dict[str, int] = {}  # for each feature, the rows of its smallest table
        for number, feature in self._lookups:
            size = self._tables.sizes[number]
            self._limits[feature] = min(self._limits.get(feature, size), size)

    def check(self, features: Any) -> None:
        """Check a rank's input; without `waits_for_device`, the lookup checks ids on CUDA later.

        Args:
            features: What the model passes to the collection.

        Raises:
            IdOutOfRange: an id is not a row of its table.
            KeyError: a feature is missing.
            MalformedBags: tensors do not fit together, a weight is missing or nan, or a feature is
                there more than once.
            TypeError: it is no `KeyedJaggedTensor`.
            ValueError: features have different batch sizes, or there are no samples.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"features must be a KeyedJaggedTensor, got {type(features).__name__}")
        keys = features.keys()
        if keys != self._known_keys:
            require_features(self._limits, keys)
            self._known_keys = list(keys)
        require_one_batch_size(features)
        if self._needs_samples and not features.stride():
            raise ValueError(
                "an EmbeddingCollection needs samples on every rank: TorchRec cannot divide rows "
                "among none; leave out the mini-batch on all ranks"
            )
        if features.values().device.type != "cpu":
            if not self.waits_for_device:
                return
            features = features.to(torch.device("cpu"))
        bags = read_features(features, is_weighted=self._is_weighted, dtype=torch.float32)
        assert bags.offsets is not None
        if bags.offsets[0] != 0 or bool((bags.offsets.diff() < 0).any()):
            raise self._explain(keys, bags, BAD_OFFSETS)
        most = torch.iinfo(bags.ids.dtype).max
        limits = torch.tensor([self._limits.get(key, most) for key in keys])
        limits = limits.repeat_interleave(torch.tensor(features.length_per_key()))
        # Features that no table looks up may have any ids.
        is_bad = ((bags.ids < 0) & (limits < most)) | (bags.ids >= limits)
        if is_bad.any():
            raise self._explain(keys, bags, int(is_bad.nonzero()[0]))

    def _explain(self, keys: Sequence[str], bags: Bags, code: int) -> Exception:
        locations = [(number, keys.index(feature), 0) for number, feature in self._lookups]
        tables = cast("TableGroup", self._tables)
        return explain(tables, Lookups(locations, is_mean=False), bags, code)

    def as_sent(self, features: KeyedJaggedTensor, keys: Sequence[str]) -> KeyedJaggedTensor:
        """A valid input as every rank sends it: ids and lengths int64, weights float32.

        Args:
            features: A valid input.
            keys: The keys of the first mini-batch. TorchRec takes features by their positions
                there.

        Raises:
            KeyError: a feature of the first mini-batch is missing.
            MalformedBags: a feature of the first mini-batch is there more than once.
        """
        own = features.keys()
        if own != keys:
            require_features(keys, own)
            features = features.permute([own.index(key) for key in keys])
        values, lengths, weights = features.values(), features.lengths(), features.weights_or_none()
        sent = weights.float() if self._is_weighted and weights is not None else None
        if values.dtype == lengths.dtype == torch.int64 and sent is weights:
            return features
        return KeyedJaggedTensor(
            keys=list(keys), values=values.long(), lengths=lengths.long(), weights=sent
        )


class _Tables(NamedTuple):
    """What an error says of tables; the names are those of a `TableGroup`."""

    names: list[str]
    sizes: list[int]
