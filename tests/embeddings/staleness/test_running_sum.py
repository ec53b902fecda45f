"""Snapshots measure the same movement as a running sum of the updates themselves."""

import pytest
import torch

from recsys.embeddings import SGD, Adagrad, RowWiseAdagrad
from recsys.embeddings.staleness.settings import Staleness
from recsys.embeddings.staleness.tracker import StalenessTracker
from tests.torch_kernels import row_steps

WINDOW = 40


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1)])
def test_the_sum_of_all_updates_is_the_difference_of_snapshots(small, optimizer):
    model = small.make_model(optimizer, auto_apply=False)
    settings = Staleness(window=WINDOW, min_updates=3, count_every=1)
    tracker = StalenessTracker(model, settings)
    [followed] = tracker._followed
    num_rows = sum(small.SIZES)
    firsts = torch.tensor([0, *small.SIZES]).cumsum(0)
    states = [torch.zeros(num_rows, size) for size in optimizer.state_sizes(small.DIM).values()]
    sums = torch.zeros(num_rows, small.DIM)
    before = {}  # snapshots of the window's begin

    for number in range(3 * WINDOW):
        tracker.begin_step(number)
        small.step(model, small.make_batch(number), number)
        gradient = torch.zeros(num_rows, small.DIM)
        for table, bag in enumerate(model.embedding_bags.values()):
            gradient[firsts[table] : firsts[table + 1]] = bag.weight.grad.to_dense()
        rows = gradient.any(1).nonzero().flatten()
        change, states_of_rows = row_steps(
            optimizer,
            [each[rows] for each in states],
            gradient[rows],
            *optimizer.rate_and_eps(0.1, 1),
        )
        sums[rows] -= change
        for state, values in zip(states, states_of_rows, strict=True):
            state[rows] = values
        model.row_updater.update_rows()
        tracker.end_step(0)

        if (number + 1) % WINDOW == 0:
            if number + 1 > WINDOW:
                history = {int(row): i for i, row in enumerate(followed.history["row"])}
                both = [row for row in before if row in history]
                now, _ = followed.snapshots()
                assert len(both) > 10
                for row in both:
                    difference = now[history[row]] - before[row]
                    torch.testing.assert_close(sums[row], difference, rtol=1e-4, atol=2e-6)
                    drift = float(followed.history["drifts"][history[row], -1])
                    assert drift == pytest.approx(float(sums[row].abs().mean()), rel=1e-3)
            rows = followed.history["row"].tolist()
            before = dict(zip(rows, followed.snapshots()[0].clone(), strict=True))
            sums.zero_()
