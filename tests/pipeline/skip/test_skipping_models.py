"""Models and mini-batches of users: separate bags, tuples, devices, processes that end."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import recsys
from recsys.embeddings import RowWiseAdagrad
from recsys.pipeline import (
    Importance,
    LookAhead,
    Sequential,
    TrainPipeline,
)
from tests.pipeline.skip import clicks

pytestmark = pytest.mark.filterwarnings("ignore:schedule=.*room for")


class Bags(torch.nn.Module):
    """A model with separate bags; a mini-batch is a tuple of tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.EmbeddingBag(900, 4, mode="sum", sparse=True)
        self.second = torch.nn.EmbeddingBag(700, 4, mode="mean", sparse=True)
        self.single = torch.nn.Embedding(800, 4, sparse=True)
        self.layer = torch.nn.Linear(12, 1)

    def forward(self, batch):
        rows, history, labels = batch
        pooled = [self.first(rows[:, :1]), self.second(history), self.single(rows[:, 1])]
        logits = self.layer(torch.cat(pooled, 1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss, (loss.detach(), logits.detach(), labels)


def inputs_of(batch):
    rows, history, _ = batch
    return {"first": rows[:, :1], "second": history, "single": rows[:, 1]}


def tuples(num_batches=150, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        rows = torch.randint(0, 5, (16, 2), generator=generator)
        history = torch.randint(0, 4, (16, 3), generator=generator)
        is_rare = torch.rand(16, generator=generator) < 0.3
        rows[is_rare] = torch.randint(0, 700, (int(is_rare.sum()), 2), generator=generator)
        yield rows, history, (torch.rand(16, generator=generator) < 0.3).float()


def test_an_accelerated_model_with_bags_trains_on_plain_iterators_of_tuples():
    results = []
    for schedule in (Sequential(), LookAhead(4)):
        model = Bags()
        recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1), budget=30_000)
        pipeline = TrainPipeline(
            model,
            torch.optim.SGD(model.layer.parameters(), lr=0.1),
            schedule=schedule,
            ids=inputs_of,
            skip=clicks.POLICIES["drop_input guarded"],
        )
        losses = [loss.item() for loss, _ in pipeline.steps(tuples())]
        results.append((losses, pipeline.skipping.position, model.first.weight.clone()))

    (losses, position, rows), (others, other_position, other_rows) = results
    assert losses == others
    assert position == other_position
    assert torch.equal(rows, other_rows)
    assert position.num_seen == 150 * 16 > position.num_kept
    # All mini-batches are full but the last.
    assert len(losses) == -(-position.num_kept // 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["drop_input", "freeze_rows", "subsample", "importance"])
def test_a_device_leaves_out_the_same_samples_at_any_depth(name):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    policies = clicks.POLICIES | {"importance": Importance(0.3, warm_up=0, bits=10, guard=None)}
    runs = []
    for schedule in (Sequential(), LookAhead(3)):
        model = clicks.Model(**clicks.options_of("host", None), device=device).to(device)
        runs.append(clicks.Run(schedule, policies[name], model=model, device=device).train())

    # Floats on CUDA are added in any order, so what is left out may differ a little.
    positions = [run.pipeline.skipping.position for run in runs]
    assert positions[0].num_seen == positions[1].num_seen == 1600
    report = runs[0].pipeline.skipping.report()
    assert positions[0].num_kept < 1600 or report["num_lookups_left_out"]


def test_a_model_whose_ids_are_unknown_is_refused():
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))
    pipeline = TrainPipeline(model, None, skip=clicks.POLICIES["drop_input"])

    with pytest.raises(ValueError, match=r"not known which ids 'first' and 2 more .*give.*ids=fn"):
        pipeline.progress(tuples())


def test_a_module_without_a_bag_for_each_sample_is_refused():
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))

    def twice(batch):
        return inputs_of(batch) | {"first": batch[0].flatten().unsqueeze(1)}

    pipeline = TrainPipeline(model, None, ids=twice, skip=clicks.POLICIES["drop_input"])
    with pytest.raises(ValueError, match=r"'first' looks up 32 bags for a mini-batch of 16"):
        pipeline.progress(tuples())


@dataclass
class TorchRecBatch:
    """As TorchRec's loaders give it."""

    dense_features: torch.Tensor
    sparse_features: Any
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return self


@pytest.mark.parametrize("name", ["random_drop", "drop_input"])
def test_features_of_torchrec_are_left_out_like_others(name):
    pytest.importorskip("torchrec")

    def batches(loader):
        for batch in loader:
            features = batch.sparse_features.to_torchrec()
            yield TorchRecBatch(batch.dense_features, features, batch.labels)

    policy, options = clicks.POLICIES[name], clicks.options_of("host", None)
    expected = clicks.Run(LookAhead(2), policy, options).train()
    run = clicks.Run(LookAhead(2), policy, options)

    run.losses = [loss.item() for loss, _ in run.pipeline.steps(batches(run.loader))]

    clicks.require_equal(expected, run)
    assert run.pipeline.skipping.position == expected.pipeline.skipping.position
