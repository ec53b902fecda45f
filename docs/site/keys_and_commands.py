"""Two pages made from the code: every option of every command, and every configuration key."""

from __future__ import annotations

import argparse
import html
import json
from itertools import groupby
from typing import TYPE_CHECKING

from recsys.cli.options import GROUPS, build_parsers
from recsys.config import walk_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["commands_page", "keys_page"]

_WIDTH = 76  # characters of a line of usage


def commands_page() -> str:
    """Every command, with its usage and its options, in the groups of `recsys --help`."""
    commands = _commands_of(build_parsers()[0])
    parts = [
        "# Every command\n",
        "What `recsys COMMAND --help` prints, on one page. [Commands](../commands.md) says what "
        "they are for, and [configuration keys](config.md) lists what `--set` takes.\n",
    ]
    for group, of_group in GROUPS.items():
        parts.append(f"## {group.capitalize()}\n")
        for name, command in of_group.items():
            parts += _command(commands[name], command.help, level=3)
    return "\n".join(parts)


def keys_page() -> str:
    """Every configuration key, with its meaning, the values it takes and its default."""
    parts = [
        "# Every configuration key\n",
        "For `--set key=value` of `recsys train` and other [commands](cli.md), and for the TOML "
        "file of `--config`, where a dot becomes a table. [Commands](../commands.md#configuration) "
        "explains the keys used most, and [ablations](../ablation.md) the table `[ablate]`.\n",
    ]
    for group, keys in groupby(walk_keys(), lambda key: key.group):
        name, _, meaning = group.partition(": ")
        parts.append(f"## {name}\n")
        parts += [f"{_sentence(meaning)}\n"] if meaning else []
        rows = (
            (f"`{key.name}`", _text(_default(key.default)), _text(f"{key.meaning} ({key.accepts})"))
            for key in keys
        )
        parts.append(_table(("key", "default", "meaning, and the values it takes"), rows))
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, summary: str, level: int) -> Iterator[str]:
    """A command's section, and those of its own commands."""
    formatter = argparse.HelpFormatter(parser.prog, width=_WIDTH)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    yield f"{'#' * level} {parser.prog}\n\n{_sentence(_text(summary))}\n"
    yield f"```text\n{formatter.format_help().strip()}\n```\n"
    commands = _commands_of(parser)
    rows = [
        (f"`{formatter._format_action_invocation(action)}`", _meaning(action, formatter))
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    if rows:
        yield _table(("argument", "meaning"), rows)
    for name, summary_of_it in _summaries_of(parser).items():
        yield from _command(commands[name], summary_of_it, level + 1)


def _commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name; none where it has no commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _summaries_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The line that help prints for each command of a parser."""
    return {
        each.dest: each.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action._choices_actions
    }


def _meaning(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """An option's help, and its default where the help does not tell it."""
    meaning = formatter._expand_help(action) if action.help else ""
    default = action.default
    is_told = "default" in meaning or default in (None, False, "", [], argparse.SUPPRESS)
    if not is_told:
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        meaning += f"{'; ' if meaning else ''}default: {shown}"
    return _text(meaning)


def _default(default: object) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)


def _text(text: str) -> str:
    """Text for a cell of a table."""
    return html.escape(text, quote=False).replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
