"""The command line: `recsys`, or `python -m recsys`."""

from recsys.cli.entry import main

__all__ = ["main"]
