"""What a pipeline does beside the steps: warnings, errors, evaluation in between, the end."""

import json
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    TableConfig,
)
from recsys.errors import IdOutOfRange, TiersFailed
from recsys.pipeline import LookAhead, Sequential, TrainPipeline

BUDGET = 30_000  # of 830 rows and their state


@pytest.fixture
def pair(small):
    """The same model twice, resident and tiered, each with an optimizer of its dense part."""

    def build(optimizer=None, **options):
        optimizer = Adagrad(lr=0.1) if optimizer is None else optimizer
        models = [
            small.Model(small.tables, optimizer, **options),
            small.Model(small.tables, optimizer, **{"budget": BUDGET} | options),
        ]
        return models, [torch.optim.SGD(model.layer.parameters(), lr=0.1) for model in models]

    return build


@pytest.fixture
def batches(small):
    return [small.make_batch(small.tables, seed) for seed in range(12)]


def test_left_out_a_schedule_looks_ahead_where_rows_come_from_files(pair, tmp_path):
    tables = [TableConfig(name="t", num_embeddings=900, embedding_dim=8, feature_names=("f",))]
    in_files = HotColdEmbeddingBagCollection(
        tables, optimizer=SGD(lr=0.1), budget="16KiB", cold_tier="file", cold_path=tmp_path
    )
    (resident, tiered), _ = pair()

    assert TrainPipeline(resident, None).schedule == Sequential()
    assert TrainPipeline(tiered, None).schedule == Sequential()
    assert TrainPipeline(in_files, None).schedule == LookAhead(depth=2)


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(2)])
def test_a_smaller_mini_batch_counts_by_its_share(small, pair, batches, schedule):
    (resident, tiered), (dense, other_dense) = pair()
    batches.append(small.make_batch(small.tables, seed=99, num_samples=1))
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


def test_evaluation_between_steps_sees_the_newest_rows(small, pair, batches):
    models, dense = pair()
    pipeline = TrainPipeline(models[1], dense[1], schedule=LookAhead(3))
    iterator = iter(batches)

    for number, batch in enumerate(batches):
        small.run_plain(models[0], dense[0], [batch])
        pipeline.progress(iterator)
        with torch.no_grad():
            found = [model(batches[(number + 1) % 12])[0] for model in models]
        assert torch.equal(*found)

    small.require_equal(*models)


def test_detach_leaves_nothing_under_way_and_progress_goes_on_after_it(small, pair, batches):
    models, dense = pair()
    pipeline = TrainPipeline(models[1], dense[1], schedule=LookAhead(3))
    iterator = iter(batches)
    losses = [pipeline.progress(iterator)[0].item() for _ in range(5)]

    assert pipeline.detach() is models[1]

    expected = small.run_plain(models[0], dense[0], batches[:5])
    small.require_equal(*models)
    losses += small.run(pipeline, iterator)
    assert losses == expected + small.run_plain(models[0], dense[0], batches[5:])
    small.require_equal(*models)


class Stumbling(nn.Module):
    """Raises at some mini-batches, before or after the lookup."""

    def __init__(self, model, error, at, *, is_after):
        super().__init__()
        self.model, self.error, self.at, self.is_after = model, error, list(at), is_after
        self.embeddings, self.layer = model.embeddings, model.layer

    def forward(self, batch):
        stumbles = bool(self.at) and self.at.pop(0)
        if stumbles and not self.is_after:
            raise self.error
        found = self.model(batch)
        if stumbles:
            raise self.error
        return found


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_after_a_model_that_raises_training_goes_on_with_the_next(
    small, pair, batches, error, is_after
):
    models, dense = pair()
    at = [False, True, False, True]
    pipeline = TrainPipeline(
        Stumbling(models[1], error, at, is_after=is_after), dense[1], schedule=LookAhead(3)
    )
    iterator, losses = iter(batches), []

    for _ in batches:
        try:
            losses.append(pipeline.progress(iterator)[0].item())
        except type(error):
            pass

    kept = [batch for number, batch in enumerate(batches) if number not in (1, 3)]
    assert losses == small.run_plain(models[0], dense[0], kept)
    small.require_equal(*models)


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(3)])
def test_a_fetch_that_fails_is_raised_by_every_later_step(
    small, pair, batches, schedule, monkeypatch
):
    models, dense = pair()
    fails = iter([False] * 5 + [True])

    def fail_once():
        if next(fails, False):
            raise OSError("the disk is gone")

    small.watch_fetches(monkeypatch, fail_once)
    pipeline = TrainPipeline(models[1], dense[1], schedule=schedule)
    iterator, losses, failed = iter(batches), [], []

    for number in range(len(batches)):
        try:
            losses.append(pipeline.progress(iterator)[0].item())
        except TiersFailed as error:
            failed.append((number, str(error.__cause__)))

    first = failed[0][0]
    assert first <= 5  # each dim has fetches of its own; some are made ahead
    assert [number for number, _ in failed] == list(range(first, len(batches)))
    assert {message for _, message in failed} == {"the disk is gone"}
    with pytest.raises(TiersFailed):
        pipeline.detach()
    assert losses == small.run_plain(models[0], dense[0], batches[:first])


