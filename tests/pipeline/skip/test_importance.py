"""Importance: unbiased, the same under every schedule and after a resume; its share is reached."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import recsys
from recsys.batch import Batch, JaggedIds
from recsys.embeddings import RowWiseAdagrad
from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.pipeline import (
    Guard,
    Importance,
    LookAhead,
    RandomDrop,
    Sequential,
    Subsample,
    TrainPipeline,
)
from recsys.pipeline.skip.importance import (
    ImportanceChoice,
    draw_systematically,
    keep_probabilities,
    predict,
)
from recsys.pipeline.skip.refill import Position, RawBatch, Refill, Refilled
from recsys.pipeline.skip.skipping import choose_random

IMPORTANCE = Importance(0.3, warm_up=0, bits=10, guard=None)
pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
    pytest.mark.filterwarnings("ignore:schedule=.*no effect"),
]


class OneTable:
    """A stream of mini-batches whose labels depend on rows and a dense feature."""

    def __init__(self, batch_size=512, seed=0):
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def make(self):
        size = self.batch_size
        rows = (torch.rand(2, size, generator=self.generator) ** 3 * 400).long()
        dense = torch.rand(size, 2, generator=self.generator)
        logits = 3 * torch.sin(rows.float()).sum(0) + dense[:, 0] - 2
        labels = (torch.rand(size, generator=self.generator) < logits.sigmoid()).float()
        return Batch(dense, JaggedIds.from_one_hot(["a", "b"], rows), labels)

    def parts(self, batch, batch_size, setting):
        lookups = Lookups([(0, 0, 0), (1, 1, 1)], is_mean=False)
        ids = batch.sparse_features.values()
        return [((None, lookups), Bags(ids, None, None, batch_size, len(ids)))]


def sampler_after(num_steps, policy, stream, factor_of=lambda _: 1.0):
    """A sampler that has learned from whole mini-batches."""
    sampler = ImportanceChoice(policy, stream, factor_of, "skip=test")
    for number in range(num_steps):
        sampler.end_step(Refilled(None, number, 16, None), stream.make())
    return sampler


def test_gradients_are_unbiased():
    """The mean gradient over many seeds lies within the standard error of the full gradient."""
    stream = OneTable(64)
    trained = sampler_after(256, Importance(0.4, guard=None), stream)
    batch = stream.make()
    layer = torch.nn.Linear(2, 1)

    def gradient(batch):
        layer.zero_grad()
        logits = layer(batch.dense_features).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, batch.weights
        ).backward()
        return torch.cat([layer.weight.grad.flatten(), layer.bias.grad])

    def mean_and_error(use_weights):
        draws = []
        for seed in range(1500):
            sampler = copy.copy(trained)
            sampler._policy = Importance(0.4, guard=None, seed=seed)
            maker = Refill(sampler, Position(num_batches=300), "skip=test", refills=False)
            made = maker.take(iter([batch]), lambda batch: batch).batch
            draws.append(gradient(made if use_weights else replace(made, weights=None)))
        draws = torch.stack(draws)
        return draws.mean(0), draws.std(0) / len(draws) ** 0.5

    full = gradient(batch)
    mean, error = mean_and_error(True)
    assert bool(((mean - full).abs() < 3.5 * error).all())
    mean, error = mean_and_error(False)
    assert bool(((mean - full).abs() > 3.5 * error).any())


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_the_share_is_reached_and_hard_samples_are_kept(share):
    stream = OneTable()
    policy = Importance(share, warm_up=0, guard=None)
    sampler = ImportanceChoice(policy, stream, lambda _: 1.0, "skip=test")
    maker = Refill(sampler, Position(), "skip=test", refills=False)
    sizes, weight_sum = [], 0

    for number in range(400):
        batch = stream.make()
        made = maker.take(iter([batch]), lambda batch: batch)
        sampler.end_step(made, made.batch)
        assert (made.weights is None) == (number < 48)
        if number >= 100:
            sizes.append(len(made.batch))
            weight_sum += float(made.weights.sum())

    assert abs(1 - sum(sizes) / (300 * 512) - share) < 0.001
    assert max(sizes) - min(sizes) <= 1
    assert abs(weight_sum / (300 * 512) - 1) < 0.02
    chosen = sampler(RawBatch(batch, 512, 400, 400 * 512, 0, 400))
    assert 1.01 < float(chosen.weights.max()) <= 10.0001
    held = sampler.versions[max(first for first in sampler.versions if first <= 400)]
    errors = predict(held, sampler._features_of(batch, 512)) - batch.labels.numpy()
    assert (
        np.diff(chosen.weights[np.argsort(np.abs(errors[chosen.samples]))]) <= 1e-4
    ).all()  # the larger the error, the likelier


def test_a_version_holds_from_32_mini_batches_later_on():
    stream = OneTable()
    policy = Importance(warm_up=0, guard=None)
    first, second = sampler_after(16, policy, stream), sampler_after(48, policy, stream)
    batch = stream.make()

    def choice(sampler, number):
        return sampler(RawBatch(batch, 512, number, 512 * number, 0, number)).samples

    assert choice(first, 47) is None
    assert choice(first, 48) is not None
    for number in (64, 79, 80):  # also after a later mini-batch, as after look-ahead was dropped
        assert choice(second, number) is not None
    assert choice(second, 48).tolist() == choice(second, 48).tolist()
    assert list(second.versions) == [48, 64, 80]


def test_the_guard_lowers_and_stops_it():
    def factor_of(number):
        return {90: 0.0, 91: 0.0, 92: 0.5}.get(number, 1.0)

    policy = Importance(0.4, warm_up=0)
    stream = OneTable()
    sampler = sampler_after(48, policy, stream, factor_of)
    batch = stream.make()

    def choice(number):
        return sampler(RawBatch(batch, 512, number, 512 * number, 0, number))

    assert abs(len(choice(89).samples) - 0.6 * 512) < 1
    assert choice(90).samples is None
    assert choice(91).samples is None
    assert abs(len(choice(92).samples) - 0.8 * 512) < 1


def test_probabilities_sum_to_what_is_kept():
    scores = np.array([0.01, 0.2, 0.5, 0.9, np.nan, 0.3])

    found = keep_probabilities(scores, 0.4, 0.1)

    assert found.sum() == pytest.approx(3.6, abs=1e-4)
    assert (found[0], found[4]) == (0.1, 1)
    assert found[2] / found[1] == pytest.approx(2.5)
    assert (keep_probabilities(np.zeros(4), 0.5, 0.1) == 0.1).all()
    assert keep_probabilities(np.ones(4), 0.5, 0.1) == pytest.approx(np.full(4, 0.5), abs=1e-4)


def test_systematic_sampling_keeps_each_sample_with_its_probability():
    probabilities = np.array([0.1, 1, 0.35, 0.8, 0.75, 1, 0.2, 0.05])
    starts = (np.arange(10_000) + 0.5) / 10_000

    drawn = [draw_systematically(probabilities, start) for start in starts]

    shares = np.bincount(np.concatenate(drawn), minlength=8) / len(starts)
    np.testing.assert_allclose(shares, probabilities, atol=2e-4)
    assert {len(samples) for samples in drawn} == {4, 5}


def test_random_drop_without_refill_keeps_each_sample_equally_often():
    policy = RandomDrop(0.3, refill=False)

    chosen = [
        choose_random(policy, RawBatch(None, 15, 0, 15 * number, 0, 0)).samples
        for number in range(4000)
    ]

    shares = np.bincount(np.concatenate(chosen), minlength=15) / 4000
    np.testing.assert_allclose(shares, 0.7, atol=0.03)
    assert {len(samples) for samples in chosen} == {10, 11}


@pytest.mark.parametrize("name", ["importance", "random_drop weighted"])
def test_mini_batches_without_refill_count_as_their_raw_ones(skips, name):
    """They have fewer samples than a whole one on purpose."""
    run = skips.Run(Sequential(), skips.POLICIES[name]).train()
    whole = skips.Run(Sequential(), skips.POLICIES[name], whole=16).train()
    half = skips.Run(Sequential(), skips.POLICIES[name], whole=32).train()

    skips.require_equal(run, whole)
    assert half.losses[0] == run.losses[0]
    assert half.losses != run.losses


def test_a_raw_mini_batch_of_which_nothing_is_kept_makes_no_step(skips):
    """With two samples each, both are left out at times."""
    policy = RandomDrop(0.6, weighted=True, refill=False)
    run = skips.Run(LookAhead(3), policy, skips.options_of("host", None), batch_size=2)
    run.train()
    position = run.pipeline.skipping.position

    assert (position.num_seen, position.num_raw, position.offset) == (1600, 800, 0)
    assert 0.75 < len(run.losses) / 800 < 0.85
    assert position.num_batches == len(run.losses)
    assert abs(run.pipeline.skipping.num_skipped / 1600 - 0.6) < 0.04


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    def forward(self, batch):
        return self.bag(batch[0]).sum(), None


@pytest.mark.parametrize("policy", [IMPORTANCE, RandomDrop(weighted=True), Subsample()])
def test_a_model_that_ignores_weights_is_refused(policy):
    model = Bag()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))

    with pytest.raises(ValueError, match=r"gives samples weights, but Bag does not say"):
        TrainPipeline(model, None, skip=policy)


@pytest.mark.parametrize("guard", [None, Guard(every=64, steps=12)])
def test_labels_that_are_not_0_or_1_are_refused(skips, guard):
    run = skips.Run(Sequential(), replace(IMPORTANCE, guard=guard))
    batch = next(iter(run.loader))
    batch.labels[3] = 7.5

    with pytest.raises(ValueError, match=r"labels \(B,\) of 0 and 1, got"):
        run.pipeline.progress(iter([batch]))
