"""Where a run is: full steps, and reports."""

from types import SimpleNamespace

import pytest
import torch

from recsys.pipeline.stalls import StageClock
from recsys.train.callbacks import RunCallbacks
from recsys.train.progress import Progress
from recsys.train.run_folder import RunFolder
from tests.train.resumed_runs import history


class Loader:
    """Of 10 samples, in mini-batches of 4: three steps an epoch."""

    batch_size = 4
    source = SimpleNamespace(splits={"train": range(10)})

    def __len__(self):
        return 3


@pytest.fixture
def make(tmp_path):
    """Makes the progress of two epochs."""

    def build(*, skips=False, loader=None):
        loader = loader or Loader()
        folder, callbacks = RunFolder(tmp_path), RunCallbacks()
        return Progress(folder, StageClock(), loader, 2, callbacks, skips=skips)

    return build


def add(progress, num_samples, num_seen=None):
    logits = torch.randn(num_samples, generator=torch.Generator().manual_seed(num_samples))
    progress.add(logits.exp().mean(), logits, torch.arange(num_samples) % 2, num_seen)
    return progress.full_step


def test_a_step_that_skips_nothing_is_a_full_step(make):
    plain, skipping = make(), make(skips=True)

    sizes, seen = [4, 4, 2, 4, 4, 2], [4, 8, 10, 14, 18, 20]
    assert [add(plain, size) for size in sizes] == [1, 2, 3, 4, 5, 6]
    found = [add(skipping, size, number) for size, number in zip(sizes, seen, strict=True)]
    assert found == [1, 2, 3, 4, 5, 6]
    assert plain.num_full_steps == 6


def test_a_step_counts_as_much_as_the_samples_that_it_uses_up(make):
    progress = make(skips=True)

    assert [add(progress, 2, num_seen) for num_seen in (3, 7, 9, 15, 20)] == [0, 1, 2, 4, 6]


@pytest.mark.parametrize(("every", "passed"), [(1, 4), (2, 3), (3, 2), (4, 1), (7, 0)])
def test_a_multiple_is_passed_once(make, every, passed):
    progress, found = make(skips=True), 0
    for num_seen in (3, 7, 9, 15, 20):
        add(progress, 2, num_seen)
        found += progress.has_passed(every)

    assert found == passed


@pytest.mark.parametrize("times", [1, 2, 5, 100])
def test_the_last_step_is_one_of_any_number_of_steps(make, times):
    progress, found = make(skips=True), []
    for num_seen in (3, 7, 9, 15, 20):
        add(progress, 2, num_seen)
        found.append(progress.has_passed_one_of(times))

    assert found[-1]
    assert sum(found) <= times


def test_reports_cover_every_sample_once_across_a_resume(make, tmp_path):
    first, resumed = make(), make()
    with first.bar(is_drawn=False):
        for number in (4, 4, 2):
            first._clock.seconds["forward"] += 1
            add(first, number)
        first.report()
        first.report()  # of no step: writes no line

    resumed._clock.load_state_dict(first._clock.state_dict())
    resumed.load_state_dict(first.state_dict())
    with resumed.bar(is_drawn=False):
        resumed._clock.seconds["forward"] += 2
        add(resumed, 4)
        resumed.report()

    lines = history(tmp_path)
    assert [(line["step"], line["num_samples"], line["epoch"]) for line in lines] == [
        (3, 10, 0),
        (4, 14, 1),
    ]
    assert resumed.has_passed(4)
    assert resumed._reported == (14, 5.0)
