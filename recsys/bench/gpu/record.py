"""The JSON of `recsys bench gpu`, written anew after each case.

Beside the keys of every benchmark (`command`, `environment`, `rows`) it has

    device      "cuda" or "cpu"; figures of the CPU mean nothing
    checks      correctness: name, status "passed" or "failed", reason
    limits      measured bandwidths, bytes per second
    coverage    by share of the rows: the share of later lookups that the rows looked up most get
    cases       name, status "measured", "failed" or "not run", reason
    skipped     providers that could not be measured: case, provider, reason
    captured    of each provider whose dense part was to be captured: case, provider, num_replays,
                and the reason if it was not
    host_rows   bandwidths of copies of rows from and to the host; see `HostRowCopies`
    kernels     time by kernel of one step
    seconds     since the start
    is_done     false if the command was interrupted
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.machine import describe_environment
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from recsys.bench.gpu.cases import Case
    from recsys.bench.gpu.checks import Check
    from recsys.bench.parts.harness import Row
    from recsys.pipeline.captured_dense import CapturedDense

__all__ = ["Record", "describe_error"]


@dataclass
class Record:
    """What was found so far.

    Attributes:
        file: Where it is written; None to write nothing.
        device: "cuda" or "cpu".
        checks: Results of the checks.
        rows: Measured quantities.
        cases: What became of each case.
        skipped: Providers that could not be measured.
        captured: Whether the dense parts of the others were replayed as CUDA graphs.
        details: The other keys of the JSON.
    """

    file: Path | None
    device: str
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    cases: list[dict[str, str]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    captured: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def is_ok(self) -> bool:
        """Whether every check passed, and some case was measured."""
        was_measured = any(case["status"] == "measured" for case in self.cases)
        return was_measured and all(check.status == "passed" for check in self.checks)

    def add_check(self, check: Check) -> None:
        """Add the result of a check, and print it."""
        self.checks.append(check)
        verdict = "passed" if check.status == "passed" else f"FAILED: {check.reason}"
        print(f"[{self.seconds:6.1f} s] check {check.name}: {verdict}", flush=True)
        self.write()

    def add_case(self, case: Case, rows: Sequence[Row]) -> None:
        """Add the rows of a case that was measured."""
        self.rows += rows
        self._end_case(case, "measured", "")

    def fail(self, case: Case, error: BaseException) -> None:
        """Note that a case could not be measured."""
        self._end_case(case, "failed", describe_error(error))

    def leave_out(self, cases: Sequence[Case], reason: str) -> None:
        """Note that cases were not run."""
        for case in cases:
            self._end_case(case, "not run", reason)

    def skip(self, case: Case, provider: str, error: BaseException) -> None:
        """Note that a provider could not be measured in a case, and print it."""
        reason = describe_error(error)
        self.skipped.append({"case": case.name, "provider": provider, "reason": reason})
        print(f"  {provider}: skipped: {reason}", flush=True)

    def add_captured(self, case: Case, provider: str, captured: CapturedDense) -> None:
        """Note how many steps of a provider were replayed; print the reason if there was none."""
        self.captured.append(
            {
                "case": case.name,
                "provider": provider,
                "num_replays": captured.num_replays,
                "reason": captured.reason,
            }
        )
        if not captured.num_replays or captured.reason:
            reason = captured.reason or "no two steps were alike"
            print(f"  {provider}: dense part op by op: {reason}", flush=True)

    def write(self, *, is_done: bool = False) -> None:
        """Write the JSON; a file of an earlier call is replaced as a whole."""
        if self.file is None:
            return
        found = {
            "command": shlex.join(["recsys", *sys.argv[1:]]),
            "environment": self._environment,
            "device": self.device,
            "checks": [asdict(check) for check in self.checks],
            **self.details,
            "cases": self.cases,
            "skipped": self.skipped,
            "captured": self.captured,
            "rows": [asdict(row) for row in self.rows],
            "seconds": self.seconds,
            "is_done": is_done,
        }
        write_json(self.file, found)

    @cached_property
    def _environment(self) -> dict[str, Any]:
        found = describe_environment() | {"cuda": torch.version.cuda}
        if self.device == "cuda":
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            found["gpu_memory_bytes"] = device.total_memory
        return found

    def _end_case(self, case: Case, status: str, reason: str) -> None:
        self.cases.append({"name": case.name, "status": status, "reason": reason})
        told = f": {reason}" if reason else ""
        print(f"[{self.seconds:6.1f} s] case {case.name} {status}{told}", flush=True)
        self.write()


def describe_error(error: BaseException) -> str:
    """An error in one line, at most 400 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
