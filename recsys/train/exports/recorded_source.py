"""`RecordedSource`: the features and tables of a run's data, where the data is no longer there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys._support.untrusted import is_count, is_text
from recsys.batch import Batch, JaggedIds
from recsys.datasets.splits import SPLITS
from recsys.datasets.store_features import Feature, histories_in, require_features
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RecordedSource", "dense_names_of"]


class RecordedSource:
    """A `SampleSource` without samples, for building the model of a run.

    Args:
        data: The entry `data` of the run's record.

    Raises:
        ConfigError: the entry does not say how many dense features there are, or is damaged.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)
        self.num_samples = 0
        self.table_sizes: dict[str, int] = data["table_sizes"]
        if not self.table_sizes or not all(is_count(size, 1) for size in self.table_sizes.values()):
            raise ConfigError(
                f"the record of the run is damaged: data.table_sizes must be positive numbers, "
                f"got {self.table_sizes}; train again"
            )
        self._features = [
            Feature(
                each["name"],
                each["table"],
                each.get("kind", "one"),
                each.get("is_weighted", False),
            )
            for each in data.get(
                "features", [{"name": name, "table": name} for name in data["table_sizes"]]
            )
        ]
        require_features(self._features)
        names = dense_names_of(data)
        num_dense: Any = data.get("num_dense") if names is None else len(names)
        if not is_count(num_dense):
            raise ConfigError(
                f"{data['name']} is not there, and the record of the run does not say how many "
                "dense features it had; put the data back, or train again"
            )
        self.num_dense: int = num_dense

    @property
    def feature_tables(self) -> dict[str, str]:
        """The table that each feature looks up, in the order of a batch."""
        return {each.name: each.table for each in self._features}

    @property
    def histories(self) -> dict[str, str]:
        """For each history: the feature of its candidate; see `histories_in`."""
        return histories_in(self._features)

    @property
    def splits(self) -> dict[str, range]:
        """The parts, all empty."""
        return {split: range(0) for split in SPLITS}

    @property
    def fingerprint(self) -> str:
        """That of the data, as recorded."""
        return str(self._data.get("fingerprint"))

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Made-up samples of the right shape, which look up row 0 of every table."""
        size = len(samples)
        rows = torch.zeros(len(self._features), size, dtype=torch.int64)
        names = [each.name for each in self._features]
        ids = JaggedIds.from_one_hot(names, rows)
        if any(each.is_bag for each in self._features):
            is_weighted = any(each.is_weighted for each in self._features)
            weights = torch.ones(rows.numel()) if is_weighted else None
            ids = JaggedIds(names, ids.values(), ids.offsets(), weights)
        return Batch(torch.zeros(size, self.num_dense), ids, torch.zeros(size))

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record."""
        return self._data


def dense_names_of(data: Mapping[str, Any]) -> list[str] | None:
    """The dense features by name, in order; None if a record's entry `data` does not have them."""
    names = data.get("dense_names")
    return names if isinstance(names, list) and all(map(is_text, names)) else None
