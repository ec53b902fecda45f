"""Splitting a mini-batch changes no step, but for the order in which floats are summed."""

import itertools
import threading
from collections import namedtuple
from dataclasses import dataclass, make_dataclass

import numpy as np
import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, Adagrad, HotColdEmbeddingBag
from recsys.embeddings.tiers.budget import floor_bytes, slot_bytes
from recsys.errors import TiersFailed
from recsys.pipeline import Hotline, Sequential, TrainPipeline

MiniBatch = namedtuple("MiniBatch", "ids labels")


def make_batch(sizes, seed, share):
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(0, max(1, int(size * share)), (6, 3), generator=generator) for size in sizes
    ]
    return MiniBatch(ids, torch.rand(6, generator=generator, dtype=torch.float64))


@dataclass
class SparseBatch:
    sparse_features: JaggedIds
    labels: torch.Tensor


def sparse_batch(tables, rows_FB):
    features = JaggedIds.from_one_hot([table.name for table in tables], rows_FB)
    return SparseBatch(features, torch.linspace(0, 1, rows_FB.shape[1]))


def in_turn(tables, rows_of_samples):
    """A mini-batch whose sample b looks up row `rows_of_samples[b]` of every table."""
    return sparse_batch(tables, torch.tensor([list(rows_of_samples)] * len(tables)))


@pytest.fixture
def tiered(small, monkeypatch):
    def build(before_fetch=None, optimizer=None, num_slots=40, **options):
        tables = small.make_tables([300, 200], [4, 4])
        optimizer = optimizer or SGD(lr=0.1)
        of_slot = slot_bytes(4, torch.float32, optimizer.state_sizes(4))
        budget = floor_bytes(500, [(num_slots, of_slot)])
        model = small.Model(tables, optimizer, budget=budget, **options)
        [fetcher] = [group.fetcher for group in model.embeddings.groups()]
        if before_fetch is not None:
            small.watch_fetches(monkeypatch, before_fetch)
        dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        return tables, model, dense, fetcher

    return build


def test_popular_samples_are_computed_on_while_rows_come_for_the_others(tiered):
    gate, sizes = threading.Event(), []
    gate.set()

    def wait():
        assert gate.wait(30)

    tables, model, dense, _ = tiered(wait)

    def see(_, arguments, output):
        sizes.append(len(output))
        if sizes[-1] == 3:  # the popular ones, whose forward has ended
            assert not gate.is_set()
            gate.set()

    # The fourth one is split, too, and the loss is measured on it: that waits for all rows.
    rows_of_batches = [*[[0, 1, 2, 3]] * 3, [2, 60, 0, 1], [2, 50, 0, 1]]
    batches = [in_turn(tables, rows) for rows in rows_of_batches]
    pipeline = TrainPipeline(model, dense, schedule=Hotline(learning_steps=3))
    iterator = iter(batches)
    for _ in range(4):
        pipeline.progress(iterator)
    model.layer.register_forward_hook(see)
    gate.clear()

    _, predictions = pipeline.progress(iterator)

    assert sizes == [3, 1]
    assert len(predictions) == 4
    assert pipeline.popular_split.num_split == 2
    assert pipeline.popular_split.num_popular == 6


def test_parts_have_few_sizes_and_popular_samples_left_over_go_with_the_others(tiered):
    tables, model, dense, _ = tiered(num_slots=200)
    batches = [*[in_turn(tables, range(40))] * 3, in_turn(tables, [*range(35), *range(100, 105)])]
    sizes = []
    pipeline = TrainPipeline(model, dense, schedule=Hotline(learning_steps=3))

    def see(layer, arguments, output):
        if layer.training:  # not where the loss is measured
            sizes.append(len(output))

    model.layer.register_forward_hook(see)

    *_, (_, predictions) = pipeline.steps(batches)

    assert sizes == [40, 40, 40, 34, 6]  # of 35 popular ones, by twos: a sixteenth of 40
    assert len(predictions) == 40
    assert pipeline.popular_split.num_popular == 35


