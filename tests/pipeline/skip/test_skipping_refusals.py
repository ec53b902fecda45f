"""What skipping refuses by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import recsys
from recsys.datasets import BatchLoader
from recsys.embeddings import RowWiseAdagrad
from recsys.pipeline import (
    FAE,
    Guard,
    HotColdLoader,
    LookAhead,
    RandomDrop,
    Sequential,
    Subsample,
    TrainPipeline,
)
from tests.pipeline.skip.clicks import IMPORTANCE, POLICIES, Clicks, Run, options_of

pytestmark = pytest.mark.filterwarnings("ignore:schedule=.*room for")


def test_evaluation_on_the_training_iterator_is_refused():
    run = Run(LookAhead(2), POLICIES["observe"], options_of("host", None))
    iterator = iter(run.loader)
    run.pipeline.progress(iterator)
    run.model.eval()

    with pytest.raises(ValueError, match="evaluation must have an iterator of its own"):
        run.pipeline.progress(iterator)


def test_two_training_iterators_at_once_are_refused():
    run = Run(LookAhead(2), POLICIES["random_drop"], options_of("host", None))
    first, second = iter(run.loader), iter(BatchLoader(Clicks(), "test", 16, shuffle=False))
    run.pipeline.progress(first)

    with pytest.raises(ValueError, match="trains on one iterator at a time"):
        run.pipeline.progress(second)
    first.close()
    del first
    run.pipeline.progress(second)


@pytest.mark.parametrize("name", ["random_drop", "drop_input", "subsample"])
@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (HotColdLoader(Clicks(), "train", 16, np.arange(1600) % 3 == 0, FAE()), "HotColdLoader"),
        (
            BatchLoader(Clicks(), "train", 16, shuffle=False, rank=0, num_ranks=2),
            "several processes",
        ),
    ],
)
def test_a_loader_whose_mini_batches_cannot_be_refilled_is_refused(name, loader, named):
    with pytest.raises(ValueError, match=named):
        Run(Sequential(), POLICIES[name]).pipeline.progress(iter(loader))


def test_a_model_without_predictions_is_refused_with_a_guard():
    run = Run(Sequential(), POLICIES["freeze_rows guarded"])
    plain = run.pipeline._forward
    run.pipeline._forward = lambda batch: (plain(batch)[0], None)

    with pytest.raises(ValueError, match=r"needs the predictions.*NoneType.*guard.every to 0"):
        run.pipeline.progress(iter(run.loader))


def test_a_schedule_that_looks_too_far_ahead_is_refused():
    with pytest.raises(ValueError, match=r"at most 31 mini-batches ahead, .* got 32"):
        Run(LookAhead(32), POLICIES["observe"], options_of("host", None))


@pytest.mark.parametrize("name", ["drop_input", "freeze_rows", "random_drop"])
def test_training_after_close_is_refused_and_evaluation_is_not(name):
    run = Run(LookAhead(2), POLICIES[name], options_of("host", None)).train(3)

    run.pipeline.skipping.close()

    with pytest.raises(ValueError, match=r"skip=\w+\(.*\) was closed; build a new TrainPipeline"):
        run.train(1)
    run.model.eval()
    run.pipeline.progress(iter(BatchLoader(Clicks(seed=5), "train", 16, shuffle=False)))


@pytest.mark.parametrize("policy", [IMPORTANCE, RandomDrop(weighted=True), Subsample()])
def test_a_model_that_ignores_weights_is_refused(policy):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True))
    recsys.accelerate(model, optimizer=RowWiseAdagrad(lr=0.1))

    with pytest.raises(ValueError, match=r"gives samples weights, but Sequential does not say"):
        TrainPipeline(model, None, skip=policy)


@pytest.mark.parametrize("guard", [None, Guard(every=64, steps=12)])
def test_labels_that_are_not_0_or_1_are_refused(guard):
    run = Run(Sequential(), replace(IMPORTANCE, guard=guard))
    batch = next(iter(run.loader))
    batch.labels[3] = 7.5

    with pytest.raises(ValueError, match=r"labels \(B,\) of 0 and 1, got"):
        run.pipeline.progress(iter([batch]))
