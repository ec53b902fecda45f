"""The command that predicts a run with other settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys.errors import BudgetTooSmall, ColdTierError, ConfigError
from recsys.train.run_files.run_folder import RunFolder, write_json
from recsys.what_if.changes import FEWEST_STEPS, MeasuredRun, change_of, change_to

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

__all__ = ["add_what_if_options"]


def add_what_if_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Give `what-if` its options."""
    what_if = commands["what-if"]
    what_if.add_argument("run", metavar="DIR", help="folder of a run")
    what = what_if.add_mutually_exclusive_group()
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="predict the run with this key changed: budget, cold_tier, batch_size, schedule.name "
        "or schedule.depth; repeated, with all of them; default: a table of usual changes",
    )
    what.add_argument(
        "--beside",
        nargs="+",
        metavar="RUN",
        help="predict the settings of these runs, beside what they measured",
    )
    what_if.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="replay the claims of the first N steps of the run; default: 5000",
    )
    what_if.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    what_if.set_defaults(run_command=_what_if)


def _what_if(options: argparse.Namespace) -> int:
    if options.steps is not None and options.steps < FEWEST_STEPS:
        raise ConfigError(
            f"--steps must be at least {FEWEST_STEPS}, got {options.steps}: the first steps are "
            "slower and miss more than later ones; replay more, or leave --steps out"
        )
    run = MeasuredRun.open(options.run)
    RunFolder.open(options.run).require_data(run.config.data)
    changes = [change_to(run, MeasuredRun.open(other)) for other in options.beside or ()]
    if options.set:
        changes = [change_of(run, options.set)]

    from recsys.what_if.predict import MOST_STEPS, WhatIf
    from recsys.what_if.table import describe_predictions, format_predictions

    what_if = WhatIf(run, options.steps or MOST_STEPS)
    predictions, refused = [], {}
    for change in [*what_if.own_steps(), *(changes or what_if.usual_changes())]:
        try:
            predictions.append(what_if.predict(change))
        except (BudgetTooSmall, ColdTierError, OSError) as error:
            if changes:
                raise
            refused[change.label] = str(error)
    found = describe_predictions(run, predictions, refused)
    print(format_predictions(found))
    if options.json is not None:
        write_json(options.json, found)
    return 0