@pytest.mark.parametrize("auto_apply", [True, False])
def test_a_mini_batch_of_one_kind_of_samples_is_as_without_a_split_to_the_last_bit(
    small, tiered, auto_apply
):
    runs = []
    for schedule in (Sequential(), Hotline(learning_steps=3)):
        tables, model, dense, _ = tiered(optimizer=Adagrad(lr=0.1), auto_apply=auto_apply)
        new, old = in_turn(tables, [0, 1, 2, 3]), in_turn(tables, [3, 2, 1, 1])
        pipeline = TrainPipeline(model, dense, schedule=schedule)
        runs.append((model, small.run(pipeline, iter([new, new, new, old, old]))))

    assert pipeline.popular_split.num_split == 0
    assert pipeline.popular_split.num_popular == 8
    assert runs[0][1] == runs[1][1]
    small.require_equal(runs[0][0], runs[1][0])


def test_a_split_step_is_the_whole_one_within_rounding(tiered):
    """From the same rows; bound: rtol 1e-5, atol 1e-7."""
    tables, model, dense, _ = tiered(optimizer=Adagrad(lr=0.02), num_slots=60)
    _, plain, plain_dense, _ = tiered(optimizer=Adagrad(lr=0.02), num_slots=60)
    generator = torch.Generator().manual_seed(3)
    batches = [
        sparse_batch(
            tables, torch.randint(0, 12 if number < 3 else 18, (2, 16), generator=generator)
        )
        for number in range(6)
    ]
    pipeline = TrainPipeline(model, dense, schedule=Hotline(learning_steps=3))
    whole = TrainPipeline(plain, plain_dense, schedule=Sequential())
    iterators = iter(batches), iter(batches)
    for _ in range(3):  # the learning, to the last bit
        assert torch.equal(pipeline.progress(iterators[0])[0], whole.progress(iterators[1])[0])

    loss, predictions = pipeline.progress(iterators[0])
    expected_loss, expected = whole.progress(iterators[1])

    assert pipeline.popular_split.num_split == 1
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(predictions, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-7)


def test_rows_used_most_stay_in_fast_memory_until_others_are(small, tiered):
    tables, model, dense, fetcher = tiered(num_slots=40)
    pipeline = TrainPipeline(model, dense, schedule=Hotline(learning_steps=4, pinned_share=0.5))
    popular, seldom = [0, 1, 2, 3], iter(range(100, 300))

    def batches(num_steps, first):
        for _ in range(num_steps):
            yield in_turn(tables, [*(first + row for row in popular), *itertools.islice(seldom, 2)])

    def are_here(first):
        rows = np.array([first + row for row in popular], np.int64)
        return (fetcher.marks.slot_of_row[np.concatenate([rows, 300 + rows])] >= 0).all()

    small.run(pipeline, batches(4, 0))
    assert pipeline.popular_split.num_promoted == 8
    sweep = (in_turn(tables, list(range(n, n + 6))) for n in range(100, 196, 6))
    for batch in itertools.islice(sweep, 3):  # rows used once go around the popular ones
        small.run(pipeline, iter([batch]))
        assert are_here(0)

    small.run(pipeline, batches(40, 50))
    assert are_here(50)
    assert pipeline.popular_split.num_demoted >= 8
    assert not are_here(0)


