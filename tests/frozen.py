"""Writes down the options of every command and every configuration key, for tests/test_frozen.py.

    python tests/frozen.py

A change of these breaks the scripts of users, so it shows as a change of `cli/options.txt` or of
`config_keys.txt` beside this file.
"""

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def options():
    """The options of every command: names, value, type, choices, default; one a line."""
    from recsys.cli.options import build_parsers

    return "".join(described(build_parsers()[0]))


def described(parser):
    """The lines of a command and of the commands under it."""
    yield f"{parser.prog}\n"
    subcommands = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands += action.choices.values()
        elif not isinstance(action, argparse._HelpAction):
            yield f"    {_option(action)}\n"
    for group in parser._mutually_exclusive_groups:
        names = " | ".join(action.option_strings[0] for action in group._group_actions)
        yield f"    {'one' if group.required else 'at most one'} of {names}\n"
    for each in subcommands:
        yield "\n"
        yield from described(each)


def _option(action):
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices:
        value = f"{{{','.join(map(str, action.choices))}}}"
    if isinstance(action.nargs, int):
        value = value if isinstance(value, tuple) else [value] * action.nargs
        value = " ".join(value)
    value += {"?": " or none", "+": " ...", "*": " ... or none"}.get(action.nargs, "")
    parts = [", ".join(action.option_strings), value]
    if action.type is not None:
        parts.append(f"({action.type.__name__.lower()})")
    if isinstance(action, argparse._AppendAction):
        parts.append("(may be repeated)")
    if action.option_strings and action.required:
        parts.append("(required)")
    if action.default not in (None, False, [], argparse.SUPPRESS):
        parts.append(f"= {_plain(action.default)}")
    return " ".join(filter(None, parts))


def config_keys():
    """Every configuration key: name, default and the values it accepts, one a line."""
    from recsys.config import walk_keys

    return "".join(f"{key.name} = {_plain(key.default)} ({key.accepts})\n" for key in walk_keys())


def _plain(default):
    return default if isinstance(default, str) and default else json.dumps(default, default=str)


FILES = {TESTS / "cli" / "options.txt": options, TESTS / "config_keys.txt": config_keys}


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    for file, make in FILES.items():
        file.write_text(make(), encoding="utf-8")
