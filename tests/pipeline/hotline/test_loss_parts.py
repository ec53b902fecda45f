"""What the losses of two parts say of the whole's is measured, and changes nothing else."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.pipeline import Hotline, Sequential, TrainPipeline

HALVES = Hotline(learning_steps=3)

MiniBatch = namedtuple("MiniBatch", "ids labels")


def ids_of(batch):
    return {"bag": batch.ids}


class Summed(nn.Module):
    """A bag and a layer, whose loss is made from the squared error of each sample."""

    def __init__(self, reduce, *, budget=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.bag = HotColdEmbeddingBag(
            300, 4, mode="sum", optimizer=SGD(lr=0.02), budget=budget, dtype=torch.float64
        )
        self.dropout = nn.Dropout(dropout)
        self.layer = nn.Linear(4, 1, dtype=torch.float64)
        self.reduce, self.seen = reduce, []

    def forward(self, batch):
        predictions = self.layer(self.dropout(self.bag(batch.ids))).squeeze(1)
        self.seen.append((self.training, len(predictions), torch.random.get_rng_state()))
        loss = self.reduce((predictions - batch.labels).square(), self)
        return loss, {"loss": loss.detach(), "mean": predictions.detach().mean()}


def halves(count=8):
    """Mini-batches of 12 samples, of which half are popular."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = [torch.randint(0, high, (6, 3), generator=generator) for high in (300, 6)]
        labels = torch.rand(12, generator=generator, dtype=torch.float64)
        batches.append(MiniBatch(torch.cat(ids), labels))
    return batches


def summed_run(reduce, schedule, batches, **options):
    budget = 4000 if isinstance(schedule, Hotline) else None
    model = Summed(reduce, budget=budget, **options)
    dense = torch.optim.SGD(model.layer.parameters(), lr=0.02)
    pipeline = TrainPipeline(model, dense, schedule=schedule, ids=ids_of)
    return list(pipeline.steps(batches)), model, pipeline


@pytest.mark.parametrize(
    ("reduce", "is_sum"),
    [
        (lambda losses, _: losses.mean(), False),
        (lambda losses, model: losses.mean() + 0.1 * model.layer.weight.square().sum(), False),
        (lambda losses, _: losses.sum(), True),
    ],
    ids=["mean", "mean and a penalty", "sum"],
)
def test_a_loss_that_is_a_mean_or_a_sum_over_samples_is_that_of_the_whole(reduce, is_sum):
    batches = halves()
    expected, plain, _ = summed_run(reduce, Sequential(), batches)
    found, split, pipeline = summed_run(reduce, HALVES, batches)

    assert pipeline.popular_split.num_split > 3
    assert pipeline.popular_split.is_loss_a_sum is is_sum
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    # The whole and both parts are computed once more, on the first mini-batch that is split.
    assert sum(not is_training for is_training, *_ in split.seen) == 3


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses, _: losses.square().mean().sqrt(),
        lambda losses, model: losses.sum() + 10 * model.layer.weight.square().sum(),
        lambda losses, _: losses.sum() / len(losses) ** 0.5,
    ],
    ids=["root of a mean", "sum and a penalty", "over the root of B"],
)
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_refused_with_its_values(reduce):
    batches = halves()
    model = Summed(reduce, budget=4000)
    dense = torch.optim.SGD(model.layer.parameters(), lr=0.02)
    pipeline = TrainPipeline(model, dense, schedule=HALVES, ids=ids_of)
    iterator = iter(batches)
    for _ in range(3):
        pipeline.progress(iterator)

    with pytest.raises(ValueError, match=r"schedule=Hotline\(.*\) .*[\d.]+ of 12 samples"):
        pipeline.progress(iterator)

    _, plain, _ = summed_run(reduce, Sequential(), batches[:3])
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_loss_that_tells_nothing_leaves_its_mini_batch_whole_and_the_next_is_measured(bad):
    batches = halves()
    measured = []

    def reduce(losses, model):
        if not model.training:
            measured.append(len(losses))
            if len(measured) <= 6:
                return losses.sum() * bad
        return losses.sum()

    expected, plain, _ = summed_run(lambda losses, _: losses.sum(), Sequential(), batches)
    found, split, pipeline = summed_run(reduce, HALVES, batches)

    assert len(measured) == 9  # two mini-batches told nothing
    assert pipeline.popular_split.num_split == len(batches) - 5
    assert pipeline.popular_split.is_loss_a_sum
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:schedule=Hotline")
def test_measuring_the_loss_draws_no_random_number_and_leaves_every_mode():
    def reduce(losses, model):
        if not model.training:
            torch.rand(7)
        return losses.mean()

    model = Summed(reduce, budget=4000, dropout=0.5)
    model.layer.eval()  # frozen by its owner
    pipeline = TrainPipeline(model, None, schedule=HALVES, ids=ids_of)
    iterator = iter(halves(4))
    for _ in range(3):
        pipeline.progress(iterator)
    model.seen.clear()
    model.dropout.p = 0.0
    before = torch.random.get_rng_state()

    pipeline.progress(iterator)

    assert [is_training for is_training, *_ in model.seen] == [False] * 3 + [True] * 2
    for is_training, _, state in model.seen[3:]:
        assert is_training
        assert torch.equal(state, before)
    assert model.training
    assert model.dropout.training
    assert not model.layer.training