def test_a_resumed_split_continues_with_its_counters_and_popular_rows(small, tiered):
    def batches(first, last):
        return [in_turn(tables, [0, 1, 2, 100 + number]) for number in range(first, last)]

    tables, model, dense, fetcher = tiered(num_slots=40)
    schedule = Hotline(learning_steps=4, pinned_share=0.5)
    pipeline = TrainPipeline(model, dense, schedule=schedule)
    small.run(pipeline, iter(batches(0, 10)))
    state = pipeline.state_dict()
    assert len(state["popular_split"]["popular_rows"][0]) == 6

    _, other, its_dense, others_fetcher = tiered(num_slots=40)
    other.load_state_dict(model.state_dict())
    resumed = TrainPipeline(other, its_dense, schedule=schedule)
    resumed.load_state_dict(state)

    assert set(others_fetcher.popular.tolist()) == {0, 1, 2, 300, 301, 302}
    found = resumed.state_dict()
    for part in (state, found):
        part["popular_split"]["popular_rows"] = None
    assert found == state
    num_split = resumed.popular_split.num_split
    small.run(resumed, iter(batches(10, 14)))
    assert resumed.popular_split.num_steps == 14
    assert resumed.popular_split.num_split >= num_split + 3  # all but the first, which fetches all
    assert others_fetcher.counts.lookups == fetcher.counts.lookups * 14 // 10


def test_a_row_that_does_not_come_fails_the_step_and_every_later_use(small, tiered):
    failures = []

    def fail():
        if failures:
            raise failures.pop()

    tables, model, dense, _ = tiered(fail)
    first, second = in_turn(tables, [0, 1, 2, 3]), in_turn(tables, [2, 50, 0, 1])
    pipeline = TrainPipeline(model, dense, schedule=Hotline(learning_steps=3))
    small.run(pipeline, iter([first]))
    before = model.layer.weight.clone()
    failures.append(OSError("the disk is gone"))

    for batch in (second, first):
        with pytest.raises(TiersFailed) as raised:
            pipeline.progress(iter([batch]))
        assert str(raised.value.__cause__) == "the disk is gone"

    assert torch.equal(model.layer.weight, before)
    with pytest.raises(TiersFailed, match="load a checkpoint"):
        model.state_dict()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(1), r"'odd' \(BatchNorm1d\) has statistics of each part alone"),
        (nn.Dropout(0.5), r"'odd' \(Dropout\) has other random draws"),
        (
            nn.EmbeddingBag(30, 4, mode="sum", scale_grad_by_freq=True),
            r"'odd' .*scale_grad_by_freq=True, which divides by",
        ),
    ],
)
def test_layers_that_look_across_samples_or_draw_are_named(tiered, layer, message):
    _, model, dense, _ = tiered()
    model.odd = layer

    with pytest.warns(UserWarning, match=message):
        TrainPipeline(model, dense, schedule=Hotline())


def test_lookups_of_different_numbers_of_bags_stay_whole_and_a_warning_says_so():
    class Ranker(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = HotColdEmbeddingBag(
                300, 4, mode="sum", optimizer=SGD(lr=0.02), budget=4500
            )

        def forward(self, batch):
            liked, others = self.items(batch.ids[0]), self.items(batch.ids[1].reshape(-1, 1))
            scores = (liked.unsqueeze(1) * others.view(len(liked), -1, 4)).sum((1, 2))
            return scores.mean(), scores.detach()

    batches = [make_batch((300, 300), seed, 0.3) for seed in range(8)]
    pipeline = TrainPipeline(
        Ranker(),
        None,
        schedule=Hotline(learning_steps=3),
        ids=lambda batch: {"items": [batch.ids[0], batch.ids[1].reshape(-1, 1)]},
    )

    with pytest.warns(UserWarning, match=r"splits no .* numbers of bags, got \[6, 18\]") as caught:
        assert len(list(pipeline.steps(batches))) == 8
    assert len(caught) == 1
    assert pipeline.popular_split.num_split == 0


def test_what_cannot_be_split_is_told_in_the_first_step(small, tiered):
    tables, model, dense, _ = tiered()
    batch = in_turn(tables, [0, 1, 2, 3])
    batch.weights = {1, 2}
    batch.__class__ = make_dataclass("Odd", ["sparse_features", "labels", "weights"])
    pipeline = TrainPipeline(model, dense, schedule=Hotline())

    with pytest.raises(TypeError, match="set of a mini-batch cannot be split"):
        pipeline.progress(iter([batch]))
