"""A schedule chosen by what steps take, which tests say here."""

import json

import pytest

from recsys.pipeline import Auto, LookAhead, Sequential
from recsys.pipeline.auto import Choice

CANDIDATES = (Sequential(), LookAhead(2), LookAhead(4))


def run(choice, seconds_of):
    """Until something is chosen; what every step ran by."""
    ran = []
    while choice.chosen is None:
        ran.append(choice.current)
        choice.add(seconds_of(choice.current, len(ran)))
    return ran


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([3.0, 2.0, 1.0], LookAhead(4)),
        ([3.0, 1.0, 2.0], LookAhead(2)),
        ([1.0, 2.0, 3.0], Sequential()),
        ([1.0, 0.99, 0.985], Sequential()),  # for less than 2 % the simpler one stays
        ([1.0, 0.99, 0.97], LookAhead(4)),
    ],
)
def test_the_one_whose_steps_take_least_is_chosen(seconds, expected):
    choice = Choice(Auto())

    ran = run(choice, lambda schedule, _: seconds[CANDIDATES.index(schedule)])

    assert choice.chosen == choice.current == expected
    assert len(ran) == 3 * 3 * (8 + 16)
    assert ran[: 3 * 24] == [each for each in CANDIDATES for _ in range(24)]
    assert [each["step_ms"] for each in choice.describe()["measured"]] == pytest.approx(
        [1e3 * each for each in seconds]
    )


def test_steps_in_which_the_window_changes_are_not_counted():
    choice = Choice(Auto(CANDIDATES[:2], steps_per_turn=1, num_rounds=1))

    def seconds_of(schedule, step):
        first_steps = (step - 1) % 9 < 8
        return 100.0 if first_steps == (schedule == LookAhead(2)) else 1.0

    run(choice, seconds_of)

    assert choice.chosen == LookAhead(2)
    assert choice.describe() == {
        "chosen": {"name": "lookahead", "depth": 2},
        "measured": [
            {"name": "sequential", "step_ms": 100e3},
            {"name": "lookahead", "depth": 2, "step_ms": 1e3},
        ],
    }


@pytest.mark.parametrize("num_steps", [0, 30, 24 * 3 + 5, 24 * 9 - 1, 24 * 9])
def test_a_resumed_choice_begins_its_last_turn_again_and_keeps_the_others(num_steps):
    seconds = [3.0, 1.0, 2.0]
    choice, resumed = Choice(Auto()), Choice(Auto())
    for _ in range(num_steps):
        choice.add(seconds[CANDIDATES.index(choice.current)])

    resumed.load_state_dict(json.loads(json.dumps(choice.state_dict())))

    assert resumed.current == choice.current
    assert resumed.describe() == choice.describe()
    ran = run(resumed, lambda schedule, _: seconds[CANDIDATES.index(schedule)])
    assert len(ran) == 24 * (9 - num_steps // 24)
    assert resumed.chosen == LookAhead(2)
