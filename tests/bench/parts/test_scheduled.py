import numpy as np
import pytest
import torch

from recsys.bench.parts.scheduled import (
    SCHEDULES,
    ScheduledSteps,
    TurnSteps,
    num_ahead,
    parse_schedules,
    steps_of_turn,
)
from recsys.config import ModelConfig, OptimizerConfig, TrainConfig
from recsys.datasets import SyntheticCriteo
from recsys.errors import ConfigError
from recsys.train.loop.tier_report import tiers_of
from recsys.train.parts.build import build_model

BATCH_SIZE, TABLES = 16, (3000, 2000, 7)


class Trained:
    """A small model, and which mini-batches have been made for it."""

    def __init__(self, schedule, budget, steps):
        source = SyntheticCriteo(num_samples=10_000, table_sizes=TABLES)
        config = TrainConfig(
            budget=budget,
            model=ModelConfig(embedding_dim=8, dense_arch=(8,), over_arch=(4, 1)),
            optimizer=OptimizerConfig(name="sgd", lr=0.1),
        )
        self.model, self.optimizers = build_model(config, source)
        self.num_made, self.source = 0, source
        self.steps = self.under(schedule, steps)

    def under(self, schedule, steps):
        return ScheduledSteps(self.model, self.optimizers, schedule, self.next_batch, steps)

    def next_batch(self):
        begin = self.num_made * BATCH_SIZE
        self.num_made += 1
        return self.source.read(np.arange(begin, begin + BATCH_SIZE))


@pytest.mark.parametrize("schedule", ["lookahead-1", "lookahead-4"])
def test_turns_under_a_schedule_train_as_those_of_another_do(schedule):
    expected = Trained("sequential", "60KiB", TurnSteps(4, 4))
    ours = Trained(schedule, "60KiB", TurnSteps(4, 4))

    for turn_ended in (ours.steps.rest, ours.steps.leave, ours.steps.leave):
        expected.steps.turn()
        expected.steps.rest()
        ours.steps.turn()
        turn_ended()

    expected.steps.leave()
    theirs = expected.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_the_window_goes_on_from_turn_to_turn_and_every_mini_batch_is_made_before_a_turn():
    ours = Trained("lookahead-2", "60KiB", TurnSteps(3, 2))

    made = []
    for _ in range(3):
        ours.steps.turn()
        ours.steps.rest()
        made.append(ours.num_made)

    assert made == [5 + 2, 10 + 2, 15 + 2]
    ours.steps.leave()


@pytest.mark.parametrize("schedule", ["sequential", "lookahead-2"])
def test_a_turn_counts_what_its_timed_steps_look_up_and_fetch(schedule):
    ours = Trained(schedule, "60KiB", TurnSteps(8, 4))

    turn = ours.steps.turn()

    assert turn.counts.num_lookups == 4 * BATCH_SIZE * len(TABLES)
    assert turn.counts.num_fetched == turn.counts.num_rows - turn.counts.num_rows_hit > 0
    assert turn.mean_depth == num_ahead(schedule)
    assert 0 <= turn.exposed_seconds <= turn.seconds
    ours.steps.leave()


def test_at_rest_no_row_is_on_its_way_and_the_window_keeps_its_claims():
    ours = Trained("lookahead-2", "60KiB", TurnSteps(4, 2))

    ours.steps.turn()
    ours.steps.rest()

    (tiers,) = tiers_of(ours.model)
    assert tiers.residency.queue.last == 0
    assert tiers.ahead

    ours.steps.leave()

    assert not tiers.ahead


def test_two_schedules_take_turns_on_one_model():
    ours = Trained("lookahead-2", "60KiB", TurnSteps(4, 2))
    other = ours.under("sequential", TurnSteps(4, 2))

    for _ in range(2):
        for steps in (ours.steps, other):
            turn = steps.turn()
            steps.leave()

            assert turn.counts.num_lookups == 2 * BATCH_SIZE * len(TABLES)


def test_a_resident_model_has_nothing_to_count():
    ours = Trained("sequential", "", TurnSteps(2, 2))

    turn = ours.steps.turn()
    ours.steps.rest()

    assert not any(turn.counts)
    assert turn.exposed_seconds == 0


@pytest.mark.parametrize(
    ("batch_size", "schedules", "expected"),
    [
        (2048, ["sequential"], (4, 4)),
        (128, ["sequential"], (16, 16)),
        (2048, ["sequential", "lookahead-2"], (8, 4)),
        (128, ["lookahead-2"], (16, 16)),
        (4096, ["lookahead-4", "sequential"], (16, 8)),
    ],
)
def test_a_turn_has_steps_enough_to_use_up_what_was_looked_ahead_to(
    batch_size, schedules, expected
):
    assert steps_of_turn(batch_size, schedules) == expected


def test_a_quick_turn_is_as_short_as_its_schedules_allow():
    assert steps_of_turn(128, ["sequential"], is_quick=True) == (1, 1)
    assert steps_of_turn(128, ["lookahead-2"], is_quick=True) == (8, 4)


def test_schedules_are_named_once_each_with_commas_between():
    assert parse_schedules("lookahead-2, sequential,lookahead-2") == ("lookahead-2", "sequential")


def test_a_name_of_no_schedule_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=rf"--schedule: 'fae'.*{', '.join(SCHEDULES)}"):
        parse_schedules("sequential,fae")
