"""What skipping refuses by name, and states of other pipelines."""

import numpy as np
import pytest

from recsys.datasets import BatchLoader
from recsys.pipeline import (
    FAE,
    HotColdLoader,
    LookAhead,
    RandomDrop,
    Sequential,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:schedule=.*room for"),
]


def test_evaluation_on_the_training_iterator_is_refused(skips):
    run = skips.Run(LookAhead(2), skips.POLICIES["observe"], skips.options_of("host", None))
    iterator = iter(run.loader)
    run.pipeline.progress(iterator)
    run.model.eval()

    with pytest.raises(ValueError, match="evaluation must have an iterator of its own"):
        run.pipeline.progress(iterator)


def test_two_training_iterators_at_once_are_refused(skips):
    run = skips.Run(LookAhead(2), skips.POLICIES["random_drop"], skips.options_of("host", None))
    other = BatchLoader(skips.Clicks(), "test", 16, shuffle=False)
    first, second = iter(run.loader), iter(other)
    run.pipeline.progress(first)

    with pytest.raises(ValueError, match="trains on one iterator at a time"):
        run.pipeline.progress(second)
    first.close()
    del first
    run.pipeline.progress(second)


def adaptive_loader(source):
    return HotColdLoader(source, "train", 16, np.arange(1600) % 3 == 0, FAE())


def part_loader(source):
    return BatchLoader(source, "train", 16, shuffle=False, rank=0, num_ranks=2)


@pytest.mark.parametrize("name", ["random_drop", "drop_input", "subsample"])
@pytest.mark.parametrize(
    ("make", "named"), [(adaptive_loader, "HotColdLoader"), (part_loader, "several processes")]
)
def test_a_loader_whose_mini_batches_cannot_be_refilled_is_refused(skips, name, make, named):
    run = skips.Run(Sequential(), skips.POLICIES[name])

    with pytest.raises(ValueError, match=named):
        run.pipeline.progress(iter(make(skips.Clicks())))


def test_a_model_without_predictions_is_refused_with_a_guard(skips):
    run = skips.Run(Sequential(), skips.POLICIES["freeze_rows guarded"])
    plain = run.pipeline._forward
    run.pipeline._forward = lambda batch: (plain(batch)[0], None)

    with pytest.raises(ValueError, match=r"guard needs the predictions.*NoneType.*guard=None"):
        run.pipeline.progress(iter(run.loader))


def test_a_schedule_that_looks_too_far_ahead_is_refused(skips):
    with pytest.raises(ValueError, match=r"at most 31 mini-batches ahead, .* got 32"):
        skips.Run(LookAhead(32), skips.POLICIES["observe"], skips.options_of("host", None))


@pytest.mark.parametrize("name", ["drop_input", "freeze_rows", "random_drop"])
def test_training_after_close_is_refused_and_evaluation_is_not(skips, name):
    run = skips.Run(LookAhead(2), skips.POLICIES[name], skips.options_of("host", None)).train(3)

    run.pipeline.skipping.close()

    with pytest.raises(ValueError, match=r"skip=\w+\(.*\) was closed; build a new TrainPipeline"):
        run.train(1)
    run.model.eval()
    run.pipeline.progress(iter(BatchLoader(skips.Clicks(seed=5), "train", 16, shuffle=False)))


def test_a_state_without_skipping_is_loaded(skips):
    plain = skips.Run(LookAhead(2), None, skips.options_of("host", None)).train(5)
    state = plain.state()

    run = skips.Run(LookAhead(2), RandomDrop(0.2), skips.options_of("host", None)).load(state)

    assert run.pipeline.skipping.num_seen == 0
    run.train(8)
