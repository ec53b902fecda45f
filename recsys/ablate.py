"""Ablations: one configuration in variations, each trained with several seeds.

    variations x seeds = cells; a cell is one training run, in DIR/cells/<variation>-seed<k>
    turns               every variation with the first seed, then every one with the second, ...
    finished            a cell whose run.json says so and has the configuration asked for

A finished cell is never run again, so an ablation that was stopped, however, goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recsys.ablate_table import make_rows
from recsys.build import describe_source, open_source
from recsys.config import build_config, describe_config
from recsys.errors import AlreadyExists, ConfigError, TrainingDiverged
from recsys.files import alone_in
from recsys.machine import describe_environment
from recsys.report_page import write_report
from recsys.run_folder import RunFolder, write_json
from recsys.trainer_process import train_in_own_process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.ablate_config import AblationConfig, Cell
    from recsys.config import TrainConfig

__all__ = ["ablate", "seconds_to_auc"]

# A loss that is no number comes again with the same seed: an outcome, not an accident.
_OUTCOMES = ("finished", "diverged")
# Of the environment: where cells differ in one of these, the table compares that too.
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
    """How a cell is trained; `recsys.trainer.train` is one way, in a process of its own another."""

    def __call__(self, config: TrainConfig, run_dir: Path, *, show_progress: bool) -> Any: ...


def ablate(
    config: AblationConfig,
    out_dir: str | Path,
    *,
    show_progress: bool = True,
    run_cell: RunCell = train_in_own_process,
) -> dict[str, Any]:
    """Run the cells that are not finished yet, one after the other, and tabulate all of them.

    A cell's process is a fresh one, which imports the script that calls this: what such a script
    does belongs under `if __name__ == "__main__":`.

    Args:
        config: Which cells.
        out_dir: A new folder, or that of the same ablation begun before. It gets `cells/` and,
            anew behind every cell, `ablate.json` and `report.html`.
        show_progress: Say which cell is run, and draw its progress bar.
        run_cell: Trains one configuration into a folder.

    Returns:
        The record, as in `ablate.json`. Its `status` is "finished", or "unfinished" after Ctrl-C,
        which ends the cell that is being trained; that one counts as not run.

    Raises:
        AlreadyExists: the folder holds something else, or a cell with another configuration or
            other data.
        ConfigError: a cell cannot be carried out, a file of one is damaged, or another process is
            at work in the folder.
        StoreError: there is no data.
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
    data = {_data_keys(cell): cell.config for cell in cells}
    # Data that is not there is found out before anything is written.
    sources = {keys: describe_source(open_source(tried)) for keys, tried in data.items()}
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    with alone_in(folder, "recsys ablate"):
        outcomes = {}
        for cell in cells:
            outcome = _read_outcome(config, folder, cell)
            if outcome is not None:
                _require_same_data(folder, cell, outcome, sources[_data_keys(cell)])
                outcomes[cell.name] = outcome
        try:
            for number, cell in enumerate(cells):
                if cell.name in outcomes:
                    continue
                if show_progress:
                    _say(f"cell {number + 1} of {len(cells)}: {cell.name}")
                _train_cell(folder, cell, run_cell, show_progress=show_progress)
                outcome = _read_outcome(config, folder, cell)
                if outcome is None:
                    break  # Ctrl-C, seen by a runner in this process
                outcomes[cell.name] = outcome
                if len(outcomes) < len(cells):
                    _tabulate(config, folder, cells, outcomes)
        except KeyboardInterrupt:
            pass
        finally:
            record = _tabulate(config, folder, cells, outcomes)
            _say_what_is_odd(folder, cells, record)
    return record


def seconds_to_auc(
    history: Sequence[Mapping[str, Any]], split: str, target_auc: float
) -> tuple[float, int] | None:
    """When a run first reached an AUC: seconds of training, and samples trained on.

    The first evaluation at or above the target counts, without interpolation; the clock leaves
    evaluations out. None if no evaluation of the part reached it.
    """
    for entry in history:
        found = entry.get(split)
        if found is not None and found["auc"] is not None and found["auc"] >= target_auc:
            return entry["train_seconds"], entry["num_samples"]
    return None


def _read_outcome(config: AblationConfig, folder: Path, cell: Cell) -> dict[str, Any] | None:
    """The record of a cell that is over; None where it has yet to be run.

    Raises:
        AlreadyExists: the cell was run with another configuration.
        ConfigError: the record is damaged, or so is a history that is needed.
    """
    run = RunFolder(folder / "cells" / cell.name)
    if not run.record_file.is_file():
        return None
    record = run.read_record()
    if record["status"] not in _OUTCOMES:
        return None
    try:
        # A key that is younger than the record had its default then.
        found = record["config"] = _as_json(describe_config(build_config(record["config"])))
    except ConfigError as error:
        difference: str | None = f"this version does not take it: {error}"
    else:
        difference = _first_difference(_as_json(describe_config(cell.config)), found)
    if difference is not None:
        raise AlreadyExists(_refusal(run, cell, "another configuration", difference))
    if config.target_auc is not None and record["status"] == "finished":
        _require_whole_history(run, cell, record, config.target_split)
    return record


