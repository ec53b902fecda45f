"""Predicts a run with other settings, from one run that was measured.

    counts    replayed, exactly
    seconds   of computing: those of the run; of transfers: those of a probe, scaled to the run's
    both      composed step by step

With another batch size, a step computes longer by the ratio that a probe of the model finds. For
large tables, without a probe, it is assumed to compute as long per sample. A step also has a fixed
cost, so larger mini-batches are then at least as fast as predicted, and smaller ones at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.machine import describe_environment, set_num_threads, tune_allocator
from recsys._support.sizes import parse_bytes
from recsys.embeddings.tiers.budget import FastMemory, SpaceSize, divide_budget
from recsys.embeddings.tiers.transfers import MoveSeconds
from recsys.errors import ConfigError
from recsys.train.parts.build import open_source, require_features_of
from recsys.train.parts.models import needs_rows
from recsys.train.parts.providers import row_optimizer
from recsys.what_if.changes import Change, MeasuredRun, depth_of, usual_changes
from recsys.what_if.costs import TransferCosts, probe
from recsys.what_if.replay import Replay, Replayed
from recsys.what_if.steps import may_build, step_ratio
from recsys.what_if.timeline import Composed, Solved, compose, solve

if TYPE_CHECKING:
    from recsys.config import TrainConfig

__all__ = ["MOST_STEPS", "Prediction", "WhatIf"]

MOST_STEPS = 5000
_MOST_ROWS_AHEAD = 8192
_RARELY = 0.9  # of the depth: with less room, the prediction says so


@dataclass(frozen=True)
class Prediction:
    """What a change would give.

    Attributes:
        change: The change.
        samples_per_second: Speed of training.
        speedup: Relative to the run's.
        exposed_seconds: Of waiting for rows, in 1,000 steps.
        hit_rate: Share of lookups whose row is in fast memory.
        hot_bytes: Fast memory for rows, their state and the row map.
        notes: What is not known from the run alone, a sentence each.
    """

    change: Change
    samples_per_second: float
    speedup: float
    exposed_seconds: float
    hit_rate: float
    hot_bytes: int
    notes: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Relative error of the speed; None if it was not measured."""
        measured = self.change.measured
        if measured is None:
            return None
        return self.samples_per_second / measured.samples_per_second - 1


