"""Choosing samples: the share is reached, and each sample counts as often as it should."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recsys.batch import Batch, JaggedIds
from recsys.embeddings import Staleness
from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.pipeline import Importance, RandomDrop, Subsample
from recsys.pipeline.skip.importance import (
    ImportanceChoice,
    draw_systematically,
    keep_probabilities,
    predict,
)
from recsys.pipeline.skip.refill import Position, RawBatch, Refill, Refilled
from recsys.pipeline.skip.skipping import choose_random, choose_stale

BATCH_SIZE = 512


class OneTable:
    """A stream of mini-batches whose labels depend on rows and a dense feature."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def make(self):
        rows = (torch.rand(2, BATCH_SIZE, generator=self.generator) ** 3 * 400).long()
        dense = torch.rand(BATCH_SIZE, 2, generator=self.generator)
        logits = 3 * torch.sin(rows.float()).sum(0) + dense[:, 0] - 2
        labels = (torch.rand(BATCH_SIZE, generator=self.generator) < logits.sigmoid()).float()
        return Batch(dense, JaggedIds.from_one_hot(["a", "b"], rows), labels)

    def parts(self, batch, batch_size, setting):
        lookups = Lookups([(0, 0, 0), (1, 1, 1)], is_mean=False)
        ids = batch.sparse_features.values()
        return [((None, lookups), Bags(ids, None, None, batch_size, len(ids)))]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_the_share_is_reached_and_hard_samples_are_kept(share):
    stream = OneTable()
    policy = Importance(share, warm_up=0, guard=None)
    sampler = ImportanceChoice(policy, stream, lambda _: 1.0, "skip=test")
    maker = Refill(sampler, Position(), "skip=test", refills=False)
    sizes, weight_sum = [], 0

    for number in range(300):
        batch = stream.make()
        made = maker.take(iter([batch]), lambda batch: batch)
        sampler.end_step(made, made.batch)
        assert (made.weights is None) == (number < 48)
        if number >= 100:
            sizes.append(len(made.batch))
            weight_sum += float(made.weights.sum())

    assert abs(1 - sum(sizes) / (200 * BATCH_SIZE) - share) < 0.001
    assert max(sizes) - min(sizes) <= 1
    assert abs(weight_sum / (200 * BATCH_SIZE) - 1) < 0.02
    chosen = sampler(RawBatch(batch, BATCH_SIZE, 300, 300 * BATCH_SIZE, 0, 300))
    held = sampler.versions[max(first for first in sampler.versions if first <= 300)]
    errors = predict(held, sampler._features_of(batch, BATCH_SIZE)) - batch.labels.numpy()
    by_error = chosen.weights[np.argsort(np.abs(errors[chosen.samples]))]
    assert 1.01 < by_error.max() <= 10.0001
    assert (np.diff(by_error) <= 1e-4).all()  # the larger the error, the likelier


def test_a_version_holds_from_32_mini_batches_later_on_for_the_share_of_the_guard():
    factors, stream = {90: 0.0, 92: 0.5}, OneTable()
    policy = Importance(0.4, warm_up=0)
    sampler = ImportanceChoice(policy, stream, lambda n: factors.get(n, 1.0), "skip=test")
    batch = stream.make()

    def share_of(number):
        raw = RawBatch(batch, BATCH_SIZE, number, BATCH_SIZE * number, 0, number)
        chosen, again = sampler(raw).samples, sampler(raw).samples
        np.testing.assert_array_equal(chosen, again)
        return 0 if chosen is None else 1 - len(chosen) / BATCH_SIZE

    for number in range(48):
        sampler.end_step(Refilled(None, number, BATCH_SIZE), stream.make())
        if number == 15:
            assert list(sampler.versions) == [48]

    # Also for an earlier mini-batch, as after look-ahead was dropped.
    shares = [share_of(number) for number in (47, 48, 80, 64, 90, 92)]
    assert shares == pytest.approx([0, 0.4, 0.4, 0.4, 0, 0.2], abs=0.003)
    assert list(sampler.versions) == [48, 64, 80]


def test_probabilities_sum_to_what_is_kept():

    found = keep_probabilities(np.array([0.01, 0.2, 0.5, 0.9, np.nan, 0.3]), 0.4, 0.1)

    assert found.sum() == pytest.approx(3.6, abs=1e-4)
    assert (found[0], found[4]) == (0.1, 1)
    assert found[2] / found[1] == pytest.approx(2.5)
    assert (keep_probabilities(np.zeros(4), 0.5, 0.1) == 0.1).all()
    assert keep_probabilities(np.ones(4), 0.5, 0.1) == pytest.approx(np.full(4, 0.5), abs=1e-4)


PROBABILITIES = np.array([0.1, 1, 0.35, 0.8, 0.75, 1, 0.2, 0.05])


def drawn_systematically(number):
    return draw_systematically(PROBABILITIES, (number + 0.5) / 4000)


def drawn_at_random(number):
    policy = RandomDrop(0.3, refill=False)
    return choose_random(policy, RawBatch(None, 15, 0, 15 * number, 0, 0)).samples


@pytest.mark.parametrize(
    ("draw", "expected", "sizes"),
    [
        (drawn_systematically, PROBABILITIES, {4, 5}),
        (drawn_at_random, np.full(15, 0.7), {10, 11}),
    ],
)
def test_each_sample_is_kept_with_its_probability(draw, expected, sizes):
    drawn = [draw(number) for number in range(4000)]

    shares = np.bincount(np.concatenate(drawn), minlength=len(expected)) / len(drawn)
    np.testing.assert_allclose(shares, expected, atol=0.03)
    assert {len(samples) for samples in drawn} == sizes


def test_weights_of_subsample_make_up_for_stale_samples_that_are_left_out():
    is_stale = torch.rand(64, generator=torch.Generator().manual_seed(0)) < 0.6
    tracker = SimpleNamespace(
        use_flags_of=lambda _: None,
        all_stale=lambda *_: is_stale,
        add_inputs=lambda *_: None,
        has_stale_rows=True,
    )
    inputs = SimpleNamespace(parts=lambda *_: [])
    total = np.zeros(64)

    for seed in range(2000):
        policy = Subsample(0.2, 0.3, Staleness(), None, seed)
        raw = RawBatch(None, 64, 0, 1000 * seed, 0, 0)
        chosen = choose_stale(policy, inputs, tracker, lambda _: 1.0, "skip=test", raw)
        total[chosen.samples] += chosen.weights

    assert (total[~is_stale.numpy()] == 2000).all()
    np.testing.assert_allclose(total / 2000, 1, atol=0.15)  # standard error 0.034
    assert (chosen.weights > 1).any()
