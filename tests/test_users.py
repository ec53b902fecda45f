"""What users do between lookup, backward, step, evaluation, saving and copying; see `users.py`."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests import users


@pytest.mark.filterwarnings("ignore:tables", "ignore:budget=")
@pytest.mark.parametrize("name", ["Users", "PipelineUsers"])
def test_whatever_users_do_tiers_and_resident_tables_stay_equal(name):
    run_state_machine_as_test(getattr(users, name), settings=settings(stateful_step_count=25))
