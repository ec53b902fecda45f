"""FAE's scheduler: when the rate changes, and what it says."""

import json

import pytest

from recsys.pipeline import FAE
from recsys.pipeline.fae import ShuffleScheduler


def rates_after(losses, **constants):
    scheduler = ShuffleScheduler(FAE(**constants))
    rates = []
    for loss in losses:
        scheduler.observe(loss)
        rates.append(scheduler.rate)
    return rates


@pytest.mark.parametrize(
    ("losses", "constants", "last"),
    [
        ([1.0, 1.1, 1.2], {}, [50, 25, 12.5]),  # a rise halves the rate at once
        (range(9, 0, -1), {}, [50, 50, 50, 50, 100, 100, 100, 100, 100]),  # four falls double it
        ([9, 8, 7, 6, 6, 5, 4, 3, 2], {}, [50, 100]),  # a standstill begins the falls anew
        ([9, 8, 7, 6, 7, 6, 5, 4, 3], {}, [50, 25, 25, 25, 25, 50]),  # and so does a rise
        (range(20), {}, [1]),
        (range(20), {"min_rate": 30, "rate": 40}, [30]),
        (range(40, 0, -1), {"max_rate": 60}, [60]),
        ([1.0, float("nan"), 2.0], {}, [50, 50, 50]),
        ([1.0, 2.0, 3.0], {"is_adaptive": False}, [50, 50, 50]),
    ],
)
def test_the_rate_follows_the_losses_within_its_bounds(losses, constants, last):
    assert rates_after(losses, **constants)[-len(last) :] == last


@pytest.mark.parametrize(
    ("rate", "num_batches", "share"),
    [(50, 10, 5), (50, 11, 6), (1, 10, 1), (100, 10, 10), (1, 1000, 10), (50, 0, 0), (50, 1, 1)],
)
def test_a_share_is_at_least_one_mini_batch(rate, num_batches, share):
    assert ShuffleScheduler(FAE(rate=rate)).share_of(num_batches) == share


def test_a_state_goes_on_where_it_was_taken():
    one, other = ShuffleScheduler(FAE()), ShuffleScheduler(FAE())
    for loss in (9, 8, 7, 6):
        one.observe(loss)

    other.load_state_dict(json.loads(json.dumps(one.state_dict())))

    for scheduler in (one, other):
        scheduler.observe(5)
        assert (scheduler.rate, scheduler.num_swaps) == (100, 5)
