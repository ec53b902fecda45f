"""What a pipeline does beside the steps, which `tests/exact/twins.py` compares bit by bit."""

import json
import warnings

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, Adagrad, HotColdEmbeddingBagCollection, TableConfig
from recsys.errors import TiersFailed
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from tests.pipeline import small
from tests.unit.transfers import before_transfers

BUDGET = 30_000  # of 830 rows and their state


@pytest.fixture
def pair():
    """The same model twice, resident and tiered, each with an optimizer of its dense part."""
    models = [
        small.Model(small.TABLES, Adagrad(lr=0.1), budget=budget) for budget in (None, BUDGET)
    ]
    return models, list(map(small.dense_optimizer, models))


@pytest.fixture
def batches():
    return [small.make_batch(small.TABLES, seed) for seed in range(12)]


def test_left_out_a_schedule_looks_ahead_where_rows_come_from_files(pair, tmp_path):
    table = TableConfig(name="t", num_embeddings=900, embedding_dim=8, feature_names=("f",))
    in_files = HotColdEmbeddingBagCollection(
        [table], optimizer=SGD(lr=0.1), budget="16KiB", cold_tier="file", cold_path=tmp_path
    )
    (resident, tiered), _ = pair

    assert TrainPipeline(resident, None).schedule == Sequential()
    assert TrainPipeline(tiered, None).schedule == Sequential()
    assert TrainPipeline(in_files, None).schedule == LookAhead(depth=2)


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(2)])
def test_a_smaller_mini_batch_counts_by_its_share(pair, batches, schedule):
    (resident, tiered), (dense, other_dense) = pair
    batches.append(small.make_batch(small.TABLES, seed=99, num_samples=1))
    losses = []
    for batch in batches:
        dense.zero_grad()
        loss, _ = resident(batch)
        (loss * len(batch.labels) / 4).backward()
        dense.step()
        losses.append(loss.item())

    pipeline = TrainPipeline(tiered, other_dense, schedule=schedule, batch_size=4)

    assert small.run(pipeline, iter(batches)) == losses  # of the samples, not of their share
    small.require_equal(resident, tiered)


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(3)])
def test_a_fetch_that_fails_is_raised_by_every_later_step(pair, batches, schedule, monkeypatch):
    models, dense = pair
    fails = iter([False] * 5 + [True])

    def fail_once(_, fetches):
        if fetches and next(fails, False):
            raise OSError("the disk is gone")

    before_transfers(monkeypatch, fail_once)
    pipeline = TrainPipeline(models[1], dense[1], schedule=schedule)
    iterator, losses, failed = iter(batches), [], []

    for number in range(len(batches)):
        try:
            losses.append(pipeline.progress(iterator)[0].item())
        except TiersFailed as error:
            failed.append((number, str(error.__cause__)))

    first = failed[0][0]
    assert first <= 5  # each dim has fetches of its own; some are made ahead
    assert failed == [(number, "the disk is gone") for number in range(first, len(batches))]
    with pytest.raises(TiersFailed):
        pipeline.detach()
    assert losses == small.run_plain(models[0], dense[0], batches[:first])


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
def test_a_resumed_pipeline_continues_with_its_depth_and_counts(batches):
    optimizer = Adagrad(lr=0.1)
    budget = small.budget_for(small.TABLES, optimizer, batches, 12)
    saved, resumed, other = (
        TrainPipeline(small.Model(small.TABLES, optimizer, budget=budget), None, schedule=schedule)
        for schedule in (LookAhead(6), LookAhead(6), LookAhead(2))
    )
    small.run(saved, iter(batches))
    state = json.loads(json.dumps(saved.state_dict()))
    state["tiers"][0]["waited"] = 100.0

    for pipeline in (resumed, other):
        pipeline.load_state_dict(state)
        assert (pipeline.state_dict() == state) == (pipeline is resumed)
        pipeline.clock.mark("other")
        assert pipeline.clock.seconds["prefetch_wait"] < 1  # the saved clock has counted the 100 s
    assert resumed.mean_depth == saved.mean_depth > 0
    assert other.mean_depth == 0


