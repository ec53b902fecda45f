"""The command line: `recsys`, or `python -m recsys.cli`."""

from recsys.cli.commands import main

__all__ = ["main"]
