"""The logistic model against an oracle in plain numpy, and on odd inputs."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from recsys._support.hashing import GOLDEN, mix64
from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.pipeline.skip.importance import Weights, features_of, learn, predict

BITS, LR = 8, 0.05
NUM_DENSE = 3


def lookups_of(count):
    locations = [(number, count - 1 - number, 4 * number) for number in range(count)]
    return Lookups(locations, is_mean=False)


def part_of(count, ids, offsets, batch_size):
    """Lookups of as many features, in the reverse order, and their input."""
    offsets = None if offsets is None else torch.from_numpy(offsets)
    bags = Bags(torch.from_numpy(ids), offsets, None, batch_size, count * batch_size)
    return (None, lookups_of(count)), bags


def one_hot_part(generator, batch_size, dtype):
    rows = generator.integers(0, 500, (4, batch_size)).astype(dtype)
    part = part_of(4, rows.ravel(), None, batch_size)
    return part, [[[row] for row in rows[3 - lookup]] for lookup in range(4)]


def jagged_part(generator, batch_size, dtype):
    lengths = generator.integers(0, 4, (2, batch_size))
    offsets = np.concatenate([[0], lengths.ravel().cumsum()]).astype(dtype)
    values = generator.integers(0, 500, offsets[-1]).astype(dtype)
    bags = [values[begin:end].tolist() for begin, end in pairwise(offsets)]
    part = part_of(2, values, offsets, batch_size)
    return part, [bags[batch_size:], bags[:batch_size]]


def slots_of(rows_LB, sample):
    """The slots of a sample, lookup by lookup."""
    with np.errstate(over="ignore"):
        return [
            int(
                mix64(mix64(np.array([lookup + 1], np.uint64) * GOLDEN) + np.uint64(row) * GOLDEN)[
                    0
                ]
                >> np.uint64(64 - BITS)
            )
            for lookup, of_lookup in enumerate(rows_LB)
            for row in of_lookup[sample]
        ]


class Predictor:
    """The weights of a new model."""

    def __init__(self, bits, lr, num_dense):
        sizes = 2**bits, num_dense + 1
        self.weights = Weights(*(np.zeros(size, np.float32) for size in sizes))
        self.sums = Weights(*(np.ones(size, np.float32) for size in sizes))
        self._lr = lr

    def learn(self, *samples):
        return learn(self.weights, self.sums, *samples, self._lr)


class Oracle:
    """One sample at a time, in float64."""

    def __init__(self):
        self.weights, self.sums = np.zeros(2**BITS), np.ones(2**BITS)
        self.dense, self.dense_sums = np.zeros(NUM_DENSE + 1), np.ones(NUM_DENSE + 1)

    def predict(self, slots, dense):
        x = np.append(np.clip(dense, -16, 16), 1)
        return 1 / (1 + np.exp(-(self.weights[slots].sum() + self.dense @ x)))

    def learn(self, slots, dense, label, weight):
        found = self.predict(slots, dense)
        gradient = weight * (found - label)
        for slot in slots:
            self.sums[slot] += gradient**2
            self.weights[slot] -= LR * gradient / np.sqrt(self.sums[slot])
        x = np.append(np.clip(dense, -16, 16), 1)
        self.dense_sums += (gradient * x) ** 2
        self.dense -= LR * gradient * x / np.sqrt(self.dense_sums)
        return found


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_it_learns_and_predicts_as_the_oracle_does(dtype):
    generator = np.random.default_rng(0)
    predictor, oracle = Predictor(BITS, LR, NUM_DENSE), Oracle()

    for batch_size in (70, 1, 128, 65):
        first, first_rows = one_hot_part(generator, batch_size, dtype)
        second, second_rows = jagged_part(generator, batch_size, dtype)
        dense = (generator.standard_normal((batch_size, NUM_DENSE)) * 20).astype(np.float32)
        labels = (generator.random(batch_size) < 0.3).astype(np.float32)
        weights = generator.choice([1.0, 4.0], batch_size).astype(np.float32)
        features = features_of([first, second], dense, batch_size, BITS)
        slots = [slots_of(first_rows + second_rows, sample) for sample in range(batch_size)]
        bounds = features.bounds.tolist()
        assert [features.slots[begin:end].tolist() for begin, end in pairwise(bounds)] == slots

        expected = [oracle.predict(*each) for each in zip(slots, dense, strict=True)]
        np.testing.assert_allclose(predict(predictor.weights, features), expected, rtol=2e-4)
        predictor.learn(features, labels, weights)
        for sample in zip(slots, dense, labels, weights, strict=True):
            oracle.learn(*sample)

    np.testing.assert_allclose(predictor.weights.rows, oracle.weights, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(predictor.weights.dense, oracle.dense, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(predictor.sums.rows, oracle.sums, rtol=1e-3)
    np.testing.assert_allclose(predictor.sums.dense, oracle.dense_sums, rtol=1e-3)