class WhatIf:
    """Predicts changes of one run.

    Args:
        run: The run.
        most_steps: Steps of the run to replay, at most. Where they are not all, a change is
            compared with the run's own settings over the same samples.

    Raises:
        ConfigError: the data is not that of the run, the model does not pool rows, or the run's
            counts are not repeated.
        StoreError: the data is gone.
    """

    def __init__(self, run: MeasuredRun, most_steps: int = MOST_STEPS) -> None:
        config = run.config
        set_num_threads(run.record["environment"]["num_threads"])
        tune_allocator()
        self._run, self._most_steps = run, most_steps
        self._source = open_source(config)
        require_features_of(run.record, self._source)
        if self._source.fingerprint != run.record["data"].get("fingerprint"):
            raise ConfigError(
                f"{run.path}: its data has changed since: the fingerprint of {config.data} is "
                f"{self._source.fingerprint!r} now; run it again"
            )
        if needs_rows(config.model, self._source):
            raise ConfigError(
                f"{run.path}: what-if cannot read this run: model.name {config.model.name!r} "
                "chooses itself which rows of a history it looks up; train a model that pools its "
                "bags, such as 'dlrm'"
            )
        dim = config.model.dim_of(next(iter(self._source.table_sizes)))
        self._space = SpaceSize(
            list(self._source.table_sizes.values()),
            dim,
            torch.float32,
            row_optimizer(config.optimizer).state_sizes(dim),
        )
        self._made: Replay | None = None
        self._probes: dict[tuple[str, int, int], TransferCosts] = {}
        self._ratios = {config.batch_size: 1.0}
        self._base = self._replay(config)
        self._require_same_counts()
        self._solved = self._solve()
        self._own_speed = self._speed(self._compose(config, self._base), self._base)

    def own_steps(self) -> list[Change]:
        """The run's own settings, to stand beside changes; none if all of its steps are replayed.

        The record has the counts of all steps, and the first ones may hit less often.
        """
        num_steps = self._base.num_steps
        if not self._run.is_tiered or num_steps == self._run.num_steps:
            return []
        return [Change(f"its first {num_steps:,} steps", self._run.config)]

    def usual_changes(self) -> list[Change]:
        """See `changes.usual_changes`."""
        return usual_changes(self._run, self._space.resident_bytes)

    def predict(self, change: Change) -> Prediction:
        """Predict a change.

        Raises:
            BudgetTooSmall: a mini-batch does not fit the budget.
            ColdTierError: there is no disk for the probe of a file tier.
        """
        config = change.config
        replayed = self._base if config == self._run.config else self._replay(config)
        found = self._compose(config, replayed)
        speedup = self._speed(found, replayed) / self._own_speed
        slots = self._slots(config)
        hot_bytes = FastMemory.of([self._space], None if slots is None else [slots])
        return Prediction(
            change,
            speedup * self._run.samples_per_second,
            speedup,
            1000 * found.exposed / replayed.num_steps,
            replayed.hit_rate,
            sum(hot_bytes),
            tuple(self._notes(config, replayed)),
        )

    def _speed(self, found: Composed, replayed: Replayed) -> float:
        """Samples per second. Checkpoints take as long as in the run, for each sample."""
        of_checkpoints: float = self._run.record["stalls"]["checkpoint_seconds"]
        of_checkpoints /= self._run.num_samples
        return 1 / (found.seconds / replayed.num_samples + of_checkpoints)

    def _replay(self, config: TrainConfig) -> Replayed:
        """The claims of a configuration, for the same samples whatever the batch size."""
        slots, size = self._slots(config), config.batch_size
        most_steps = max(1, self._most_steps * self._run.config.batch_size // size)
        if slots is None:
            per_epoch = -(-len(self._source.splits["train"]) // size)
            num_steps = min(most_steps, config.epochs * per_epoch)
            num_samples = config.epochs * len(self._source.splits["train"])
            return Replayed.resident(num_steps, min(num_samples, num_steps * size))
        if self._made is None:  # tables of many rows
            self._made = Replay(config, self._source)
        return self._made.run(config, slots, most_steps)

    def _slots(self, config: TrainConfig) -> int | None:
        """The slots of a configuration; None if every row is resident.

        Raises:
            BudgetTooSmall: the budget does not hold the row map and a slot.
        """
        if not config.budget:
            return None
        may_stay = config.cold_tier == "host"
        budget = parse_bytes(config.budget, "budget")
        found = divide_budget(budget, [self._space], [1], may_stay=may_stay)
        return None if found is None else found[0]

    def _require_same_counts(self) -> None:
        """Check that the replay of the whole run counts what the run has counted.

        Raises:
            ConfigError: it does not.
        """
        run, replayed = self._run, self._base
        if run.is_tiered != (len(replayed.fetched) > 0):
            raise ConfigError(self._differs("the tiers", run.is_tiered, not run.is_tiered))
        if not run.is_tiered or replayed.num_steps < run.num_steps:
            return
        pairs = {
            "lookup_hit_rate": (run.record["tiers"]["lookup_hit_rate"], replayed.hit_rate),
            "fetched_rows": (
                run.record["transfers"]["fetched_rows"],
                int(replayed.fetched.sum()),
            ),
        }
        for name, (recorded, found) in pairs.items():
            if recorded != found:
                raise ConfigError(self._differs(name, recorded, found))

    def _differs(self, name: str, recorded: Any, found: Any) -> str:
        return (
            f"{self._run.path}: the run's record has {name} {recorded}, and a replay of its "
            f"mini-batches gives {found}: its data or this version orders or claims them in "
            "another way; run it again with this version"
        )

    def _solve(self) -> Solved:
        """The seconds of computing, and the scale of transfers, of the run."""
        run, config, replayed = self._run, self._run.config, self._base
        not_computing = run.waited_seconds + run.record["stalls"]["checkpoint_seconds"]
        seconds = run.record["throughput"]["train_seconds"] - not_computing
        unwaited = seconds / run.num_steps
        if not run.is_tiered:
            return Solved(unwaited, 1.0, 1.0)
        moved, stalls = run.record["transfers"], run.record["stalls"]
        is_ahead = depth_of(config) > 0
        fetch_seconds, write_back_seconds = moved["fetch_seconds"], moved["write_back_seconds"]
        if not is_ahead:  # every transfer was waited for, and so was its call
            fetch_seconds = stalls["prefetch_wait_seconds"]
            write_back_seconds = stalls["write_back_wait_seconds"]
        busy = MoveSeconds(
            fetch_seconds * replayed.fetched.sum() / max(1, moved["fetched_rows"]),
            write_back_seconds * replayed.written_back.sum() / max(1, moved["written_back_rows"]),
        )
        return solve(replayed, self._costs(config, replayed), unwaited, busy, is_ahead=is_ahead)

    def _compose(self, config: TrainConfig, replayed: Replayed) -> Composed:
        """The seconds of the replayed steps of a configuration."""
        solved = self._solved
        compute = solved.compute * self._ratio(config.batch_size)
        if not len(replayed.fetched):
            return Composed(replayed.num_steps * compute, 0.0, 0.0)
        costs = self._costs(config, replayed)
        if self._has_moved(config.cold_tier):
            costs = costs.scaled(solved.fetch_scale, solved.write_back_scale)
        return compose(replayed, costs, compute, is_ahead=depth_of(config) > 0)

    def _ratio(self, batch_size: int) -> float:
        """How much longer a step of this size computes than one of the run."""
        if batch_size not in self._ratios:
            config = self._run.config
            self._ratios[batch_size] = (
                step_ratio(config, self._source, batch_size)
                if may_build(self._space.resident_bytes)
                else batch_size / config.batch_size
            )
        return self._ratios[batch_size]

    def _has_moved(self, cold_tier: str) -> bool:
        """Whether the run has measured transfers of a tier."""
        return self._run.is_tiered and self._run.config.cold_tier == cold_tier

    def _costs(self, config: TrainConfig, replayed: Replayed) -> TransferCosts:
        """What a probe of the configuration's tier takes."""
        rows_ahead = 0
        if depth_of(config):  # rounded to a power of two, so that few probes serve all changes
            moved = int(replayed.fetched.sum()) // len(replayed.fetched)
            rows_ahead = min(_MOST_ROWS_AHEAD, 1 << moved.bit_length())
        key = config.cold_tier, rows_ahead, config.batch_size
        if key not in self._probes:
            self._probes[key] = probe(
                config.cold_tier,
                num_rows=self._space.num_rows,
                dim=self._space.dim,
                state_sizes=self._space.state_sizes,
                folder=self._run.path.parent,
                rows_ahead=rows_ahead,
                batch_size=config.batch_size,
            )
        return self._probes[key]

    def _notes(self, config: TrainConfig, replayed: Replayed) -> list[str]:
        """What is not known from the run alone."""
        run, found = self._run, []
        tiers = (config.schedule, config.cold_tier)
        is_of_tiers = config.budget or tiers != (run.config.schedule, run.config.cold_tier)
        if is_of_tiers and not len(replayed.fetched):
            found.append("every row is resident, so depth and cold tier have no effect")
        if len(replayed.fetched) and not self._has_moved(config.cold_tier):
            where = "memory" if config.cold_tier == "host" else "files in the page cache"
            found.append(
                f"the run moved no rows of cold_tier {config.cold_tier!r}: their time is that of a "
                f"probe just now, from {where}"
            )
        is_probed = may_build(self._space.resident_bytes)
        if config.batch_size != run.config.batch_size and is_probed:
            found.append(
                f"steps of batch_size={config.batch_size} are those of a probe just now, with "
                "every row resident"
            )
        elif config.batch_size != run.config.batch_size:
            bound = "at least" if config.batch_size > run.config.batch_size else "at most"
            found.append(
                f"one run does not tell the fixed cost of a step: batch_size={config.batch_size} "
                f"computes {bound} as fast as predicted"
            )
        depth = depth_of(config)
        if replayed.mean_depth < _RARELY * depth and len(replayed.fetched):
            found.append(
                f"the budget has room for {replayed.mean_depth:.1f} of {depth} mini-batches ahead"
            )
        num_steps = config.epochs * -(-len(self._source.splits["train"]) // config.batch_size)
        if replayed.num_steps < num_steps and len(replayed.fetched):
            found.append(
                f"counts are those of the first {replayed.num_steps:,} steps, and later ones may "
                "hit more often"
            )
        environment = describe_environment()
        keys = ("cpu", "num_cores")
        if any(environment[key] != run.record["environment"].get(key) for key in keys):
            found.append("the run was measured on another machine than the probe of transfers")
        return found
