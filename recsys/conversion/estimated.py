"""`Estimate`: what tables take of fast memory, host memory and disk; prints as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys._support.counted import counted
from recsys._support.sizes import format_bytes, round_up_as_written

if TYPE_CHECKING:
    from recsys.conversion.accelerated import LeftAlone
    from recsys.embeddings.tiers.budget import FastMemory

__all__ = ["Estimate", "format_line"]


def format_line(name: str, num_bytes: int, note: str) -> str:
    """A line of an estimate: what takes the bytes, their number, and a note."""
    return f"{name:<24}{format_bytes(num_bytes):>9}  {note}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the tables of a model take; `str` of it is a table in words.

    Optimizer state is counted for every row, as it is once every table has been updated. Memory in
    proportion to a mini-batch is not counted, nor are gradients and optimizer state of dense
    parameters, nor gradients of tables that recsys does not update.

    Attributes:
        num_tables: Number of tables.
        num_rows: Rows of all tables.
        everything_bytes: All rows and their optimizer state.
        device: Device of the fast memory.
        fast: Fast memory by what it is for.
        budget_bytes: The budget; None without one.
        num_slots: Slots of fast memory; 0 if every row is resident.
        num_pinned: Rows that a plan pins in slots.
        batch_size: Samples of the mini-batch of `floor_bytes`.
        floor_bytes: The least budget for mini-batches of this size; with the cold tier "host" at
            most what all rows take.
        cold_bytes: Rows and their state in the cold tier "host".
        staging_bytes: Host memory through which rows pass to slots on a GPU.
        disk_bytes: Files of the cold tier "file".
        num_dense: Number of all other parameters: of dense layers, and of tables that recsys does
            not update.
        dense_bytes: Bytes of these.
        has_optimizer: Whether the optimizer of the rows is known; if not, no state is counted.
        left_alone: Modules with tables that `accelerate` would not replace, and why.
    """

    num_tables: int
    num_rows: int
    everything_bytes: int
    device: str
    fast: FastMemory
    budget_bytes: int | None
    num_slots: int
    num_pinned: int
    batch_size: int
    floor_bytes: int
    cold_bytes: int
    staging_bytes: int
    disk_bytes: int
    num_dense: int
    dense_bytes: int
    has_optimizer: bool
    left_alone: tuple[LeftAlone, ...] = ()

    @property
    def all_fits(self) -> bool:
        """Whether every row is resident, so that no cold tier is needed."""
        return not self.num_slots

    @property
    def fast_bytes(self) -> int:
        """Fast memory that the tables take."""
        return sum(self.fast)

    @property
    def host_bytes(self) -> int:
        """Host memory for the cold tier and, on the CPU, for fast memory and dense parameters."""
        on_cpu = self.fast_bytes + self.dense_bytes if self.device == "cpu" else 0
        return self.cold_bytes + self.staging_bytes + on_cpu

    def __str__(self) -> str:
        tables = counted(self.num_tables, "table")
        state = "with optimizer state" if self.has_optimizer else "without optimizer state"
        everything = format_bytes(self.everything_bytes)
        lines = [f"{tables} of {self.num_rows:,} rows take {everything} {state}"]
        lines += [format_line(*each) for each in self._rows()]
        if not self.has_optimizer:
            lines.append(
                "without optimizer=, state is not known, and gradients of tables are not counted: "
                "a dense one takes as much as its table"
            )
        lines += [f"left to PyTorch: {x.names[0]}, because {x.reason}" for x in self.left_alone]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, int, str]]:
        """The lines of the table: a name, bytes, and a note."""
        if self.all_fits:
            note = f"all {format_bytes(self.everything_bytes)} fit; no cold tier is needed"
            if self.budget_bytes is None:
                note = "every row is resident"
        else:
            assert self.budget_bytes is not None
            note = f"of a budget of {format_bytes(self.budget_bytes)}"
        rows = [(f"fast memory ({self.device})", self.fast_bytes, note)]
        slots = "" if self.all_fits else f"in {self.num_slots:,} slots"
        if self.num_pinned:
            slots += f", {self.num_pinned:,} of them pinned"
        rows.append(("  rows", self.fast.rows_bytes, slots))
        parts = [
            ("  optimizer state", self.fast.state_bytes),
            ("  records of slots", self.fast.record_bytes),
            ("  row map", self.fast.map_bytes),
            ("  staleness tracker", self.fast.tracker_bytes),
        ]
        rows += [(name, num_bytes, "") for name, num_bytes in parts if num_bytes]
        note = f"for mini-batches of {counted(self.batch_size, 'sample')}"
        if self.floor_bytes == self.everything_bytes:
            note = f"everything, without a row map; {note}"
        rows.append(("least budget", round_up_as_written(self.floor_bytes), note))
        rows.append(("host memory", self.host_bytes, self._of_host()))
        rows.append(("disk", self.disk_bytes, "rows and state" if self.disk_bytes else ""))
        if self.num_dense:
            rows.append(("dense parameters", self.dense_bytes, f"{self.num_dense:,} numbers"))
        return rows

    def _of_host(self) -> str:
        """What host memory holds."""
        parts = [
            "fast memory" if self.device == "cpu" else "",
            "all rows and state" if self.cold_bytes else "",
            "staging" if self.staging_bytes else "",
            "dense parameters" if self.device == "cpu" and self.dense_bytes else "",
        ]
        return " + ".join(part for part in parts if part)
