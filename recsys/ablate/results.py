"""Finished cells of an ablation in one small file, for the time when its folder is gone.

    {
      "command", "status", "environment", "config", "num_cells": as in ablate.json
      "cells": [ ],             a line for each cell: as in ablate.json, with a part of its run
      "other_cells": [ ]        cells of the file that the ablation no longer has, kept as they are
    }

A later `recsys ablate` with this file does not run these cells again.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from recsys._support.files import alone_with, appearing_whole, require_place
from recsys._support.untrusted import is_finite_number, is_int, is_text
from recsys.errors import AlreadyExists, ConfigError
from recsys.train.run_files.run_folder import fault_of_record, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from recsys.ablate.config import AblationConfig

__all__ = ["Results"]

_HEAD = ("command", "status", "environment", "config", "num_cells")
# Parts of a run's record that are kept whole, and parts that are kept without their lists.
_KEPT = (
    "status",
    "config",
    "environment",
    "metrics",
    "throughput",
    "stopped_early",
    "peak_memory_bytes",
)
_KEPT_SMALL = ("stalls", "schedule", "tiers", "skipped")
_DATA_KEPT = ("name", "num_samples", "table_sizes", "fingerprint", "best_auc")
# Keys of the ablation on which the values of a cell depend.
_MEANING = ("target_auc", "target_split", "eval_every_samples", "late_share")


@final
class Results:
    """Reads and writes the file.

    Args:
        file: The file; it need not exist.
        config: The ablation.

    Attributes:
        file: As above.
        cells: The cells in the file, by name, as in `ablate.json`.

    Raises:
        AlreadyExists: the file was recorded with another target, or another late share.
        ConfigError: the file is damaged, or cannot be written.
    """

    def __init__(self, file: Path, config: AblationConfig) -> None:
        self.file = file
        self.cells: dict[str, dict[str, Any]] = {}
        require_place(file)
        if not file.exists():
            return
        record = read_json(file)
        for number, cell in enumerate(_listed(record, "cells") + _listed(record, "other_cells")):
            fault = "it is not a JSON object" if not isinstance(cell, dict) else _fault(cell)
            if fault is not None:
                raise self._damaged(f"cell {number + 1}: {fault}")
            self.cells.setdefault(cell["name"], cell)
        then, now = record.get("config"), config.describe()
        if not isinstance(then, dict):
            raise self._damaged("it has no config")
        for key in _MEANING if self.cells else ():
            if then.get(key) != now.get(key):
                raise AlreadyExists(
                    f"{file} was recorded with ablate.{key} {then.get(key)!r}, and it is "
                    f"{now.get(key)!r} now; name another file with --results"
                )

    @classmethod
    @contextmanager
    def locked(cls, file: Path, config: AblationConfig) -> Iterator[Results]:
        """Read the file, and keep other processes from it during the `with` block.

        A process that had read it before another one wrote it would drop the other's cells.

        Args:
            file: As for the class.
            config: The ablation.

        Raises:
            ConfigError: another process has the file; or as for the class.
            AlreadyExists: as for the class.
        """
        require_place(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        refusal = (
            f"another `recsys ablate` is at work with {file}; wait for it to end, or name another "
            "file with --results"
        )
        with alone_with(file.with_name(f"{file.name}.lock"), refusal):
            yield cls(file, config)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the cells of an ablation, and keep the other cells of the file.

        Args:
            record: As in `ablate.json`.
        """
        cells = {cell["name"]: _small(cell) for cell in record["cells"]}
        others = [cell for name, cell in self.cells.items() if name not in cells]
        head = json.dumps({key: record[key] for key in _HEAD}, indent=2).removesuffix("\n}")
        with appearing_whole(self.file) as partial:
            partial.write_text(
                f'{head},\n  "cells": {_lines(list(cells.values()))},\n'
                f'  "other_cells": {_lines(others)}\n}}\n'
            )

    def _damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{self.file} is damaged: {fault}; restore the file, or name another with --results"
        )


def _listed(record: Mapping[str, Any], key: str) -> list[Any]:
    found = record.get(key, [])
    return found if isinstance(found, list) else [found]


def _fault(cell: dict[str, Any]) -> str | None:
    """What a cell lacks, in words; None for a complete cell."""
    if not is_text(cell.get("name")) or not is_text(cell.get("variation")):
        return "it has no name, or no variation"
    if not is_int(cell.get("seed")) or not isinstance(cell.get("run"), dict):
        return f"{cell['name']} has no seed, or no run"
    for key in ("seconds_to_target_auc", "samples_to_target_auc", "eval_every_samples"):
        if key not in cell or not (cell[key] is None or is_finite_number(cell[key])):
            return f"{cell['name']} has no {key} that is a number or null"
    if not isinstance(cell.get("late"), dict | None):
        return f"{cell['name']} has late quality that is neither a JSON object nor null"
    fault = fault_of_record(cell["run"])
    if fault is None and not is_text(cell["run"]["data"].get("fingerprint")):
        fault = "it has no data.fingerprint"
    return None if fault is None else f"the run of {cell['name']}: {fault}"


def _small(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell with the parts of its run that tables need."""
    run = cell["run"]
    data = {key: run["data"][key] for key in _DATA_KEPT if key in run["data"]}
    kept = {key: run[key] for key in _KEPT if key in run} | {"data": data}
    for key in _KEPT_SMALL:
        kept[key] = _without_lists(run.get(key))
    return {**cell, "run": kept}


def _without_lists(part: Any) -> Any:
    """A part of a record without lists, such as an entry for each window, however deep."""
    if not isinstance(part, dict):
        return part
    found = {name: _without_lists(value) for name, value in part.items()}
    return {name: value for name, value in found.items() if not isinstance(value, list)}


def _lines(cells: Sequence[Mapping[str, Any]]) -> str:
    """A JSON list with a line per cell."""
    if not cells:
        return "[]"
    return "[\n" + ",\n".join(f"    {json.dumps(cell)}" for cell in cells) + "\n  ]"
