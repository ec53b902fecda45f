"""`recsys train --dry-run`: checks a run and tells what it will take, without starting it.

The data is opened, the plan is read or made, and the model is built with its tables on the "meta"
device. No table is allocated, and nothing is written.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from recsys._support.files import existing
from recsys._support.sizes import format_bytes, parse_bytes, round_up_as_written
from recsys.batch import features_by_table
from recsys.conversion.estimate import estimate, require_machine
from recsys.conversion.estimated import Estimate, format_line
from recsys.errors import ConfigError
from recsys.pipeline.schedule import LookAhead
from recsys.train.callbacks.run_callbacks import callbacks_of
from recsys.train.checkpoint.blocks import BLOCK_BYTES
from recsys.train.loop.announcement import are_on_one_disk, cold_folder, lack_of_disk
from recsys.train.loop.first_model import open_first_model, require_fitting
from recsys.train.loop.run_checkpoints import writes_checkpoints
from recsys.train.loop.settings_warnings import warn_of_unread_keys
from recsys.train.parts.budget import MemoryNeeds, enough_bytes, first_batch, require_budget
from recsys.train.parts.build import build_model, choose_plan, open_source, tables_budget
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from recsys.batch import SampleSource
    from recsys.config import TrainConfig

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run will take; `str` of it is a table in words.

    Attributes:
        run_dir: The folder that the run would make.
        data: The data, in words.
        tables: What the tables take; the least budget is that of the first mini-batch.
        snapshot_bytes: The part of the budget that `skip.policy` "paper" keeps for snapshots of hot
            rows, beside that of the tables.
        enough_bytes: A budget that holds every mini-batch; at most what everything takes, with the
            cold tier "host". None without a budget or with a plan.
        depth: Mini-batches that a look-ahead schedule wants ahead; 0 for other schedules.
        ahead_bytes: A budget that holds every mini-batch and those ahead; None as `enough_bytes`,
            and for other schedules.
        model_bytes: The tensors of the model file; 0 without one.
        checkpoint_bytes: Rows and state in a checkpoint; 0 without checkpoints.
        buffer_bytes: Host memory for rows that wait to be written to checkpoints; 0 without them.
        free_bytes: Free disk at `run_dir`.
    """

    run_dir: Path
    data: str
    tables: Estimate
    snapshot_bytes: int
    enough_bytes: int | None
    depth: int
    ahead_bytes: int | None
    model_bytes: int
    checkpoint_bytes: int
    buffer_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        lines = [self.data, str(self.tables)]
        if self.snapshot_bytes:
            note = "of the budget, beside that of the tables"
            lines.append(format_line("snapshots of hot rows", self.snapshot_bytes, note))
        if self.enough_bytes is not None:
            note = "holds every mini-batch; the least budget holds the first"
            if self.enough_bytes == self.tables.everything_bytes:
                note = "everything; a smaller one may not hold every mini-batch"
            lines.append(_budget_line("enough budget", self.enough_bytes, note))
        if self.ahead_bytes is not None and self.ahead_bytes != self.enough_bytes:
            ahead = "the one" if self.depth == 1 else f"the {self.depth}"
            held = f"holds {ahead} ahead, too"
            if self.ahead_bytes == self.tables.everything_bytes:
                held = "everything"
            note = f"{held}; with less, the run may look less far ahead"
            lines.append(_budget_line("  with look-ahead", self.ahead_bytes, note))
        if self.model_bytes:
            lines.append(format_line("model file", self.model_bytes, "on disk"))
        if self.checkpoint_bytes:
            kept = _kept_bytes(self.checkpoint_bytes)
            updates = format_bytes(kept - self.checkpoint_bytes)
            merging = format_bytes(kept + 2 * self.checkpoint_bytes)
            note = (
                f"on disk for rows and state: {format_bytes(self.checkpoint_bytes)}, and updates "
            )
            note += f"of up to {updates}; {merging} while they are merged; dense parts on top"
            lines.append(format_line("checkpoints", kept, note))
            note = "of host memory, at most, for rows that wait to be written to checkpoints"
            lines.append(format_line("  buffer", self.buffer_bytes, note))
        lines.append(format_line("free disk", self.free_bytes, f"at {existing(self.run_dir)}"))
        lines.append(f"the run would be in {self.run_dir}; nothing was written")
        return "\n".join(lines)


