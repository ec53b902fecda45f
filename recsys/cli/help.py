"""How the help of the command line looks: commands in groups, examples as they are written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["EXAMPLES", "GROUPS", "TRAIN_EXAMPLES", "GroupedHelp"]

# The commands under each heading of `recsys --help`.
GROUPS: Final = {
    "data": ("inspect", "prepare", "convert"),
    "training": ("train", "evaluate", "report", "ablate", "verify"),
    "a trained model": ("predict", "export", "apply"),
    "fast memory": ("profile", "plan"),
    "speed": ("bench",),
}

EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train synthetic:criteo-kaggle --set budget=256MiB

  recsys inspect clicks.csv > schema.toml
  recsys prepare table clicks.csv --schema schema.toml --out store
  recsys train store --run run
  recsys predict run clicks.csv --out scores.parquet

`recsys COMMAND --help` lists the options of a command."""

TRAIN_EXAMPLES: Final = """\
examples:
  recsys train synthetic:criteo-kaggle --set synthetic.num_samples=200000
  recsys train store --run run --set model.embedding_dim=32 --set optimizer.lr=0.05
  recsys train store --set budget=256MiB --set cold_tier=file
  recsys train --run run --resume --set epochs=2
"""


class GroupedHelp(argparse.RawDescriptionHelpFormatter):
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
