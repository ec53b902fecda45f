"""Plain PyTorch and accelerated models agree, whatever a program does; see `tests/programs.py`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import run_program

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* were used in the cold tier"),
    pytest.mark.filterwarnings("ignore:.* its gradient has all rows"),
]

NUM_PROGRAMS = {"stress": 1500, "ci": 12}
num_programs = NUM_PROGRAMS.get(settings.get_current_profile_name(), 20)
seeds = given(seed=st.integers(0, 2**32))


@seeds
@settings(max_examples=num_programs)
def test_random_programs_agree(seed):
    run_program(seed)


def test_most_programs_run_to_their_end():
    found = [run_program(seed) for seed in range(12)]

    assert found.count("equal") >= 6
