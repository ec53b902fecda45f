"""Ablations: one configuration in variations, each trained with several seeds.

The file of an ablation is a base configuration and the table `[ablate]`:

    [ablate]
    seeds = [0, 1, 2]
    target_auc = 0.70              # optional: measure the training time to this AUC
    target_split = "test"          # split of that AUC; default "test"
    eval_every_samples = 4096      # training samples between evaluations; default 4096
    baseline = "none"              # optional: compare all others with this variation, in pairs

    [[ablate.variations]]          # named sets of keys, ...
    name = "sgd"
    optimizer.lr = 0.1

    [ablate.grid]                  # ... crossed with every combination of these values
    embeddings = ["recsys", "torch"]

Variations or grid may be left out, but not both. All other keys are those of `recsys train`.

A cell is one training run: a variation with a seed, in DIR/cells/<variation>-seed<k>. All
variations run with the first seed, then all with the second, and so on. A finished cell is not run
again, and one that was stopped continues from its checkpoint. So a stopped ablation continues where
it stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from contextlib import suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.files import alone_in
from recsys._support.machine import describe_environment, set_num_threads
from recsys._support.user_code import plain_warnings
from recsys.config import (
    AblationKeys,
    TrainConfig,
    VariationKeys,
    describe_config,
    flat,
    load_config,
    put_key,
    read_tree,
    replace,
)
from recsys.errors import AlreadyExists, ConfigError, RecsysError, TrainingDiverged, refuse
from recsys.report import make_differences, make_rows, write_report
from recsys.train.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


__all__ = ["AblationConfig", "AblationKeys", "Cell", "ablate", "load_ablation"]

_TARGET_KEYS = {"eval.every_steps": "eval_every_samples", "eval.split": "target_split"}


class Cell(NamedTuple):
    """One training run of an ablation.

    Attributes:
        name: Name of its folder.
        variation: Name of its variation.
        seed: Seed of the initial values and of the order of samples.
        config: The whole configuration.
    """

    name: str
    variation: str
    seed: int
    config: TrainConfig


class AblationConfig(NamedTuple):
    """A base configuration, its variations and their seeds.

    Attributes:
        keys: The keys of the table `[ablate]`.
        base: Nested keys of the base configuration.
        variations: The values that each variation sets, by its name and by dotted key. A
            combination of the grid is named `key=value`, joined by commas; a list is written
            `[8;4]`.
        cells: Every variation with the first seed, then with the next seed.
    """

    keys: AblationKeys
    base: Mapping[str, Any]
    variations: Mapping[str, Mapping[str, Any]]
    cells: Sequence[Cell]


def load_ablation(file: Path, settings: Sequence[str] = ()) -> AblationConfig:
    """Read the file of an ablation and apply `key=value` settings.

    Raises:
        ConfigError: a key is unknown, is set in two places, or has a wrong value.
    """
    tree = read_tree(file, settings)
    refuse(
        (
            not isinstance(tree.get("ablate"), dict),
            f"{file}: there is no table [ablate]; it needs seeds, and variations or a grid",
        )
    )
    base = {key: value for key, value in tree.items() if key != "ablate"}
    try:
        keys = AblationKeys(**tree["ablate"])
        variations = _variations(keys)
    except ConfigError as error:
        raise ConfigError(f"{file}: ablate.{error}") from None
    refuse(
        (
            keys.baseline not in ("", *variations),
            f"{file}: ablate.baseline must name a variation, got {keys.baseline!r}; the variations "
            f"are {list(variations)[:20]}",
        )
    )
    decided = {"seed": "seeds"} | (_TARGET_KEYS if keys.target_auc else {})
    for location, found in {"the base configuration": flat(base), **variations}.items():
        for key in decided.keys() & found:
            raise ConfigError(
                f"{file}: {location} sets {key}, which ablate.{decided[key]} sets; drop {key}"
            )
    for setting in settings:
        for variation, found in variations.items():
            if _overlapping([setting.partition("=")[0].strip()], found):
                raise ConfigError(
                    f"--set {setting} has no effect: variation {variation!r} of {file} sets this "
                    "key; drop the setting, or change the variation"
                )
    cells = [
        Cell(
            name=re.sub(r"[^\w.=,+\[\]-]", "_", f"{name}-seed{seed}"),
            variation=name,
            seed=seed,
            config=_cell_config(file, keys, {**base, "seed": seed}, name, values),
        )
        for seed in keys.seeds
        for name, values in variations.items()
    ]
    return AblationConfig(keys=keys, base=base, variations=variations, cells=cells)


def _cell_config(
    file: Path, keys: AblationKeys, base: Mapping[str, Any], name: str, values: Mapping[str, Any]
) -> TrainConfig:
    # One model per cell would fill the disk, so models are saved only on request.
    tree = deepcopy({"save_model": False, **base})
    try:
        for key, value in values.items():
            put_key(tree, key, value)
        config = TrainConfig(**tree)
    except ConfigError as error:
        raise ConfigError(f"{file}: variation {name!r}: {error}") from None
    if not keys.target_auc:
        return config
    every_steps = max(1, keys.eval_every_samples // config.batch_size)
    evaluation = replace(config.eval, every_steps=every_steps, split=keys.target_split)
    return replace(config, eval=evaluation)


def _variations(keys: AblationKeys) -> dict[str, dict[str, Any]]:
    """The values of every named variation with every combination of the grid, by name."""
    grid = flat(keys.grid)
    found = {}
    for variation in keys.variations or [VariationKeys(name="")]:
        own = flat(variation.model_extra or {})
        for key in _overlapping(grid, own):
            raise ConfigError(f"grid.{key} is set by variation {variation.name!r}, too")
        for values in product(*grid.values()):
            pairs = [  # commas and = separate keys in a name
                f"{key}={str(value).translate(str.maketrans(',=', ';:', ' '))}"
                for key, value in zip(grid, values, strict=True)
            ]
            name = ",".join(filter(None, [variation.name, *pairs]))
            found[name] = own | flat(dict(zip(grid, values, strict=True)))
    return found


def _overlapping(keys: Iterable[str], others: Iterable[str]) -> list[str]:
    """The dotted keys that are one of the others, or a table of it, or in a table that it is."""
    return [
        key
        for key in keys
        for other in others
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
    ]


def _train_apart(config: TrainConfig, run_dir: Path, *, resume: bool, show_progress: bool) -> None:
    """Train in a new process, with memory and threads of its own, and wait for it.

    Ctrl-C and SIGTERM are sent on to it, and it ends its run after the step; SIGKILL ends both.

    Raises:
        ChildProcessError: the process was killed, or ended with an error, which it shows.
        KeyboardInterrupt: Ctrl-C or SIGTERM came.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_train_here, args=(config, run_dir, resume, show_progress)
    )
    process.start()
    signals = []

    def send_on(number: int, _: object) -> None:
        signals.append(number)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process.ident or 0, number)

    before = {number: signal.signal(number, send_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        raise KeyboardInterrupt
    if process.exitcode:
        raise ChildProcessError(
            f"cell {run_dir.name} ended with exit code {process.exitcode}: its process shows the "
            "error, or was killed (-9: often for lack of memory)"
        )


def _train_here(config: TrainConfig, run_dir: Path, resume: bool, show_progress: bool) -> None:
    """What that process does."""
    os.setpgrp()  # a Ctrl-C at the terminal reaches it once, through the caller
    threading.Thread(target=_end_with_caller, daemon=True).start()
    from recsys.train.trainer import train

    try:
        with plain_warnings(str(run_dir)):
            train(config, run_dir, resume=resume, show_progress=show_progress)
    except TrainingDiverged:
        pass  # its record says so
    except KeyboardInterrupt:
        sys.exit(130)
    except (RecsysError, OSError) as error:
        sys.exit(f"cell {run_dir.name}: {error}")


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def ablate(
    config: AblationConfig,
    out_dir: str | Path,
    *,
    show_progress: bool = True,
    run_cell: Callable[..., Any] = _train_apart,
) -> dict[str, Any]:
    """Run the cells that are not finished, one after the other, and tabulate all cells.

    Every cell is trained in a new process, which imports the main script. A script that calls this
    function must do its work under `if __name__ == "__main__":`, in its main thread.

    Args:
        config: The cells.
        out_dir: A new folder, or the folder of the same ablation, which is continued. It gets
            `cells/`, and anew after every cell `ablate.json`, `report.html`, `table.md` and
            `table.csv`.
        show_progress: Print the name of every cell and draw its progress bar.
        run_cell: Trains one configuration into a folder, with the arguments `resume` and
            `show_progress` of `train`; by default in a new process.

    Returns:
        The record, as in `ablate.json`. Its `status` is "finished", or "unfinished" after Ctrl-C.
        Ctrl-C ends the cell in training, which then counts as not run.

    Raises:
        AlreadyExists: the folder holds something else, or a cell with another configuration or with
            other data.
        ConfigError: a cell cannot be trained, a file of a cell is damaged, or another process is at
            work in the folder.
        StoreError: the data does not exist.
    """
    from recsys.train.build import open_source

    folder = Path(out_dir)
    if folder.exists() and any(folder.iterdir()) and not (folder / "cells").is_dir():
        raise AlreadyExists(
            f"{folder} is neither empty nor an ablation's folder: it has no cells/; "
            "choose another with --run"
        )
    # Missing data raises here, before anything is written.
    data = {cell.name: open_source(cell.config).fingerprint for cell in config.cells}
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    with alone_in(folder, "recsys ablate"):
        found = {
            cell.name: _finished(config, folder, cell, data[cell.name]) for cell in config.cells
        }
        # Speeds are compared, so the first number of threads that is chosen holds for all cells.
        begun = (
            _config_of(RunFolder(folder / "cells" / cell.name))
            for cell in config.cells
            if not cell.config.num_threads
        )
        before = next(
            (cell_config.num_threads for cell_config in begun if cell_config is not None), 0
        )
        num_threads = before or set_num_threads(0).num_threads
        try:
            for number, cell in enumerate(config.cells, 1):
                if found[cell.name] is not None:
                    continue
                if show_progress:
                    sys.stderr.write(f"cell {number} of {len(config.cells)}: {cell.name}\n")
                run = RunFolder(folder / "cells" / cell.name)
                own = replace(cell.config, num_threads=cell.config.num_threads or num_threads)
                resume = _config_of(run) == own  # of one that was stopped
                if not resume:
                    shutil.rmtree(run.path, ignore_errors=True)
                with suppress(TrainingDiverged):  # the record of the cell says so
                    run_cell(own, run.path, resume=resume, show_progress=show_progress)
                found[cell.name] = _finished(config, folder, cell, data[cell.name])
                if found[cell.name] is None:
                    break  # Ctrl-C ended a cell that `run_cell` trained in this process
                # It is not run again, so it needs neither checkpoints nor its best weights.
                shutil.rmtree(run.checkpoints_folder, ignore_errors=True)
                run.drop_best()
                _tabulate(config, folder, found)
        except KeyboardInterrupt:
            pass
        finally:
            record = _tabulate(config, folder, found)
    return record


def _finished(
    config: AblationConfig, folder: Path, cell: Cell, fingerprint: str
) -> dict[str, Any] | None:
    """A cell that finished or diverged, as in `ablate.json`; None if the cell must be run.

    A cell that diverged would diverge again with the same seed. Makes its rows of the table, too,
    so that a record of another form is found here.

    Raises:
        AlreadyExists: it was run with another configuration, or with data of another fingerprint.
        ConfigError: its record or its history is damaged, or the history is incomplete.
    """
    run = RunFolder(folder / "cells" / cell.name)
    try:
        found = _read_cell(config, run, cell, fingerprint)
        make_rows([] if found is None else [found], _described(config))
    except (RecsysError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"cell {cell.name}: {run.record_file} or {run.history_file} is damaged "
            f"({type(error).__name__}: {error}); remove {run.path} to run it again"
        ) from error
    return found


def _read_cell(
    config: AblationConfig, run: RunFolder, cell: Cell, fingerprint: str
) -> dict[str, Any] | None:
    record = run.read_record() if run.record_file.is_file() else {}
    if record.get("status") not in ("finished", "diverged"):
        return None
    # Not the record's, which lacks keys that are newer.
    now, then = (flat(describe_config(of)) for of in (cell.config, load_config(run.config_file)))
    if not cell.config.num_threads:
        now["num_threads"] = then["num_threads"]  # it was chosen
    different = sorted(key for key in now | then if now.get(key) != then.get(key))
    if fingerprint != record["data"].get("fingerprint"):
        different.append("data.fingerprint")
    if different:
        raise AlreadyExists(
            f"cell {cell.name} was run with other values of {', '.join(different)}; remove "
            f"{run.path} to run it again, or choose another folder with --run"
        )
    split = cell.config.eval.split
    curve = [
        {"num_samples": entry["num_samples"], "train_seconds": entry["train_seconds"]}
        | {metric: entry[split].get(metric) for metric in ("auc", "logloss", "recall_at_k")}
        for entry in run.read_history()
        if entry.get(split)
    ]
    reached = [point for point in curve if (point["auc"] or 0) >= (config.keys.target_auc or 2)]
    return {
        "name": cell.name,
        "variation": cell.variation,
        "seed": cell.seed,
        "seconds_to_target_auc": reached[0]["train_seconds"] if reached else None,
        "samples_to_target_auc": reached[0]["num_samples"] if reached else None,
        "curve": curve,
        "run": record,
    }


def _config_of(run: RunFolder) -> TrainConfig | None:
    """The configuration of a cell that was begun; None if there is none that can be read."""
    with suppress(ConfigError, FileNotFoundError):
        return load_config(run.config_file)
    return None


def _described(config: AblationConfig) -> dict[str, Any]:
    """The keys of an ablation, as in `ablate.json`."""
    keys = config.keys.model_dump(exclude={"grid"})
    return keys | {"variations": config.variations, "base": config.base}


def _tabulate(
    config: AblationConfig, folder: Path, found: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Write `ablate.json`, the page and the tables; returns the record."""
    cells = [cell for cell in found.values() if cell is not None]
    environments = [cell["run"]["environment"] for cell in cells] or [describe_environment()]
    described = _described(config)
    record = {
        "command": " ".join(["recsys", *sys.argv[1:]]),
        "status": "finished" if len(cells) == len(config.cells) else "unfinished",
        "environment": {
            key: value
            if all(of.get(key) == value for of in environments)
            else [of.get(key) for of in environments]
            for key, value in environments[0].items()
        },
        "config": described,
        "num_cells": len(config.cells),
        "cells": cells,
        "rows": make_rows(cells, described),
    }
    if config.keys.baseline:
        record["differences"] = make_differences(cells, described)
    write_json(folder / "ablate.json", record)
    write_report(folder)
    return record
