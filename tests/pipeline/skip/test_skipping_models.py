"""Models and mini-batches of users: separate bags, tuples, devices, processes that end."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import recsys
from recsys.embeddings.optimizer import RowWiseAdagrad
from recsys.pipeline import (
    Importance,
    LookAhead,
    RandomDrop,
    Sequential,
    TrainPipeline,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
    pytest.mark.filterwarnings("ignore:staleness. a share"),
]


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


@pytest.mark.in_ci("30000")
@pytest.mark.filterwarnings("ignore:schedule=.*no effect")
@pytest.mark.parametrize("budget", [None, 30_000])
def test_an_accelerated_model_with_bags_trains_on_plain_iterators_of_tuples(skips, budget):
    results = []
    for schedule in (Sequential(), LookAhead(4)):
        model = Bags()
        recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1), budget=budget)
        pipeline = TrainPipeline(
            model,
            torch.optim.SGD(model.layer.parameters(), lr=0.1),
            schedule=schedule,
            ids=inputs_of,
            skip=skips.POLICIES["drop_input guarded"],
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
def test_a_device_leaves_out_the_same_samples_at_any_depth(skips, name):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    policies = skips.POLICIES | {"importance": Importance(0.3, warm_up=0, bits=10, guard=None)}
    runs = []
    for schedule in (Sequential(), LookAhead(3)):
        model = skips.Model(**skips.options_of("host", None), device=device).to(device)
        runs.append(skips.Run(schedule, policies[name], model=model, device=device).train())

    # Floats on CUDA are added in any order, so what is left out may differ a little.
    positions = [run.pipeline.skipping.position for run in runs]
    assert positions[0].num_seen == positions[1].num_seen == 1600
    report = runs[0].pipeline.skipping.report()
    assert positions[0].num_kept < 1600 or report["num_lookups_left_out"]


def test_a_model_whose_ids_are_unknown_is_refused(skips):
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))
    pipeline = TrainPipeline(model, None, skip=skips.POLICIES["drop_input"])

    with pytest.raises(ValueError, match=r"not known which ids 'first' and 2 more .*give.*ids=fn"):
        pipeline.progress(tuples())


def test_a_module_without_a_bag_for_each_sample_is_refused(skips):
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))

    def twice(batch):
        return inputs_of(batch) | {"first": batch[0].flatten().unsqueeze(1)}

    pipeline = TrainPipeline(model, None, ids=twice, skip=skips.POLICIES["drop_input"])
    with pytest.raises(ValueError, match=r"'first' looks up 32 bags for a mini-batch of 16"):
        pipeline.progress(tuples())


def test_an_id_that_is_no_row_raises_in_its_own_step(skips):
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))
    batches = list(tuples(4))
    batches[2][0][3, 1] = 5000
    pipeline = TrainPipeline(model, None, ids=inputs_of, skip=skips.POLICIES["drop_input"])
    iterator = iter(batches)
    pipeline.progress(iterator)
    pipeline.progress(iterator)

    with pytest.raises(recsys.errors.IdOutOfRange, match="5000"):
        pipeline.progress(iterator)
    pipeline.progress(iterator)


def test_samples_of_a_dropped_plain_iterator_are_dropped():
    model = Bags()
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))
    pipeline = TrainPipeline(model, None, skip=RandomDrop(0.3), ids=inputs_of)
    first = tuples()
    pipeline.progress(first)
    assert pipeline.skipping.position.offset > 0
    seen = pipeline.skipping.num_seen
    del first

    pipeline.progress(tuples(seed=1))

    assert pipeline.skipping._refill._positions[0].num_seen > seen
    assert pipeline.skipping.position.num_batches == 2


SCRIPT = """
import torch
from recsys.batch import Batch, JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.staleness.settings import Staleness
from recsys.pipeline import DropInput, TrainPipeline

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = TableConfig(name="a", num_embeddings=4000, embedding_dim=8)
        rule = SGD(lr=0.1)
        self.bags = HotColdEmbeddingBagCollection([table], optimizer=rule, budget=100_000)

    def forward(self, batch):
        return self.bags(batch.sparse_features).values().square().mean(), None

ids = JaggedIds.from_one_hot(["a"], torch.arange(16).unsqueeze(0))
batch = Batch(torch.zeros(16, 1), ids, torch.zeros(16))
pipeline = TrainPipeline(Model(), None, skip=DropInput(0.2, Staleness(max_rows=100), None))
print(len(list(pipeline.steps([batch] * 5))))
"""


@pytest.mark.outside_ci
@pytest.mark.slow
def test_a_process_ends_normally_with_a_pipeline_that_skips():
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stdout, found.stderr) == (0, "5\n", "")


@dataclass
class TorchRecBatch:
    """As TorchRec's loaders give it."""

    dense_features: torch.Tensor
    sparse_features: Any
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return self


@pytest.mark.parametrize("name", ["random_drop", "drop_input"])
def test_features_of_torchrec_are_left_out_like_others(skips, name):
    pytest.importorskip("torchrec")

    def batches(loader):
        for batch in loader:
            features = batch.sparse_features.to_torchrec()
            yield TorchRecBatch(batch.dense_features, features, batch.labels)

    policy, options = skips.POLICIES[name], skips.options_of("host", None)
    expected = skips.Run(LookAhead(2), policy, options).train()
    run = skips.Run(LookAhead(2), policy, options)

    run.losses = [loss.item() for loss, _ in run.pipeline.steps(batches(run.loader))]

    skips.require_equal(expected, run)
    assert run.pipeline.skipping.position == expected.pipeline.skipping.position
