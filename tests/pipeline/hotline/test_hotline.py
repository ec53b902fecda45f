"""Splitting a mini-batch changes no step, but for the order in which floats are summed."""

import itertools
import threading
from dataclasses import dataclass, make_dataclass

import numpy as np
import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.pipeline import Hotline, TrainPipeline
from tests.budget import floor_bytes, slot_bytes
from tests.pipeline import small
from tests.unit.transfers import before_transfers


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
def tiered(monkeypatch):
    def build(before_fetch=None, num_slots=40):
        tables = small.make_tables([300, 200], [4, 4])
        budget = floor_bytes(500, [(num_slots, slot_bytes(4, torch.float32, {}))])
        model = small.Model(tables, SGD(lr=0.1), budget=budget)
        [fetcher] = [group.fetcher for group in model.embeddings.groups()]
        if before_fetch is not None:
            before_transfers(monkeypatch, lambda _, fetches: fetches and before_fetch())
        return tables, model, small.dense_optimizer(model), fetcher

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


def test_rows_used_most_stay_in_fast_memory_until_others_are(tiered):
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


def test_a_resumed_split_continues_with_its_counters_and_popular_rows(tiered):
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

        def forward(self, ids):
            liked, others = self.items(ids), self.items(ids.reshape(-1, 1))
            return (liked.sum() + others.sum()), liked.detach()

    batches = torch.arange(6 * 3).view(6, 3).expand(8, 6, 3)
    pipeline = TrainPipeline(
        Ranker(),
        None,
        schedule=Hotline(learning_steps=3),
        ids=lambda ids: {"items": [ids, ids.reshape(-1, 1)]},
    )

    with pytest.warns(UserWarning, match=r"splits no .* numbers of bags, got \[6, 18\]") as caught:
        assert len(list(pipeline.steps(batches))) == 8
    assert len(caught) == 1
    assert pipeline.popular_split.num_split == 0


def test_what_cannot_be_split_is_told_in_the_first_step(tiered):
    tables, model, dense, _ = tiered()
    batch = in_turn(tables, [0, 1, 2, 3])
    batch.weights = {1, 2}
    batch.__class__ = make_dataclass("Odd", ["sparse_features", "labels", "weights"])
    pipeline = TrainPipeline(model, dense, schedule=Hotline())

    with pytest.raises(TypeError, match="set of a mini-batch cannot be split"):
        pipeline.progress(iter([batch]))
