"""Runs `recsys bench gpu`: checks, then the cases in order of importance until the time is over."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import torch

from recsys._support.machine import set_num_threads, tune_allocator
from recsys.bench.gpu.cases import cases_of
from recsys.bench.gpu.checks import run_checks
from recsys.bench.gpu.clock import gemm_seconds, measure_limits, precision_of
from recsys.bench.gpu.fbgemm import FbgemmLoop
from recsys.bench.gpu.host_rows import bytes_in_huge_pages, measure_host_rows
from recsys.bench.gpu.kernels import kernels_of_step
from recsys.bench.gpu.providers import PlainLoop, ScheduledLoop, Setting, steps_of_turn
from recsys.bench.gpu.record import Record, describe_error
from recsys.bench.gpu.rows import RESIDENT, Floor, Measured, rows_of_case, table_of_case
from recsys.bench.gpu.samples import MiniBatches, Stream, coverage_of
from recsys.bench.gpu.tables import Tables
from recsys.bench.parts.harness import take_turns
from recsys.bench.parts.shares import EVERYTHING, FLOOR
from recsys.embeddings.kernels.choice import host_copies_on
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from recsys.bench.gpu.cases import Case, Plan
    from recsys.bench.gpu.clock import Limits
    from recsys.bench.gpu.providers import AbstractProvider, Turn
    from recsys.bench.gpu.tables import TieredTables

__all__ = ["bench_gpu", "require_device"]

_LEAST_ROUNDS, _MOST_ROUNDS, _QUICK_ROUNDS = 3, 12, 2
_LIMIT_BYTES = 2**28


def require_device(device: str) -> None:
    """Check that the device is there.

    Raises:
        ConfigError: it is not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu: torch sees no CUDA device; run it on a machine with one and a CUDA build "
            "of torch, or try the program by --device cpu --quick"
        )


def bench_gpu(plan: Plan, record: Record) -> None:
    """Check, measure and record; the record is written after each check and case.

    Raises:
        ConfigError: there is no such device.
    """
    require_device(plan.device)
    set_num_threads(0)
    tune_allocator()
    device = torch.device(plan.device, *([0] if plan.device == "cuda" else []))
    for check in run_checks(plan.device, is_quick=plan.is_quick):
        record.add_check(check)
    limits = measure_limits(device, 2**16 if plan.is_quick else _LIMIT_BYTES)
    stream = Stream(plan.table_sizes, plan.num_fill_samples)
    shares = [float(share) for share in plan.shares if share not in (FLOOR, EVERYTHING)]
    coverage = coverage_of(stream, shares)
    record.details |= {
        "plan": {
            "table_sizes": list(plan.table_sizes),
            "num_fill_samples": plan.num_fill_samples,
            "seconds": plan.seconds,
            "case_seconds": plan.case_seconds,
            "capture": plan.capture,
        },
        "limits": limits._asdict(),
        "coverage": coverage,
    }
    told = ", ".join(f"{lookups:.1%} by {float(share):.0%}" for share, lookups in coverage.items())
    print(f"lookups by the most popular rows: {told}", flush=True)
    print(f"dense part: {'replayed as CUDA graphs' if plan.capture else 'op by op'}", flush=True)
    measuring = _Cases(plan, record, stream, device, limits)
    for dim, cases in cases_of(plan):
        measuring.run(dim, cases)
    record.write(is_done=True)


