"""What users do between lookup, backward, step, evaluation, saving and copying; see `users.py`."""

import runpy
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

USERS = runpy.run_path(str(Path(__file__).with_name("users.py")))


@pytest.mark.in_ci("PipelineUsers")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Users", "PipelineUsers"])
def test_whatever_users_do_tiers_and_resident_tables_stay_equal(name):
    run_state_machine_as_test(USERS[name], settings=settings(stateful_step_count=25))