class Bags(nn.Module):
    """Separate bags, one of which is looked up twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(300, 4, sparse=True) for _ in range(2))

    def forward(self, batch):
        pooled = [self.bags[0](batch[0]), self.bags[1](batch[1]), self.bags[0](batch[1])]
        return torch.cat(pooled, 1).square().mean(), None


IDS = torch.randint(0, 300, (12, 2, 5, 2), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_known", [True, False])
def test_an_accelerated_model_is_claimed_ahead_by_ids_alone(is_known):
    def ids(batch):
        return {"bags.0": [batch[0], batch[1]], "bags.1": batch[1]}

    found = []
    for budget in (None, 8000):
        model = Bags()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
        how = {"schedule": LookAhead(2), "ids": ids if is_known else None}
        pipeline = TrainPipeline(model, optimizer, **how)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found.append([*small.run(pipeline, iter(IDS)), *model.parameters()])

    assert all(torch.equal(*map(torch.as_tensor, both)) for both in zip(*found, strict=True))
    assert len(warned) == (not is_known)
    assert pipeline.mean_depth == pytest.approx((2 * 10 + 1) / 12 if is_known else 0)


def test_a_name_that_is_no_module_of_ours_is_refused_with_those_that_are():
    model = Bags()
    recsys.accelerate(model, optimizer=SGD(lr=0.1), budget=8000)
    pipeline = TrainPipeline(model, None, schedule=LookAhead(), ids=lambda ids: {"bag.0": ids[0]})

    with pytest.raises(ValueError, match=r"'bag.0' must be the name of .* \['bags.0', 'bags.1'"):
        pipeline.progress(iter(IDS))


def test_two_collections_with_features_of_the_same_names_are_not_guessed(batches):
    class Towers(nn.Module):
        def __init__(self, budget=None):
            super().__init__()
            self.left = small.Model(small.TABLES, SGD(lr=0.1), budget=budget)
            self.right = small.Model(small.TABLES, SGD(lr=0.1), budget=budget)

        def forward(self, batch):
            left, _ = self.left(batch[0])
            right, output = self.right(batch[1])
            return left + right, output

    def ids(batch):
        features = [part.sparse_features for part in batch]
        return dict(zip(("left.embeddings", "right.embeddings"), features, strict=True))

    pairs = list(zip(batches, batches[::-1], strict=True))
    expected = small.run(TrainPipeline(Towers(), None), iter(pairs))
    pipelines = [
        TrainPipeline(Towers(14_000), None, schedule=LookAhead(), ids=how) for how in (None, ids)
    ]

    with pytest.warns(UserWarning, match="it is not known which ids 'left.embeddings' and 1 more"):
        assert small.run(pipelines[0], iter(pairs)) == expected
    assert small.run(pipelines[1], iter(pairs)) == expected
    assert pipelines[1].mean_depth > 1


def test_mini_batches_go_to_the_device_in_whatever_holds_them(batches):
    seen = []

    class Model(nn.Module):
        def forward(self, batch):
            seen.append(batch)
            return torch.zeros((), requires_grad=True), None

    held = {"batch": (batches[0], [batches[0].labels]), "name": "a"}
    TrainPipeline(Model(), None, "meta").progress(iter([held]))

    assert seen[0]["batch"][1][0].device.type == "meta"
    assert seen[0]["batch"][0].labels.device.type == "meta"
    assert seen[0]["name"] == "a"


def test_torchrecs_batches_are_taken(pair, batches):
    pytest.importorskip("torchrec", exc_type=ImportError)
    kept = [type(batch)(batch.sparse_features.to_torchrec(), batch.labels) for batch in batches]
    losses = []
    for model, schedule in zip(pair[0], (None, LookAhead()), strict=True):
        pipeline = TrainPipeline(model, None, schedule=schedule)
        losses.append(small.run(pipeline, iter(kept)))

    assert losses[0] == losses[1]
    assert pipeline.mean_depth > 1
    small.require_equal(*pair[0])
