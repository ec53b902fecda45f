from types import SimpleNamespace

import pytest

from recsys.train.loop.full_steps import FullSteps


class Loader:
    """Of 10 samples, in mini-batches of 4: three steps an epoch."""

    batch_size, split = 4, "train"
    source = SimpleNamespace(splits={"train": range(10)})

    def __len__(self):
        return 3


def test_a_step_that_skips_nothing_is_a_full_step():
    plain, skipping = FullSteps(Loader(), 2), FullSteps(Loader(), 2)

    seen = [4, 8, 10, 14, 18, 20]
    assert [skipping.advance(0, num_seen) for num_seen in seen] == [1, 2, 3, 4, 5, 6]
    assert [plain.advance(step, None) for step in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert plain.num_steps == 6


def test_a_step_counts_as_much_as_the_samples_that_it_uses_up():
    full_steps = FullSteps(Loader(), 2)

    assert [full_steps.advance(0, num_seen) for num_seen in (3, 7, 9, 15, 20)] == [0, 1, 2, 4, 6]


@pytest.mark.parametrize(("every", "passed"), [(1, 4), (2, 3), (3, 2), (4, 1), (7, 0)])
def test_a_multiple_is_passed_once(every, passed):
    full_steps, found = FullSteps(Loader(), 2), 0
    for num_seen in (3, 7, 9, 15, 20):
        full_steps.advance(0, num_seen)
        found += full_steps.has_passed(every)

    assert found == passed


def test_the_last_step_is_one_of_any_number_of_steps():
    for times in (1, 2, 5, 100):
        full_steps, found = FullSteps(Loader(), 2), []
        for num_seen in (3, 7, 9, 15, 20):
            full_steps.advance(0, num_seen)
            found.append(full_steps.has_passed_one_of(times))
        assert found[-1]
        assert sum(found) <= times


@pytest.mark.parametrize(("every_steps", "expected"), [(0, 29), (7, 21)])
def test_there_are_ten_evaluations_an_epoch_unless_the_user_says_more(every_steps, expected):
    class Longer(Loader):
        def __len__(self):
            return 50

    full_steps, found = FullSteps(Longer(), 3), 0
    for step in range(1, full_steps.num_steps):  # the last evaluation is after the last step
        full_steps.advance(step, None)
        found += full_steps.is_evaluation_due(every_steps)

    assert found == expected
