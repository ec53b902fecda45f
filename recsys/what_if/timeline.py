"""Composes the seconds of a run: steps compute, and rows move between them or beside them.

    sequential    step = compute + claim + write back + fetch
    look-ahead    step = compute + claim + what is left of the mini-batch's transfer

With look-ahead, transfers run one after the other in a thread of their own. A step waits until the
transfer of its mini-batch has ended, and no longer. While both run, each is slower by what the
probe of the tier has measured (`costs`). So a hidden transfer is free where it finds an idle core,
and takes time from computing elsewhere.

`solve` reads a measured run backwards: it finds the seconds of computing and of transfers with
which the composition gives what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.tiers.transfers import MoveSeconds
    from recsys.what_if.costs import TransferCosts
    from recsys.what_if.replay import Replayed

__all__ = ["Composed", "Solved", "compose", "solve"]

_ROUNDS = 200
_EXACT = 1e-6
_LEAST_COMPUTE = 1e-9  # seconds


class Composed(NamedTuple):
    """Seconds of all steps of a replay.

    Attributes:
        seconds: From the first step's begin to the last step's end.
        exposed: Of these, waiting for rows.
        busy: Of transfers, hidden or not.
    """

    seconds: float
    exposed: float
    busy: float


def compose(
    replayed: Replayed,
    costs: TransferCosts,
    compute: float,
    *,
    is_ahead: bool,
) -> Composed:
    """The seconds of a run.

    Args:
        replayed: Its claims.
        costs: Of its transfers.
        compute: Seconds of a step without rows that move.
        is_ahead: Whether transfers run in the background.
    """
    work = costs.fetch.seconds(replayed.fetched) + costs.write_back.seconds(replayed.written_back)
    of_step = compute + replayed.claim_seconds
    if not is_ahead:
        moved = float(work.sum())
        return Composed(replayed.num_steps * of_step + moved, moved, moved)
    of_compute, of_transfer = costs.compute_speed, costs.transfer_speed
    # The transfers so far that a step waits for, in seconds of transfers alone.
    in_order = np.cumsum(work)
    queued = _last(in_order, replayed.claimed_in, replayed.num_steps)
    needed = _last(in_order, replayed.claimed_for, replayed.num_steps)
    now = done = exposed = busy = 0.0
    for queued_now, needed_now in zip(queued, needed, strict=True):
        waited = max(0.0, needed_now - done)
        done += waited
        exposed, busy, now = exposed + waited, busy + waited, now + waited
        both = (queued_now - done) / of_transfer  # seconds for the rest, beside computing
        if of_step <= both * of_compute:
            both = of_step / of_compute
            done += both * of_transfer
            now += both
        else:
            done = queued_now
            now += both + (of_step - both * of_compute)
        busy += both
    return Composed(now, exposed, busy)


def _last(in_order: NDArray[np.float64], steps: NDArray[np.int64], num_steps: int) -> list[float]:
    """For each step, the largest entry of a step up to it; 0 before the first."""
    found, is_inside = np.zeros(num_steps), steps < num_steps
    np.maximum.at(found, steps[is_inside], in_order[is_inside])
    so_far: list[float] = np.maximum.accumulate(found).tolist()
    return so_far


class Solved(NamedTuple):
    """What a measured run tells.

    Attributes:
        compute: Seconds of a step without claims and without what transfers take from it.
        fetch_scale: The factor that makes the costs of the probe those of the run's transfers,
            if nothing else had run beside them.
        write_back_scale: The same of writing back.
    """

    compute: float
    fetch_scale: float
    write_back_scale: float


def solve(
    replayed: Replayed,
    costs: TransferCosts,
    unwaited: float,
    busy: MoveSeconds,
    *,
    is_ahead: bool,
) -> Solved:
    """Find the compute seconds and the scales with which `compose` gives what was measured.

    Args:
        replayed: The claims of the run.
        costs: Of a probe.
        unwaited: Measured seconds of a step without waiting for rows.
        busy: Measured seconds of the transfers of the replayed steps.
        is_ahead: As for `compose`.
    """
    scales = [
        _ratio(busy.fetch, costs.fetch.seconds(replayed.fetched)),
        _ratio(busy.write_back, costs.write_back.seconds(replayed.written_back)),
    ]
    compute = max(_LEAST_COMPUTE, unwaited - replayed.claim_seconds)
    for _ in range(_ROUNDS):
        found = compose(replayed, costs.scaled(*scales), compute, is_ahead=is_ahead)
        excess = (found.seconds - found.exposed) / replayed.num_steps - unwaited
        scale = busy.total / found.busy if found.busy else 1.0
        if abs(excess) <= _EXACT * unwaited and abs(scale - 1) <= _EXACT:
            break
        compute = max(_LEAST_COMPUTE, compute - excess)
        scales = [each * scale for each in scales]
    return Solved(compute, *scales)


def _ratio(measured: float, probed: NDArray[np.float64]) -> float:
    """Of measured to probed seconds; 1 where no row moved."""
    total = float(probed.sum())
    return measured / total if total else 1.0