def dry_run(config: TrainConfig, run_dir: str | Path) -> DryRun:
    """Check a run and size it, up to the allocation of its tables.

    Args:
        config: The configuration.
        run_dir: The folder that the run would make.

    Raises:
        AlreadyExists: `run_dir` is not empty.
        BudgetTooSmall: the budget does not hold the rows of the first mini-batch.
        ColdTierError: the disk has no room for rows in files.
        ConfigError, ProfileError, StoreError: the configuration does not fit the data or the
            machine, or the disk has no room for the model file.
        MissingDependency: a package that a callback logs to is not installed.
    """
    run_dir = Path(run_dir)
    if config.embeddings == "fbgemm":
        raise ConfigError(
            "a dry run builds tables without memory, which embeddings 'fbgemm' cannot; leave out "
            "--dry-run, or size embeddings 'torch', whose rows take the same"
        )
    callbacks = callbacks_of(config)
    source = open_source(config)
    callbacks.require(config, source)
    first_model = open_first_model(config, source)
    require_budget(config, source)
    RunFolder.require_place(run_dir)
    warn_of_unread_keys(config, source)
    path = cold_folder(config, run_dir)
    tables, model = _size_tables(config, source, path)
    if first_model is not None:
        require_fitting(first_model, model)
    require_machine(tables)
    cold_bytes = tables.disk_bytes if are_on_one_disk(path, run_dir) else 0
    model_bytes = sum(each.nbytes for each in model.state_dict().values())
    if lack := lack_of_disk(config, run_dir, model_bytes, cold_bytes):
        raise ConfigError(lack)
    free = shutil.disk_usage(existing(run_dir)).free
    checkpoint_bytes = tables.everything_bytes if writes_checkpoints(config) else 0
    written = cold_bytes + (model_bytes if config.save_model else 0)
    if checkpoint_bytes and written + _kept_bytes(checkpoint_bytes) > free:
        warnings.warn(
            f"{run_dir} has {format_bytes(free)} of free disk, and checkpoints may take "
            f"{format_bytes(_kept_bytes(checkpoint_bytes))}; one that does not fit is left out, "
            "and training goes on",
            stacklevel=2,
        )
    of_tables = parse_bytes(tables_budget(config, source) or 0)
    has_plan = bool(config.plan) or config.schedule.name == "fae"
    has_enough = bool(config.budget) and not has_plan
    depth = 0
    if config.schedule.name in ("", "lookahead"):
        depth = config.schedule.depth or LookAhead().depth
    has_ahead = has_enough and depth > 0
    return DryRun(
        run_dir=run_dir,
        data=f"{config.data}: {source.num_samples:,} samples, {len(source.splits['train']):,} of "
        "them to train on",
        tables=tables,
        snapshot_bytes=parse_bytes(config.budget or 0) - of_tables,
        enough_bytes=enough_bytes(config, source) if has_enough else None,
        depth=depth,
        ahead_bytes=enough_bytes(config, source, 1 + depth) if has_ahead else None,
        model_bytes=model_bytes if config.save_model else 0,
        checkpoint_bytes=checkpoint_bytes,
        buffer_bytes=config.checkpoint.buffer_bytes if checkpoint_bytes else 0,
        free_bytes=free,
    )


def _size_tables(
    config: TrainConfig, source: SampleSource, cold_path: str
) -> tuple[Estimate, nn.Module]:
    """What the tables take, and the model with tables on the "meta" device.

    Raises:
        Exception: as for `dry_run`.
    """
    plan = choose_plan(config, source)
    resident = replace(config, budget="", plan="", cold_tier="host", cold_path="")
    train_model, optimizers = build_model(resident, source, table_device="meta")
    model: nn.Module = train_model.model
    if config.embeddings != "recsys":
        of_rows: Optimizer = optimizers[-1]
        return estimate(model, optimizer=of_rows, batch_size=config.batch_size), model
    distinct = MemoryNeeds(config, source).num_distinct(first_batch(config, source))
    lookups = {
        f"t_{table}": distinct.get(table, 0) / (config.batch_size * len(features))
        for table, features in features_by_table(source).items()
    }
    tables = estimate(
        model,
        tables_budget(config, source) or None,
        config.batch_size,
        plan=plan,
        cold_tier=config.cold_tier,
        cold_path=cold_path or None,
        lookups_per_bag=lookups,
        staleness=config.skip.staleness.settings() if config.skip.needs_stale_rows else None,
        device=config.device,
    )
    return tables, model


def _budget_line(name: str, num_bytes: int, note: str) -> str:
    """A line with a budget, which is enough as it is written."""
    return format_line(name, round_up_as_written(num_bytes), note)


def _kept_bytes(checkpoint_bytes: int) -> int:
    """Rows and state that checkpoints keep: all of them, and updates until these are merged."""
    return checkpoint_bytes + 2 * max(checkpoint_bytes, BLOCK_BYTES)