def test_a_bad_id_is_raised_by_its_own_step(small, pair, batches):
    models, dense = pair()
    bad = JaggedIds.from_one_hot(["t_0", "t_1", "t_2"], torch.full((3, 4), 280))
    batches[4].sparse_features = bad
    pipeline = TrainPipeline(models[1], dense[1], schedule=LookAhead(3))
    iterator = iter(batches)
    losses = [pipeline.progress(iterator)[0].item() for _ in range(4)]

    with pytest.raises(IdOutOfRange, match="feature 't_1', sample 0: id 280 is not in"):
        pipeline.progress(iterator)

    losses += small.run(pipeline, iterator)
    assert losses == small.run_plain(models[0], dense[0], batches[:4] + batches[5:])
    small.require_equal(*models)


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
def test_a_resumed_pipeline_continues_with_its_depth_and_counts(small, batches):
    optimizer = Adagrad(lr=0.1)
    budget = small.budget_for(small.tables, optimizer, batches, 12)
    pipelines = []
    for schedule in (LookAhead(6), LookAhead(6), LookAhead(2)):
        model = small.Model(small.tables, optimizer, budget=budget)
        pipelines.append(TrainPipeline(model, small.dense_optimizer(model), schedule=schedule))
    saved, resumed, other = pipelines
    small.run(saved, iter(batches))
    state = json.loads(json.dumps(saved.state_dict()))
    state["tiers"][0]["waited"] = 100.0

    found = []
    for pipeline in (resumed, other):
        pipeline.load_state_dict(state)
        found.append(pipeline.state_dict())
        pipeline.clock.mark("other")
        assert pipeline.clock.seconds["prefetch_wait"] < 1  # the saved clock has counted the 100 s

    assert found[0] == state
    assert resumed.mean_depth == saved.mean_depth > 0
    assert other.mean_depth == 0


@dataclass
class BagBatch:
    ids: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor


class BagModel(nn.Module):
    """Three bags, the classic way; one of them is looked up twice."""

    def __init__(self, kind=nn.EmbeddingBag, **options):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            [kind(300, 4, mode="sum", sparse=True, **options) for _ in range(3)]
        )
        self.layer = nn.Linear(16, 1)

    def forward(self, batch):
        pooled = [bag(ids, batch.offsets) for bag, ids in zip(self.bags, batch.ids, strict=True)]
        pooled.append(self.bags[0](batch.ids[1], batch.offsets))
        predictions = self.layer(torch.cat(pooled, 1)).squeeze(1)
        return (predictions - batch.labels).square().mean(), predictions


def ids_of(batch):
    told = {f"bags.{number}": (batch.ids[number], batch.offsets) for number in range(3)}
    return told | {"bags.0": [(batch.ids[0], batch.offsets), (batch.ids[1], batch.offsets)]}


def bag_batches(count=12):
    generator = torch.Generator().manual_seed(0)
    return [
        BagBatch(
            torch.randint(0, 300, (3, 10), generator=generator),
            torch.tensor([0, 2, 2, 7]),
            torch.rand(4, generator=generator),
        )
        for _ in range(count)
    ]


