"""What parts of the pipeline refuse: batches, outputs, and states; and the name in the error."""

import numpy as np
import pytest
import torch

from recsys.errors import ConfigError
from recsys.pipeline import Auto, Guard
from recsys.pipeline.auto import Choice
from recsys.pipeline.micro_batches import (
    concatenate,
    join_outputs,
    labelled_samples,
    select_samples,
)
from recsys.pipeline.skip.guard import QualityGuard
from recsys.pipeline.skip.refill import EVERYTHING, Chosen, Position, Refill
from recsys.pipeline.stalls import STAGES, StageClock
from tests.unit.pipeline.test_micro_batches import Sheet

SAMPLES = torch.tensor([2, 0])
PARTS = [torch.tensor([1]), SAMPLES]


class Selected:
    """Can be taken apart, but not joined."""

    def select(self, samples):
        return self


def join(first, second):
    return concatenate([first, second], "skip=test")


def guard_labels():
    QualityGuard(Guard()).add(0, torch.zeros(2), torch.tensor([0.5, 1]))


def refill(chosen, batch):
    Refill(lambda _: chosen, Position(), "skip=test").take(iter([batch]), lambda each: each)


def count_samples():
    labelled_samples((torch.arange(8), torch.tensor([0, 5, 6, 8]), torch.zeros(3)))


REFUSALS = [
    ("labels of 0.5", guard_labels, ValueError, "labels"),
    (
        "samples of another number",
        lambda: select_samples(torch.zeros(4), SAMPLES, 3),
        ValueError,
        "(4,)",
    ),
    (
        "samples of a number",
        lambda: select_samples(torch.tensor(1.0), SAMPLES, 3),
        ValueError,
        "()",
    ),
    (
        "samples of a set",
        lambda: select_samples({"ids": {1, 2, 3}}, SAMPLES, 3),
        TypeError,
        "set",
    ),
    (
        "other names to join",
        lambda: join(Sheet(torch.ones(1), "a"), Sheet(torch.ones(1), "b")),
        ValueError,
        "'a'",
    ),
    (
        "nothing and a number to join",
        lambda: join((torch.ones(1), None), (torch.ones(1), 3)),
        ValueError,
        "None",
    ),
    ("an object to join", lambda: join(Selected(), Selected()), TypeError, "Selected"),
    (
        "outputs of no samples",
        lambda: join_outputs([torch.zeros(4), torch.zeros(4)], PARTS),
        ValueError,
        "(4,)",
    ),
    ("sets of outputs", lambda: join_outputs([{1}, {2}], PARTS), TypeError, "set"),
    ("samples that cannot be counted", count_samples, ValueError, "[3, 4, 8]"),
    (
        "weights of a batch that has none",
        lambda: refill(Chosen(None, np.ones(2, np.float32)), torch.arange(2)),
        TypeError,
        "weights",
    ),
    ("a batch of unknown size", lambda: refill(EVERYTHING, "abc"), ValueError, "str"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (lambda: Choice(Auto()), {"turns": []}, "schedule choice state"),
        (StageClock, {"seconds": {}}, "clock state"),
        (StageClock, {"seconds": dict.fromkeys(STAGES[2:], 1.0)}, "clock state"),
        (StageClock, {"seconds": [0.0] * len(STAGES)}, "clock state"),
        (StageClock, {"more": 1}, "clock state"),
    ],
)
def test_a_malformed_state_is_refused_by_name_and_changes_nothing(make, change, name):
    owner = make()
    before = owner.state_dict()

    with pytest.raises(ConfigError) as raised:
        owner.load_state_dict(before | change)

    assert name in str(raised.value)
    assert owner.state_dict() == before
