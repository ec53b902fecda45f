"""Which cases CI leaves out, and that a word of the mark `in_ci` that no case has is an error."""

import subprocess
import sys

import pytest

from tests.in_ci import is_left_out

TESTS = """
import pytest

@pytest.mark.in_ci("first", "WORD")
@pytest.mark.parametrize("case", ["first", "second", "third"])
def test_of_cases(case):
    pass
"""
SELECTIONS = ([], ["-k", "third"], ["-n", "2"], "[third]")


def collected(pytestconfig, folder, word, selection):
    file = folder / "test_it.py"
    file.write_text(TESTS.replace("WORD", word))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = in_ci\n")
    what = [f"{file}::test_of_cases{selection}"] if isinstance(selection, str) else [file]
    options = [] if isinstance(selection, str) else selection
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.in_ci", "-c", "pytest.ini", *options, *what],
        cwd=folder,
        env={"PYTHONPATH": str(pytestconfig.rootpath)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.in_ci("-k", "[third]")
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_a_word_that_no_case_has_stops_the_collection(pytestconfig, tmp_path, selection):
    ended = collected(pytestconfig, tmp_path, "fourth", selection)

    assert ended.returncode != 0
    assert "UsageError: test_it.py::test_of_cases: in_ci names 'fourth'" in ended.stdout
    assert "first, second, third" in ended.stdout


@pytest.mark.parametrize("case", ["first", "second"])
def test_a_case_that_no_word_is_part_of_is_left_out(request, case):
    request.node.add_marker(pytest.mark.in_ci("irs", "third"))

    assert is_left_out(request.node) == (case == "second")