def run_plain(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


BAG_BUDGET = 13_000


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)],
    ids=["SGD", "Adagrad"],
)
@pytest.mark.parametrize("ids", [ids_of, None], ids=["told", "not told"])
def test_an_accelerated_model_is_told_by_ids(small, make, ids):
    models = [BagModel(), BagModel()]
    optimizers = [make(list(model.parameters())) for model in models]
    for model, optimizer, budget in zip(models, optimizers, (None, BAG_BUDGET), strict=True):
        recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    pipeline = TrainPipeline(models[1], optimizers[1], schedule=LookAhead(2), ids=ids)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        losses = small.run(pipeline, iter(bag_batches()))

    assert losses == run_plain(models[0], optimizers[0], bag_batches())
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(found, expected)
    messages = [str(each.message) for each in warned]
    if ids is None:
        assert len(messages) == 1
        assert pipeline.mean_depth == 0
    else:
        assert messages == []
        assert pipeline.mean_depth == pytest.approx((2 * 10 + 1) / 12)
    recsys.restore(pipeline.detach())


@pytest.mark.filterwarnings("ignore:tables")
def test_ids_that_the_model_does_not_look_up_change_nothing(small):
    models = [
        BagModel(HotColdEmbeddingBag, optimizer=SGD(lr=0.1), **each)
        for each in ({}, {"budget": 3500})
    ]
    dense = [torch.optim.SGD(model.layer.parameters(), lr=0.1) for model in models]

    def wrong(batch):
        return dict.fromkeys(("bags.1", "bags.2", "bags.0"), (batch.ids[0] + 1, batch.offsets))

    batches = bag_batches()
    for batch in batches:
        batch.ids.clamp_(max=298)
    pipeline = TrainPipeline(models[1], dense[1], schedule=LookAhead(2), ids=wrong)
    losses = small.run(pipeline, iter(batches))

    assert losses == run_plain(models[0], dense[0], batches)


def test_a_name_that_is_no_module_of_ours_is_refused_with_those_that_are(small):
    model = BagModel(HotColdEmbeddingBag, optimizer=SGD(lr=0.1), budget=3500)
    pipeline = TrainPipeline(
        model, None, schedule=LookAhead(), ids=lambda batch: {"bag.0": batch.ids[0]}
    )

    with pytest.raises(ValueError, match=r"'bag.0' must be the name of .* \['bags.0', 'bags.1'"):
        pipeline.progress(iter(bag_batches()))


def test_two_collections_with_features_of_the_same_names_are_not_guessed(small, batches):
    class Towers(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.left = small.Model(small.tables, SGD(lr=0.1), **options)
            self.right = small.Model(small.tables, SGD(lr=0.1), **options)

        def forward(self, batch):
            left, _ = self.left(batch[0])
            right, output = self.right(batch[1])
            return left + right, output

    pairs = list(zip(batches, batches[::-1], strict=True))
    resident, tiered = Towers(), Towers(budget=14_000)
    expected = []
    for batch in pairs:
        loss, _ = resident(batch)
        loss.backward()
        expected.append(loss.item())
    told = {"left.embeddings": 0, "right.embeddings": 1}

    def ids(batch):
        return {name: batch[number].sparse_features for name, number in told.items()}

    with pytest.warns(UserWarning, match="it is not known which ids 'left.embeddings' and 1 more"):
        losses = small.run(TrainPipeline(tiered, None, schedule=LookAhead()), iter(pairs))
    pipeline = TrainPipeline(Towers(budget=14_000), None, schedule=LookAhead(), ids=ids)

    assert losses == expected
    assert small.run(pipeline, iter(pairs)) == expected
    assert pipeline.mean_depth > 1


def test_mini_batches_go_to_the_device_in_whatever_holds_them(small, batches):
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


def test_torchrecs_batches_and_models_are_taken(small, batches):
    pytest.importorskip("torchrec", exc_type=ImportError)
    runs = []
    for budget in (None, BUDGET):
        model = small.Model(small.tables, Adagrad(lr=0.1), budget=budget)
        kept = [type(batch)(batch.sparse_features.to_torchrec(), batch.labels) for batch in batches]
        schedule = None if budget is None else LookAhead()
        pipeline = TrainPipeline(model, None, schedule=schedule)
        runs.append((model, small.run(pipeline, iter(kept))))

    assert runs[0][1] == runs[1][1]
    assert pipeline.mean_depth > 1
    small.require_equal(runs[0][0], runs[1][0])
