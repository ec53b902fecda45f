"""Options of commands and configuration keys change only on purpose."""

import argparse
from pathlib import Path

import pytest

from tests.frozen import FILES, described


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_options_and_keys_are_those_written_down(file):
    assert FILES[file]() == file.read_text("utf-8"), (
        f"{file.name} differs from the program; if users may notice the change, write it down: "
        "python tests/frozen.py"
    )


def test_types_numbers_of_values_and_exclusive_options_are_written_down():
    parser = argparse.ArgumentParser("tool")
    parser.add_argument("--range", nargs=2, type=int)
    parser.add_argument("--pair", nargs=2, metavar=("A", "B"))
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--file", type=Path)
    either.add_argument("--quick", action="store_true")

    assert list(described(parser)) == [
        "tool\n",
        "    --range RANGE RANGE (int)\n",
        "    --pair A B\n",
        "    --file FILE (path)\n",
        "    --quick\n",
        "    one of --file | --quick\n",
    ]
