"""What modules and loaders require of features, of the result of a lookup, and of a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.batch.mini_batch import Batch

__all__ = ["Features", "Pooled", "SampleSource"]


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

    A source whose features share tables, or have other names than their tables, has a property
    `feature_tables`: the table of each feature, in the order of a batch. A source whose samples
    have ordered bags of earlier events has a property `histories`: for each of these features, the
    feature with one row of the same table that it is compared with. The functions of
    `recsys.batch.feature_tables` read both.
    """

    @property
    def num_samples(self) -> int:
        """Samples in all splits together."""

    @property
    def num_dense(self) -> int:
        """I, the number of dense features."""

    @property
    def table_sizes(self) -> dict[str, int]:
        """`num_embeddings` by table; by default each table has one feature, with its name."""

    @property
    def splits(self) -> dict[str, range]:
        """The sample numbers of "train", "test" and "validation"."""

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Several threads may call it at once.

        Shape:
            samples (B,) in [0, num_samples); result: dense_features (B, I) float32,
            sparse_features int64, with weights (float32) in all mini-batches or in none; labels
            (B,) float32, or (B, K) with K labels.
        """

    @property
    def fingerprint(self) -> str:
        """Equal for sources with equal samples under equal numbers, different for all others."""

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record; JSON types only."""
