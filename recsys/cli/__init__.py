"""The command line: `recsys`, or `python -m recsys`."""

from recsys.cli.commands import main

__all__ = ["main"]
