"""Whatever a bag is set to and given, a schedule changes no result and loses no sample."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsys.batch import places_of_samples
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.tiers.budget import floor_bytes, slot_bytes
from recsys.pipeline import Auto, Hotline, LookAhead, Sequential, TrainPipeline

NUM_SAMPLES = 12
SCHEDULES = [
    Sequential(),
    LookAhead(1),
    LookAhead(4),
    Auto((Sequential(), LookAhead(2)), steps_per_turn=1, num_rounds=1),
    Hotline(learning_steps=3),
    Hotline(learning_steps=3, pinned_share=1.0),
]


@dataclass
class Ids:
    """What a bag is given: 2-D ids, or 1-D ids and offsets; perhaps weights."""

    values: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None

    def arguments(self):
        return self.values, self.offsets, self.weights

    def select(self, samples):
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[samples]
            return Ids(self.values[samples], None, weights)
        bounds = torch.cat([self.offsets, torch.tensor([len(self.values)])])
        places, chosen = places_of_samples(bounds, len(self.offsets), samples)
        weights = None if self.weights is None else self.weights[places]
        return Ids(self.values[places], chosen[:-1], weights)


@dataclass
class Batch:
    ids: list[Ids]
    labels: torch.Tensor

    def select(self, samples):
        return Batch([each.select(samples) for each in self.ids], self.labels[samples])


class Model(nn.Module):
    """Bags of float64 and a layer."""

    def __init__(self, kinds, sizes, optimizer, budgets, *, auto_apply):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            HotColdEmbeddingBag(
                size,
                4,
                optimizer=optimizer,
                budget=budget,
                auto_apply=auto_apply,
                dtype=torch.float64,
                **kind,
            )
            for kind, size, budget in zip(kinds, sizes, budgets, strict=True)
        )
        self.layer = nn.Linear(4 * len(sizes), 1, dtype=torch.float64)

    def forward(self, batch):
        pooled = [bag(*ids.arguments()) for bag, ids in zip(self.bags, batch.ids, strict=True)]
        predictions = self.layer(torch.cat(pooled, 1)).squeeze(1)
        return nn.functional.mse_loss(predictions, batch.labels), predictions.detach()


def ids_of(batch):
    return {f"bags.{number}": ids.arguments() for number, ids in enumerate(batch.ids)}


def make_ids(kind, size, generator, *, is_jagged, is_weighted):
    popular = max(2, size // 20)  # half of the samples look up these alone
    highs = torch.full((NUM_SAMPLES,), size)
    highs[torch.randperm(NUM_SAMPLES, generator=generator)[: NUM_SAMPLES // 2]] = popular
    lengths = torch.full((NUM_SAMPLES,), 3)
    if is_jagged:
        lengths = torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)
    draws = torch.rand(int(lengths.sum()), generator=generator)
    values = (draws * torch.repeat_interleave(highs, lengths)).long()
    weights = None
    if is_weighted and kind["mode"] == "sum":
        weights = torch.rand(len(values), generator=generator, dtype=torch.float64)
    if is_jagged:
        return Ids(values, lengths.cumsum(0) - lengths, weights)
    return Ids(values.view(-1, 3), None, None if weights is None else weights.view(-1, 3))


def budget_for(size, optimizer, all_ids, num_more):
    count = num_more + max(1, *(len(ids.values.unique()) for ids in all_ids))
    of_slot = slot_bytes(4, torch.float64, optimizer.state_sizes(4))
    return floor_bytes(size, [(count, of_slot)])


@pytest.mark.filterwarnings("ignore:schedule=", "ignore:tables")
@given(
    kinds=st.lists(
        st.fixed_dictionaries(
            {"mode": st.sampled_from(["sum", "mean"])},
            optional={"padding_idx": st.sampled_from([0, 1])},
        ),
        min_size=1,
        max_size=3,
    ),
    sizes=st.lists(st.integers(150, 400), min_size=3, max_size=3),
    schedule=st.sampled_from(SCHEDULES),
    optimizer=st.sampled_from([SGD(lr=0.1), Adagrad(lr=0.1)]),
    num_more=st.sampled_from([60, 10, 0]),
    is_jagged=st.booleans(),
    is_weighted=st.booleans(),
    auto_apply=st.booleans(),
    is_slow=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_schedule_computes_what_resident_rows_would(
    small,
    kinds,
    sizes,
    schedule,
    optimizer,
    num_more,
    is_jagged,
    is_weighted,
    auto_apply,
    is_slow,
    seed,
):
    sizes = sizes[: len(kinds)]
    generator = torch.Generator().manual_seed(seed)
    batches = [
        Batch(
            [
                make_ids(kind, size, generator, is_jagged=is_jagged, is_weighted=is_weighted)
                for kind, size in zip(kinds, sizes, strict=True)
            ],
            torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64),
        )
        for _ in range(8)
    ]
    budgets = [
        budget_for(size, optimizer, [batch.ids[number] for batch in batches], num_more)
        for number, size in enumerate(sizes)
    ]
    runs = []
    for is_tiered in (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "budget=")
            model = Model(
                kinds,
                sizes,
                optimizer,
                budgets if is_tiered else [None] * len(sizes),
                auto_apply=auto_apply,
            )
        dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        pipeline = TrainPipeline(
            model, dense, schedule=schedule if is_tiered else Sequential(), ids=ids_of
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            if is_slow:
                small.watch_fetches(monkeypatch)
            steps = list(pipeline.steps(batches))
        states = [bag.row_optimizer.state_dict()["state"] for bag in model.bags]
        runs.append((steps, model.state_dict(), states))

    assert [len(predictions) for _, predictions in runs[1][0]] == [NUM_SAMPLES] * len(batches)
    is_split = pipeline.popular_split is not None and pipeline.popular_split.num_split
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if is_split else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(runs[1], runs[0], **tolerance)


def test_a_module_of_torch_that_divides_by_counts_is_warned_of():
    model = Model([{"mode": "sum"}], [300], SGD(lr=0.1), [6000], auto_apply=True)
    model.scaled = nn.EmbeddingBag(300, 4, mode="sum", scale_grad_by_freq=True)

    with pytest.warns(UserWarning, match=r"'scaled' .*scale_grad_by_freq=True, which divides by"):
        TrainPipeline(model, None, schedule=Hotline(), ids=ids_of)
