"""Ablations: train variations of one configuration, each with several seeds.

    cell                one training run: a variation with a seed; DIR/cells/<variation>-seed<k>
    order               all variations with the first seed, then all with the second, ...
    finished cell       its run.json says so, and holds the configuration of the cell
    recorded cell       a finished cell of the file of results; its folder may be gone

A finished or recorded cell is never run again, and a cell that was stopped continues from its
checkpoint if it has one. So a stopped ablation continues where it stopped.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from recsys._support.files import alone_in
from recsys._support.machine import describe_environment
from recsys.ablate.results import Results
from recsys.config import build_config, describe_config
from recsys.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigError,
    RecsysError,
    TrainingDiverged,
)
from recsys.report.ablation_table import make_rows
from recsys.report.page import write_report
from recsys.report.paired import make_differences
from recsys.train.checkpoint import newest
from recsys.train.parts.build import describe_source, open_source
from recsys.train.run_files.run_folder import RunFolder, write_json
from recsys.train.trainer_process import train_in_own_process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.ablate.config import AblationConfig, Cell
    from recsys.config import TrainConfig

__all__ = ["ablate", "late_quality", "seconds_to_auc"]

# A cell that diverged would diverge again with the same seed, so it is not run again.
_OUTCOMES = ("finished", "diverged")
# Keys of the environment that must agree: otherwise the table compares machines or versions too.
_SAME_FOR_ALL = (
    "recsys",
    "commit",
    "dirty",
    "python",
    "torch",
    "cpu",
    "num_cores",
    "num_threads",
    "gpu",
)


class RunCell(Protocol):
    """A function that trains one cell: `recsys.train.trainer.train`, or `train_in_own_process`."""

    def __call__(
        self, config: TrainConfig, run_dir: Path, *, resume: bool = False, show_progress: bool
    ) -> Any: ...


def ablate(
    config: AblationConfig,
    out_dir: str | Path,
    *,
    results: str | Path | None = None,
    show_progress: bool = True,
    run_cell: RunCell = train_in_own_process,
) -> dict[str, Any]:
    """Run the cells that are not finished, one after the other, and tabulate all cells.

    Every cell is trained in a new process, which imports the main script. A script that calls this
    function must do its work under `if __name__ == "__main__":`.

    Args:
        config: The cells.
        out_dir: A new folder, or the folder of the same ablation, which is continued. It gets
            `cells/`, and anew after every cell `ablate.json`, `report.html`, `table.md` and
            `table.csv`.
        results: A file that keeps finished cells; it is read first, and written after every cell. A
            cell in it with the same configuration and data is not run, whatever version ran it.
        show_progress: Print the name of every cell and draw its progress bar.
        run_cell: Trains one configuration into a folder.

    Returns:
        The record, as in `ablate.json`. Its `status` is "finished", or "unfinished" after Ctrl-C.
        Ctrl-C ends the cell in training, which then counts as not run.

    Raises:
        AlreadyExists: the folder holds something else; or the folder or the file of results holds
            a cell with another configuration or with other data.
        ConfigError: a cell cannot be trained, a file of a cell or the file of results is damaged,
            or another process is at work in the folder or with the file of results.
        StoreError: the data does not exist.
    """
    folder = Path(out_dir)
    cells = config.cells()
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / "cells").is_dir())
    ):
        raise AlreadyExists(
            f"{folder} is neither empty nor an ablation's folder: it has no cells/; "
            "choose another with --run"
        )
    if results is None:
        return _ablate(config, folder, cells, None, run_cell, show_progress=show_progress)
    file = Path(results)
    if file.resolve() == (folder / "ablate.json").resolve():
        raise ConfigError(
            f"--results must name a file of its own, got {file}, which the ablation writes anyway"
        )
    with Results.locked(file, config) as recorded:
        return _ablate(config, folder, cells, recorded, run_cell, show_progress=show_progress)


def _ablate(
    config: AblationConfig,
    folder: Path,
    cells: Sequence[Cell],
    recorded: Results | None,
    run_cell: RunCell,
    *,
    show_progress: bool,
) -> dict[str, Any]:
    """`ablate` with the file of results open, if there is one."""
    data = {_data_keys(cell): cell.config for cell in cells}
    # Missing data raises here, before anything is written.
    sources = {keys: describe_source(open_source(tried)) for keys, tried in data.items()}
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    with alone_in(folder, "recsys ablate"):
        outcomes = {}
        for cell in cells:
            outcome = _read_outcome(config, folder, cell)
            way_out = _way_out(folder, cell)
            if outcome is None and recorded is not None and cell.name in recorded.cells:
                outcome = recorded.cells[cell.name]
                way_out = (
                    f"take it out of {recorded.file} to run it again, or name another file with "
                    "--results"
                )
                _require_same_config(cell, outcome["run"], way_out)
            if outcome is not None:
                _require_same_data(cell, outcome["run"], sources[_data_keys(cell)], way_out)
                outcomes[cell.name] = outcome
        try:
            for number, cell in enumerate(cells):
                if cell.name in outcomes:
                    continue
                if show_progress:
                    _print(f"cell {number + 1} of {len(cells)}: {cell.name}")
                _train_cell(folder, cell, run_cell, show_progress=show_progress)
                outcome = _read_outcome(config, folder, cell)
                if outcome is None:
                    break  # `run_cell` trained in this process and Ctrl-C ended it
                # A finished cell is not run again, so it needs no checkpoints.
                shutil.rmtree(folder / "cells" / cell.name / "checkpoints", ignore_errors=True)
                outcomes[cell.name] = outcome
                if len(outcomes) < len(cells):
                    _tabulate(config, folder, cells, outcomes, recorded)
        except KeyboardInterrupt:
            pass
        finally:
            record = _tabulate(config, folder, cells, outcomes, recorded)
            _warn_of_differences(folder, cells, record)
    return record


def seconds_to_auc(
    history: Sequence[Mapping[str, Any]], split: str, target_auc: float
) -> tuple[float, int] | None:
    """Seconds of training and samples seen until a run first reached an AUC.

    The first evaluation at or above the target counts, without interpolation. The seconds leave
    evaluations out, and the samples include those that were skipped. None if no evaluation of the
    split reached the target.
    """
    for entry in history:
        found = entry.get(split)
        if found is not None and found["auc"] is not None and found["auc"] >= target_auc:
            return entry["train_seconds"], entry["num_samples"]
    return None


def _read_outcome(config: AblationConfig, folder: Path, cell: Cell) -> dict[str, Any] | None:
    """A cell that finished or diverged, as in `ablate.json`; None if the cell must be run.

    Raises:
        AlreadyExists: the cell was run with another configuration.
        ConfigError: the record is damaged, or the history is damaged and a target or a late share
            needs it.
    """
    run = RunFolder(folder / "cells" / cell.name)
    if not run.record_file.is_file():
        return None
    record = run.read_record()
    if record["status"] not in _OUTCOMES:
        return None
    _require_same_config(cell, record, _way_out(folder, cell))
    if record["status"] == "finished":
        if config.target_auc is not None:
            _require_whole_history(run, cell, record, config.target_split)
        if config.late_share is not None:
            _require_whole_history(run, cell, record, cell.config.eval.split)
    return _describe_cell(config, run, cell, record)


def _require_same_config(cell: Cell, record: dict[str, Any], way_out: str) -> None:
    """Check that a finished cell was run with the configuration that it has now.

    A key that did not exist when the record was written gets its default, also in the record.

    Raises:
        AlreadyExists: the configuration has changed.
    """
    try:
        found = record["config"] = _as_json(describe_config(build_config(record["config"])))
    except ConfigError as error:
        difference: str | None = f"this version refuses it: {error}"
    else:
        difference = _first_difference(_as_json(describe_config(cell.config)), found)
    if difference is not None:
        raise AlreadyExists(_refusal(cell, "another configuration", difference, way_out))


def _require_whole_history(
    run: RunFolder, cell: Cell, record: Mapping[str, Any], split: str
) -> None:
    """Check that the history, which says when the target was reached, is complete.

    Raises:
        ConfigError: the history is missing or incomplete.
    """
    history = run.read_history()
    last = history[-1] if history else {}
    if last.get(split) is None or last.get("num_samples") != record["throughput"]["num_samples"]:
        raise ConfigError(
            f"cell {cell.name} is finished, but {run.history_file} is missing or lacks the last "
            f"evaluation on the {split} split, which the time to the target needs; remove "
            f"{run.path} to run it again"
        )


def _data_keys(cell: Cell) -> tuple[Any, ...]:
    """The keys of a cell's configuration that name its data."""
    return cell.config.data, cell.config.synthetic


