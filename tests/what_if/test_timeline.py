"""Seconds of steps and transfers, composed by hand and by `compose`."""

import numpy as np
import pytest

from recsys.embeddings.tiers.transfers import MoveSeconds
from recsys.what_if.costs import LineOfCosts, TransferCosts, probe
from recsys.what_if.replay import Replayed
from recsys.what_if.timeline import compose, solve

# A fetched row takes 1 second, and one written back 2; a transfer has no cost of its own.
COSTS = TransferCosts(LineOfCosts(0.0, 1.0), LineOfCosts(0.0, 2.0))
SHARED = COSTS._replace(compute_speed=0.5, transfer_speed=0.5)


def claims(num_steps, *rows, claim_seconds=0.0):
    """Claims of (step, mini-batch, fetched, written back)."""
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Replayed(num_steps, 10 * num_steps, *columns, 1, 1, 0.0, claim_seconds)


def test_a_sequential_run_adds_computing_claims_and_transfers():
    found = compose(
        claims(3, (0, 0, 4, 0), (2, 2, 1, 1), claim_seconds=0.5), COSTS, 10.0, is_ahead=False
    )

    assert found == (3 * 10.5 + 4 + 1 + 2, 7.0, 7.0)


def test_a_transfer_made_ahead_hides_behind_the_step_before():
    # Step 0 waits for its own 4 rows; those of step 1 come while step 0 computes.
    found = compose(claims(2, (0, 0, 4, 0), (0, 1, 6, 0)), COSTS, 10.0, is_ahead=True)

    assert found == (4 + 10 + 10, 4.0, 10.0)


def test_a_step_waits_for_what_is_left_of_its_transfer():
    # 6 + 2 * 7 seconds of transfers beside 15 of computing.
    found = compose(claims(2, (0, 1, 6, 7)), COSTS, 15.0, is_ahead=True)

    assert found == (15 + 5 + 15, 5.0, 20.0)


def test_a_step_does_not_wait_for_transfers_of_later_mini_batches():
    rows = [(0, 0, 1, 0), (0, 1, 1, 0), (0, 2, 28, 0)]

    found = compose(claims(3, *rows), COSTS, 10.0, is_ahead=True)

    # Step 1 begins at 11, with 9 of 28 seconds done; step 2 waits from 21 to 30.
    assert found == (1 + 10 + 10 + 9 + 10, 10.0, 30.0)


def test_threads_that_share_cores_slow_each_other():
    # For 8 seconds both run: the transfer's 4 seconds at half speed, and 4 of computing.
    found = compose(claims(2, (0, 1, 4, 0)), SHARED, 10.0, is_ahead=True)

    assert found == (8 + 6 + 10, 0.0, 8.0)


def test_a_step_shorter_than_a_transfer_leaves_the_rest_for_later():
    # In the 20 seconds of step 0, computing 10 at half speed, 10 of 25 seconds are done.
    found = compose(claims(2, (0, 1, 25, 0)), SHARED, 10.0, is_ahead=True)

    assert found == (20 + 15 + 10, 15.0, 35.0)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (0.6, 0.8)])
@pytest.mark.parametrize("compute", [3.0, 12.0])
def test_solving_finds_what_a_run_was_composed_of(is_ahead, speeds, compute):
    rows = np.random.default_rng(0).integers(1, 6, (50, 2))
    made = claims(
        50,
        *((step, step + (1 if is_ahead else 0), *each) for step, each in enumerate(rows)),
        claim_seconds=0.25,
    )
    costs = COSTS._replace(compute_speed=speeds[0], transfer_speed=speeds[1])
    run = compose(made, costs.scaled(0.7, 0.7), compute, is_ahead=is_ahead)
    written = 2 * made.written_back.sum() / (made.fetched.sum() + 2 * made.written_back.sum())
    busy = MoveSeconds(run.busy * (1 - written), run.busy * written)

    found = solve(made, costs, (run.seconds - run.exposed) / 50, busy, is_ahead=is_ahead)

    assert found == pytest.approx((compute, 0.7, 0.7), rel=1e-3)


def test_rows_of_a_run_that_moved_none_cost_what_the_probe_found():
    found = solve(claims(5), COSTS, 3.0, MoveSeconds(), is_ahead=True)

    assert found == (3.0, 1.0, 1.0)


def test_a_line_of_costs_tells_calls_and_rows_apart_and_is_never_negative():
    line = LineOfCosts.through(few=64.0 + 5, many=1024.0 + 5)

    assert line == (5.0, 1.0)
    assert line.seconds(np.array([0, 1, 10])).tolist() == [0, 6, 15]
    assert LineOfCosts.through(few=2.0, many=1.0) == (2.0, 0.0)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("cold_tier", ["host", "file"])
def test_a_probe_times_rows_of_a_tier_and_leaves_no_file(tmp_path, cold_tier, is_ahead):
    found = probe(
        cold_tier,
        num_rows=5000,
        dim=8,
        state_sizes={"sum": 8},
        folder=tmp_path,
        rows_ahead=512 if is_ahead else 0,
        batch_size=64,
    )

    many = np.array([1000])
    assert found.fetch.seconds(many) > 0
    assert found.write_back.seconds(many) > 0
    speeds = found.compute_speed, found.transfer_speed
    assert speeds == (1.0, 1.0) if not is_ahead else all(0 < speed <= 1 for speed in speeds)
    assert not list(tmp_path.iterdir())
