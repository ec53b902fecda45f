"""Lookups whose answers by the kernels for the CPU are known; see `tests/embeddings/kernels`."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.rows.lookups import Bags, Lookups

SIZES = [3, 7, 40]
_SMALLEST = [40, 3, 7, 5]  # by feature: rows that all of its tables have


class Case(NamedTuple):
    """Four features; the third is looked up in two tables, the last in none."""

    tables: list
    lookups: Lookups
    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    batch_size: int
    is_mean: bool
    is_one_hot: bool

    @classmethod
    def make(
        cls, seed, dim, batch_size, longest, how="sum", dtype=torch.float64, int_dtype=torch.int64
    ):
        generator = torch.Generator().manual_seed(seed)
        tables = [torch.randn(size, dim, generator=generator).to(dtype) for size in SIZES]
        # The columns in another order than the lookups, and room that is nobody's.
        columns = np.array([0, 3, 2, 4], np.uint64) * np.uint64(dim)
        lookups = Lookups(
            tables=np.array([0, 1, 2, 2], np.uint64),
            positions=np.array([1, 2, 0, 2], np.uint64),
            columns=columns,
            width=5 * dim,
        )
        lengths = torch.ones(4 * batch_size, dtype=torch.int64)
        if longest is not None:
            lengths = torch.randint(0, longest + 1, (4 * batch_size,), generator=generator)
        highs = torch.tensor(_SMALLEST).repeat_interleave(batch_size).repeat_interleave(lengths)
        values = (torch.rand(len(highs), generator=generator) * highs).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        weights = torch.rand(len(values), generator=generator, dtype=computed)
        return cls(
            tables,
            lookups,
            values.to(int_dtype),
            offsets.to(int_dtype),
            weights if "weighted" in how else None,
            batch_size,
            "mean" in how,
            longest is None,
        )

    def bags(self, kind=TorchBags, **others):
        return kind.from_tensors(
            self.values,
            self.offsets,
            self.weights,
            self.batch_size,
            is_mean=self.is_mean,
            is_one_hot=self.is_one_hot or None,
            **others,
        )

    def numba_bags(self):
        return self.bags(Bags)

    def gradient(self, dtype=None):
        """Of everything, cut out of something wider."""
        wide = torch.randn(
            self.batch_size,
            self.lookups.width + 3,
            generator=torch.Generator().manual_seed(1),
            dtype=dtype or self.tables[0].dtype,
        )
        return wide[:, : self.lookups.width]

    def copies(self):
        return [table.clone() for table in self.tables]


@pytest.fixture(autouse=True)
def _forget_errors():
    yield
    errors_on(torch.device("cpu")).forget()


@pytest.fixture(scope="session")
def make_case():
    return Case.make