def _require_same_data(
    cell: Cell, record: Mapping[str, Any], data: Mapping[str, Any], way_out: str
) -> None:
    """Check that a finished cell was run on the data as it is now.

    Raises:
        AlreadyExists: the data has changed.
    """
    found = record["data"]
    # A key that only one of two versions writes is not a difference.
    expected = {key: value for key, value in _as_json(data).items() if key in found}
    difference = _first_difference(expected, {key: found[key] for key in expected})
    if difference is not None:
        raise AlreadyExists(_refusal(cell, "other data", difference, way_out))


def _refusal(cell: Cell, what: str, difference: str, way_out: str) -> str:
    return f"cell {cell.name} was run with {what}: {difference}; {way_out}"


def _way_out(folder: Path, cell: Cell) -> str:
    path = folder / "cells" / cell.name
    return f"remove {path} to run it again, or choose another folder with --run"


def _as_json(value: Any) -> Any:
    """The value as read back from a JSON file: tuples become lists."""
    return json.loads(json.dumps(value))


def _first_difference(expected: Any, found: Any, key: str = "") -> str | None:
    """The first difference of two nested mappings, in words; None if they are equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in [*expected, *(name for name in found if name not in expected)]:
            inner = f"{key}.{name}" if key else name
            if name not in found:
                return f"{inner} is {expected[name]!r} now and was not set then"
            if name not in expected:
                return f"{inner} is not set now and was {found[name]!r} then"
            difference = _first_difference(expected[name], found[name], inner)
            if difference is not None:
                return difference
        return None
    return None if expected == found else f"{key} is {expected!r} now and was {found!r} then"


def _train_cell(folder: Path, cell: Cell, run_cell: RunCell, *, show_progress: bool) -> None:
    """Train a cell; one that was stopped continues from its checkpoint."""
    run = RunFolder(folder / "cells" / cell.name)
    try:
        if run.path.exists() and _can_resume(run, cell):
            _print(f"{run.path} was not finished: it continues from its checkpoint")
            try:
                run_cell(cell.config, run.path, resume=True, show_progress=show_progress)
            except CheckpointError as error:
                _print(f"cell {cell.name}: {error}")
            else:
                return
        if run.path.exists():
            _print(f"{run.path} was not finished: it is removed and run again")
            shutil.rmtree(run.path)
        run_cell(cell.config, run.path, show_progress=show_progress)
    except TrainingDiverged as error:
        _print(f"cell {cell.name} diverged: {error}")
    except RecsysError as error:
        raise type(error)(f"cell {cell.name}: {error}") from error


def _can_resume(run: RunFolder, cell: Cell) -> bool:
    """Whether an unfinished cell has a checkpoint, and the configuration of the cell."""
    try:
        return run.read_config() == cell.config and newest(run.checkpoints_folder) is not None
    except (ConfigError, CheckpointError):
        return False


def _tabulate(
    config: AblationConfig,
    folder: Path,
    cells: Sequence[Cell],
    outcomes: Mapping[str, dict[str, Any]],
    recorded: Results | None,
) -> dict[str, Any]:
    """Write `ablate.json`, the file of results, the page and the tables of the finished cells.

    Returns:
        The record, as in `ablate.json`.
    """
    done = [outcomes[cell.name] for cell in cells if cell.name in outcomes]
    described = config.describe()
    record = {
        "command": " ".join(["recsys", *sys.argv[1:]]),
        "status": "finished" if len(done) == len(cells) else "unfinished",
        "environment": _common_environment([cell["run"]["environment"] for cell in done]),
        "config": described,
        "num_cells": len(cells),
        "cells": done,
        "rows": make_rows(done, described),
    }
    if config.baseline is not None:
        record["differences"] = make_differences(done, described)
    write_json(folder / "ablate.json", record)
    if recorded is not None:
        recorded.write(record)
    write_report(folder)
    return record


def _warn_of_differences(folder: Path, cells: Sequence[Cell], record: Mapping[str, Any]) -> None:
    names = [cell.name for cell in cells]
    others = sorted(path.name for path in (folder / "cells").iterdir() if path.name not in names)
    if others:
        _print(f"kept, but not part of this ablation: {', '.join(others)} in {folder / 'cells'}")
    num_settings = len({cell.config.num_threads for cell in cells})
    for key in _SAME_FOR_ALL:
        values = record["environment"].get(key)
        if isinstance(values, list) and not (key == "num_threads" and num_settings > 1):
            _print(f"the cells were not all run with the same {key}, but with {values}")


def _describe_cell(
    config: AblationConfig, run: RunFolder, cell: Cell, record: dict[str, Any]
) -> dict[str, Any]:
    """A finished cell as in `ablate.json`."""
    interval = reached = None
    if config.target_auc is not None:
        interval = cell.config.eval.every_steps * cell.config.batch_size
        reached = seconds_to_auc(run.read_history(), config.target_split, config.target_auc)
    described = {
        "name": cell.name,
        "variation": cell.variation,
        "seed": cell.seed,
        "seconds_to_target_auc": reached and reached[0],
        "samples_to_target_auc": reached and reached[1],
        "eval_every_samples": interval,
        "run": record,
    }
    if config.late_share is not None:
        split = cell.config.eval.split
        described["late"] = late_quality(run.read_history(), split, config.late_share)
    return described


def late_quality(
    history: Sequence[Mapping[str, Any]], split: str, share: float
) -> dict[str, Any] | None:
    """Mean AUC and logloss of the evaluations of a split over the last share of the training.

    The evaluation after the last step is one of them, although it may cover more samples. Where
    early stopping ended the training, it stands for the one at the same step, which decided so.
    None if no evaluation of the split has an AUC.
    """
    last = max((entry["num_samples"] for entry in history), default=0)
    begin = round((1 - share) * last, 6)  # (1 - 0.7) * 20 is above 6 in floating point
    late = [entry for entry in history if entry.get(split) and entry["num_samples"] >= begin]
    found = {entry["num_samples"]: entry[split] for entry in late}.values()
    aucs = [metrics["auc"] for metrics in found if metrics["auc"] is not None]
    if not aucs:
        return None
    return {
        "split": split,
        "num_evaluations": len(found),
        "auc": fmean(aucs),
        "logloss": fmean(metrics["logloss"] for metrics in found),
    }


def _common_environment(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The environment of the cells; a key in which they differ has the list of its values."""
    if not environments:
        return describe_environment()
    common = {}
    for key in environments[0]:
        values: list[Any] = []
        for environment in environments:
            if environment.get(key) not in values:
                values.append(environment.get(key))
        common[key] = values[0] if len(values) == 1 else values
    return common


def _print(message: str) -> None:
    sys.stderr.write(f"{message}\n")