def _require_whole_history(
    run: RunFolder, cell: Cell, record: Mapping[str, Any], split: str
) -> None:
    """Check that what says when a target was reached is there: without it, it never was.

    Raises:
        ConfigError: it is not.
    """
    history = run.read_history()
    last = history[-1] if history else {}
    if last.get(split) is None or last.get("num_samples") != record["throughput"]["num_samples"]:
        raise ConfigError(
            f"cell {cell.name} is finished, but {run.history_file} is not there or lacks the last "
            f"evaluation of the {split} part, so when a target was reached is not known; remove "
            f"{run.path} to run it anew"
        )


def _data_keys(cell: Cell) -> tuple[Any, ...]:
    """The keys of a cell's configuration that say what its data is."""
    return cell.config.data, cell.config.synthetic


def _require_same_data(
    folder: Path, cell: Cell, record: Mapping[str, Any], data: Mapping[str, Any]
) -> None:
    """Check that a cell was run on data as it is now.

    Raises:
        AlreadyExists: it was not.
    """
    found = record["data"]
    # What one of two versions does not write down yet is no difference.
    asked = {key: value for key, value in _as_json(data).items() if key in found}
    difference = _first_difference(asked, {key: found[key] for key in asked})
    if difference is not None:
        run = RunFolder(folder / "cells" / cell.name)
        raise AlreadyExists(_refusal(run, cell, "other data", difference))


def _refusal(run: RunFolder, cell: Cell, what: str, difference: str) -> str:
    return (
        f"cell {cell.name} was run with {what}: {difference}; remove "
        f"{run.path} to run it anew, or choose another folder with --run"
    )


def _as_json(value: Any) -> Any:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(value))


def _first_difference(asked: Any, found: Any, key: str = "") -> str | None:
    """Where two nested mappings differ, in words."""
    if isinstance(asked, dict) and isinstance(found, dict):
        for name in [*asked, *(name for name in found if name not in asked)]:
            inner = f"{key}.{name}" if key else name
            if name not in found:
                return f"{inner} is {asked[name]!r} here and was not set then"
            if name not in asked:
                return f"{inner} is not set here and was {found[name]!r} then"
            difference = _first_difference(asked[name], found[name], inner)
            if difference is not None:
                return difference
        return None
    return None if asked == found else f"{key} is {asked!r} here and was {found!r} then"


def _train_cell(folder: Path, cell: Cell, run_cell: RunCell, *, show_progress: bool) -> None:
    path = folder / "cells" / cell.name
    if path.exists():
        _say(f"{path} was not finished: it is removed and run again")
        shutil.rmtree(path)
    try:
        run_cell(cell.config, path, show_progress=show_progress)
    except TrainingDiverged as error:
        _say(f"cell {cell.name} diverged: {error}")
    except ConfigError as error:
        raise ConfigError(f"cell {cell.name}: {error}") from None


def _tabulate(
    config: AblationConfig,
    folder: Path,
    cells: Sequence[Cell],
    outcomes: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Write the record of all cells that are over and its page; returns the record."""
    done = [
        _describe_cell(config, folder, cell, outcomes[cell.name])
        for cell in cells
        if cell.name in outcomes
    ]
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
    write_json(folder / "ablate.json", record)
    write_report(folder)
    return record


def _say_what_is_odd(folder: Path, cells: Sequence[Cell], record: Mapping[str, Any]) -> None:
    names = [cell.name for cell in cells]
    others = sorted(path.name for path in (folder / "cells").iterdir() if path.name not in names)
    if others:
        _say(f"left alone, not part of this ablation: {', '.join(others)} in {folder / 'cells'}")
    num_asked = len({cell.config.num_threads for cell in cells})
    for key in _SAME_FOR_ALL:
        values = record["environment"].get(key)
        if isinstance(values, list) and not (key == "num_threads" and num_asked > 1):
            _say(f"the cells were not all run on the same: {key} is one of {values}")


def _describe_cell(
    config: AblationConfig, folder: Path, cell: Cell, record: dict[str, Any]
) -> dict[str, Any]:
    interval = reached = None
    if config.target_auc is not None:
        interval = cell.config.eval.every_steps * cell.config.batch_size
        history = RunFolder(folder / "cells" / cell.name).read_history()
        reached = seconds_to_auc(history, config.target_split, config.target_auc)
    return {
        "name": cell.name,
        "variation": cell.variation,
        "seed": cell.seed,
        "seconds_to_target_auc": reached and reached[0],
        "samples_to_target_auc": reached and reached[1],
        "eval_every_samples": interval,
        "run": record,
    }


def _common_environment(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the cells ran on; where they differ in something, the list of its values."""
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


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
