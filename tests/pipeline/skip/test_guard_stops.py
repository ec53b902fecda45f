"""The guard in a pipeline: the labels of all samples that skipping leaves out turn around."""

import pytest
import torch
from torch import nn

from recsys.batch import Batch, JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.embeddings.table import TableConfig
from recsys.pipeline import DropInput, FreezeRows, Guard, TrainPipeline

NUM_POPULAR, NUM_ROWS, BATCH_SIZE = 4, 404, 128
FLIP_AT = 70_000  # raw samples
EVERY = 120
GUARD = Guard(every=EVERY, steps=30)
# Rows of other samples are updated too rarely to be known.
STALENESS = Staleness(window=120, min_updates=40, patience=1, count_every=1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        tables = [
            TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=4) for name in ("a", "b")
        ]
        self.embeddings = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.15))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        logits = self.embeddings(batch.sparse_features).values().sum(1) + self.bias
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def samples(seed, size, *, is_flipped=False):
    """Three fifths of the samples look up popular rows only, and can be flipped."""
    generator = torch.Generator().manual_seed(seed)
    is_popular = torch.rand(size, generator=generator) < 0.6
    popular = torch.randint(0, NUM_POPULAR, (2, size), generator=generator)
    others = torch.randint(NUM_POPULAR, NUM_ROWS, (2, size), generator=generator)
    rows = torch.where(is_popular, popular, others)
    labels = torch.rand(size, generator=generator) < torch.sigmoid((rows % 2).sum(0) * 2.0 - 2.0)
    if is_flipped:
        labels ^= is_popular
    return Batch(torch.empty(size, 0), JaggedIds.from_one_hot(["a", "b"], rows), labels.float())


def stream():
    for number in range(1100):
        yield samples(number, BATCH_SIZE, is_flipped=number * BATCH_SIZE >= FLIP_AT)


def train(skip):
    """Trains; returns held-out loglosses by steps and samples seen, and the pipeline."""
    model = Model()
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    pipeline = TrainPipeline(model, optimizer, skip=skip)
    held_out = samples(-1, 20_000), samples(-1, 20_000, is_flipped=True)
    found = {}
    for number, _ in enumerate(pipeline.steps(stream()), 1):
        seen = number * BATCH_SIZE if skip is None else pipeline.skipping.num_seen
        if skip is None or number % EVERY == 0:
            with torch.no_grad():
                found[number, seen] = float(model(held_out[seen > FLIP_AT])[0])
    return found, pipeline


@pytest.fixture(scope="module")
def expected():
    """Held-out loglosses by samples seen of a run that skips nothing."""
    return {seen: loss for (_, seen), loss in train(None)[0].items()}


def how_much_worse(found, expected):
    """By step, after the labels have turned around."""
    return {
        step: loss / expected[min(expected, key=lambda near: abs(near - seen))] - 1
        for (step, seen), loss in found.items()
        if seen > FLIP_AT
    }


@pytest.mark.outside_ci
@pytest.mark.parametrize("policy", [DropInput, FreezeRows])
def test_without_a_guard_samples_that_turn_around_do_lasting_harm(policy, expected):
    found, _ = train(policy(0.4, STALENESS, None))

    worse = how_much_worse(found, expected)
    assert min(list(worse.values())[:2]) > 0.3


@pytest.mark.parametrize("policy", [DropInput, FreezeRows])
def test_a_guard_stops_skipping_in_its_first_window_and_the_harm_heals(policy, expected):
    with pytest.warns(UserWarning, match=r"guard: .* the run stops skipping: logloss"):
        found, pipeline = train(policy(0.4, STALENESS, GUARD))

    guard = pipeline.skipping.guard
    worse = how_much_worse(found, expected)
    first, *others = guard.decisions
    assert first["action"] == "stopped"
    assert min(worse) <= first["step"] < min(worse) + EVERY  # the first window that ends later
    later = [worse[step] for step in worse if step > first["step"] + LEAD + EVERY]
    assert len(later) >= 2
    assert max(later) < 0.005
    assert not others
    assert guard.factor == 0
