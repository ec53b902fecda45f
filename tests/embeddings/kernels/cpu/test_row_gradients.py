"""Dense gradients of tables are sums in lookup order."""

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.cpu.pooled_lookup import row_gradients
from recsys.embeddings.rows.lookups import Bags, Lookups

DIM = 5


def summed_one_by_one(lookups, bags, gradient, number, num_rows):
    """The same by numpy, one lookup after the other."""
    found = np.zeros((num_rows, DIM), gradient.dtype)
    offsets = np.arange(len(bags.values) + 1) if bags.offsets is None else bags.offsets
    for table, position, column in zip(
        lookups.tables, lookups.positions, lookups.columns, strict=True
    ):
        if table != number:
            continue
        for sample in range(bags.batch_size):
            begin, end = offsets[int(position) * bags.batch_size + sample :][:2]
            for place in range(begin, end):
                of_value = gradient[sample, int(column) : int(column) + DIM]
                if bags.is_mean:
                    of_value = of_value / gradient.dtype.type(end - begin)
                if bags.weights is not None:
                    of_value = of_value * bags.weights[place]
                found[bags.values[place]] += of_value
    return found


@pytest.mark.in_ci("float32")
@pytest.mark.threads
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("is_one_hot", "is_weighted", "is_mean"),
    [
        (True, False, False),
        (True, True, False),
        (False, False, False),
        (False, True, False),
        (False, False, True),
        (False, True, True),
    ],
)
def test_gradients_are_summed_in_lookup_order(dtype, is_one_hot, is_weighted, is_mean):
    rng = np.random.default_rng(0)
    num_samples, num_rows = 400, 30
    # Features 0 and 2 are looked up in table 1, feature 1 in table 0.
    lookups = Lookups(
        tables=np.array([1, 0, 1], np.uint64),
        positions=np.array([2, 1, 0], np.uint64),
        columns=np.array([0, DIM, 2 * DIM], np.uint64),
        width=3 * DIM,
    )
    lengths = rng.integers(0, 4, 3 * num_samples)
    offsets = None if is_one_hot else np.append(0, lengths.cumsum())
    num_values = 3 * num_samples if is_one_hot else int(lengths.sum())
    weights = rng.standard_normal(num_values).astype(dtype) if is_weighted else None
    values = rng.integers(0, num_rows, num_values)
    bags = Bags(values, offsets, weights, num_samples, is_mean)
    gradient = rng.standard_normal((num_samples, 3 * DIM)).astype(dtype)

    for number in (0, 1):
        found = row_gradients(lookups, bags, torch.from_numpy(gradient), number, (num_rows, DIM))
        expected = summed_one_by_one(lookups, bags, gradient, number, num_rows)
        assert np.array_equal(found.numpy(), expected)
