"""What `recsys --help` prints: commands in groups, examples as they are written.

Imports nothing that takes long, so that help and the version come at once.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from recsys._version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["COMMANDS", "EXAMPLES", "GROUPS", "TRAIN_EXAMPLES", "outline"]

# The commands, under each heading of `recsys --help`.
GROUPS: Final = {
    "data": {
        "inspect": "guess the schema of a table and print it as TOML, to edit",
        "prepare": "prepare a store from files",
    },
    "training": {
        "train": "train a model, evaluate it and save it",
        "evaluate": "measure the quality of a saved model",
        "report": "write an HTML page about a run or an ablation",
        "ablate": "train variations with several seeds and tabulate them",
        "verify": "check that training at several budgets equals training with every row resident",
    },
    "a trained model": {
        "predict": "predict samples with a saved model",
        "export": "write a model, or the rows that changed, for other programs",
        "apply": "write the model that results from a whole one and deltas",
    },
    "fast memory": {
        "profile": "count lookups per row, and print the coverage of the most popular rows",
        "plan": "choose the hot rows for a budget, and print the coverage of several budgets",
    },
}
COMMANDS: Final = [name for commands in GROUPS.values() for name in commands]

EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train synthetic:criteo-kaggle --set budget=256MiB

  recsys inspect clicks.csv > schema.toml
  recsys prepare table clicks.csv --schema schema.toml --out store
  recsys train store --run run --set optimizer.name=adagrad --set optimizer.lr=0.03
  recsys predict run clicks.csv --out scores.parquet

`recsys COMMAND --help` lists the options of a command."""

TRAIN_EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train store --run run --set model.embedding_dim=32 --set optimizer.lr=0.05
  recsys train store --set budget=256MiB --set cold_tier=file
  recsys train store --set budget=256MiB --dry-run
  recsys train --run run --resume --set epochs=2
"""


def outline() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `recsys`, and those of its commands, by name, without their options."""
    parser = argparse.ArgumentParser(
        prog="recsys",
        description="Train recommendation models whose embedding tables outgrow the fast memory.",
        formatter_class=_GroupedHelp,
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"recsys {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        name: parsers.add_parser(name, help=help_text)
        for group in GROUPS.values()
        for name, help_text in group.items()
    }
    return parser, commands


class _GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """Lists the commands of the parser under the headings of `GROUPS`."""

    def _iter_indented_subactions(self, action: argparse.Action) -> Generator[argparse.Action]:
        by_name = {each.dest: each for each in super()._iter_indented_subactions(action)}
        if not isinstance(action, argparse._SubParsersAction):
            yield from by_name.values()
            return
        for heading, names in GROUPS.items():
            yield argparse.Action([], dest="", metavar=f"{heading}:", nargs=0)
            self._indent()
            yield from (by_name[name] for name in names)
            self._dedent()
