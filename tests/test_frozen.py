"""Options of commands and configuration keys change only on purpose."""

import pytest

from tests.frozen import FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_options_and_keys_are_those_written_down(file):
    assert FILES[file]() == file.read_text("utf-8"), (
        f"{file.name} differs from the program; if users may notice the change, write it down: "
        "python tests/frozen.py"
    )
