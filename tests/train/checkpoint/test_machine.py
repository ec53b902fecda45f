"""Checkpoints of one training in any order of steps, writes, failures and restarts."""

import os

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.train.checkpoint.machine import CheckpointMachine

NUM_EXAMPLES = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else 8


def test_every_listed_checkpoint_restores_the_numbers_of_its_cut():
    run_state_machine_as_test(
        CheckpointMachine,
        settings=settings(max_examples=NUM_EXAMPLES, stateful_step_count=25),
    )