class _Cases:
    """Measures cases; those of one D on the same tables, those of one B on the same samples."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        stream: Stream,
        device: torch.device,
        limits: Limits,
    ) -> None:
        self._plan, self._record, self._stream, self._device = plan, record, stream, device
        self._limits = limits
        self._batches: dict[int, MiniBatches] = {}  # by B

    def run(self, dim: int, cases: list[Case]) -> None:
        """Measure the cases of one D while there is time, and record what became of each."""
        if self._is_over():
            self._record.leave_out(cases, self._reason())
            return
        try:
            tables = Tables(self._stream, dim, self._device)
        except Exception as error:  # such as too little memory
            for case in cases:
                self._record.fail(case, error)
            return
        if self._plan.has_kernels and "host_rows" not in self._record.details:
            self._record.details["host_rows"] = self._host_rows(tables)
        for number, case in enumerate(cases):
            if self._is_over():
                self._record.leave_out(cases[number:], self._reason())
                return
            try:
                with precision_of(case.model), warnings.catch_warnings():
                    # A small budget has no room to look ahead; `mean_depth` says so.
                    warnings.filterwarnings("ignore", "schedule=")
                    warnings.filterwarnings("ignore", "capture=")  # `captured` says so
                    self._measure(case, tables)
            except Exception as error:  # the other cases are still worth measuring
                self._record.fail(case, error)
                tables.forget_tiered()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _host_rows(self, tables: Tables) -> dict[str, object]:
        kernels = host_copies_on(self._device)
        if kernels is None:
            return {"reason": f"no kernel of '{self._device.type}' copies rows of the host"}
        try:
            copies = measure_host_rows(tables.host.rows, self._device, kernels)
        except Exception as error:  # the cases are still worth measuring
            return {"reason": describe_error(error)}
        for each in copies:
            print(
                f"rows {each.rows}, {each.num_programs} programs: {each.to_device / 1e9:.1f} GB/s "
                f"to the device, {each.to_host / 1e9:.1f} GB/s to the host; products beside "
                f"fetches keep {each.products_beside or 0:.0%} of their speed",
                flush=True,
            )
        return {
            "dim": tables.host.rows.shape[1],
            "bytes_in_huge_pages": bytes_in_huge_pages(),
            "copies": [each._asdict() for each in copies],
        }

    def _is_over(self) -> bool:
        return self._record.seconds > self._plan.seconds

    def _reason(self) -> str:
        return f"{self._plan.seconds:g} seconds were over; raise --seconds"

    def _measure(self, case: Case, tables: Tables) -> None:
        model, device = case.model, self._device
        batches = self._batches.setdefault(
            model.batch_size, MiniBatches(self._stream, model.batch_size, device)
        )
        steps = steps_of_turn(model.batch_size, is_quick=self._plan.is_quick)
        capture = self._plan.capture
        pool = torch.cuda.graph_pool_handle() if capture and device.type == "cuda" else None
        setting = Setting(model, device, batches, steps, capture, pool)
        num_sparse = len(self._stream.keys)
        floor = Floor(
            gemm_seconds(model, num_sparse, device),
            num_sparse * model.batch_size,
            batches.mean_distinct,
            self._limits,
        )
        providers = _Providers(case, tables, setting, self._plan, self._record)
        found = providers.measure(floor.num_distinct)
        rows = rows_of_case(case, found, floor, tables.row_bytes, tables.everything)
        print(table_of_case(rows), flush=True)
        if self._plan.has_kernels and "kernels" not in self._record.details:
            self._record.details["kernels"] = providers.kernels()
        self._record.add_case(case, rows)


class _Providers:
    """The providers of a case; one that fails is recorded and left out."""

    def __init__(
        self, case: Case, tables: Tables, setting: Setting, plan: Plan, record: Record
    ) -> None:
        self._case, self._tables, self._setting = case, tables, setting
        self._plan, self._record = plan, record
        self._loops: dict[str, AbstractProvider] = {}
        self._tiered: TieredTables | None = None
        self._schedules = ["sequential"] if case.share == EVERYTHING else list(plan.schedules)

    def measure(self, num_distinct: float) -> list[Measured]:
        """Build all, and let them take turns; the resident tables come first.

        Args:
            num_distinct: Mean number of distinct rows in a mini-batch.
        """
        resident = self._tables.resident
        assert resident.row_optimizer is not None
        loop = PlainLoop(self._setting, resident, [resident.row_optimizer])
        loop.turn()
        self._loops[RESIDENT] = loop
        self._add_schedules()
        if self._case.has_baselines:
            for name, make in (
                ("torch", self._torch),
                ("gather", self._gather),
                ("hybrid", self._hybrid),
                ("fbgemm", self._fbgemm),
            ):
                self._add(name, make)
        turns = self._take_turns()
        for name, each in self._loops.items():
            if each.captured is not None:
                self._record.add_captured(self._case, name, each.captured)
        return [self._measured(name, of_name, num_distinct) for name, of_name in turns.items()]

    def kernels(self) -> dict[str, object]:
        """The kernels of one step of recsys, under the schedule that looks furthest ahead."""
        scheduled = [
            (loop.mean_depth, name)
            for name, loop in self._loops.items()
            if isinstance(loop, ScheduledLoop)
        ]
        if not scheduled:
            return {}
        _, name = max(scheduled)
        found = kernels_of_step(self._loops[name], self._setting.device)
        return {"case": f"{self._case.name},schedule={name}", "by_time": found}

    def _add(self, name: str, make: Callable[[], AbstractProvider]) -> None:
        """Build a provider and let it take a turn, which warms it up."""
        try:
            loop = make()
            loop.turn()
        except Exception as error:  # recorded; the others are still worth measuring
            self._record.skip(self._case, name, error)
            self._tables.forget_tiered()
        else:
            self._loops[name] = loop

    def _add_schedules(self) -> None:
        module, numbers = self._tables.resident, cast("Iterator[int]", count())
        if self._case.share != EVERYTHING:
            self._tiered = self._tables.tiered(self._case.share, self._setting.batches)
            module = self._tiered.module
            numbers = self._tiered.numbers(self._setting.model.batch_size)
        for schedule in self._schedules:
            self._add(schedule, partial(ScheduledLoop, self._setting, module, schedule, numbers))

    def _torch(self) -> AbstractProvider:
        plain = self._tables.plain()
        return PlainLoop(self._setting, plain, [plain.optimizer()])

    def _gather(self) -> AbstractProvider:
        gathered = self._tables.gathered()
        return PlainLoop(self._setting, gathered, [gathered])

    def _hybrid(self) -> AbstractProvider:
        hybrid = self._tables.hybrid()
        return PlainLoop(self._setting, hybrid, [hybrid.optimizer()], are_ids_on_host=True)

    def _fbgemm(self) -> AbstractProvider:
        return FbgemmLoop(
            self._setting, self._tables.managed(self._case.share, self._setting.batches)
        )

    def _take_turns(self) -> dict[str, list[Turn]]:
        """Make as many rounds as the time of a case allows."""
        calls = {name: loop.turn for name, loop in self._loops.items()}
        begin = self._record.seconds
        first = take_turns(calls, 1, num_warm_up_rounds=0)
        seconds = self._record.seconds - begin
        num_rounds = int(self._plan.case_seconds / seconds)
        num_rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, num_rounds))
        if self._plan.is_quick:
            num_rounds = _QUICK_ROUNDS
        others = take_turns(calls, num_rounds - 1, num_warm_up_rounds=0, seed=1)
        return {name: first[name] + others[name] for name in calls}

    def _measured(self, name: str, turns: list[Turn], num_distinct: float) -> Measured:
        loop, everything = self._loops[name], self._tables.everything
        if isinstance(loop, ScheduledLoop):
            tiered = self._tiered
            hot = everything if tiered is None else tiered.held_bytes
            budget = everything if tiered is None else tiered.budget
            return Measured("recsys", name, turns, hot, budget, mean_depth=loop.mean_depth)
        model = self._setting.model
        pooled = model.batch_size * len(self._tables.configs) * model.dim * 4
        crossing = {
            "hybrid": pooled,
            "gather": num_distinct * self._tables.row_bytes,
            "fbgemm": float("nan"),  # not counted
        }.get(name, 0)
        if name == "fbgemm":
            hot = int(float(self._case.share) * everything)
        else:
            hot = everything if name in (RESIDENT, "torch") else 0
        return Measured(name, "", turns, hot, None, crossing, crossing)
