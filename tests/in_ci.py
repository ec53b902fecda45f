"""What CI leaves out: tests with the mark `outside_ci`, and cases that `in_ci` does not name.

`in_ci(*words)` runs, of the cases of a test, those whose id has one of the words. `outside_ci`
leaves out a whole test, whether it has cases or not. Everywhere else, as by `make test` on a
developer's machine and by `make stress`, all cases of all tests run.
"""

import pytest


def is_left_out(item):
    """Whether the test is outside CI, or the case is not one that its mark names."""
    if item.get_closest_marker("outside_ci") is not None:
        return True
    mark = item.get_closest_marker("in_ci")
    return mark is not None and not any(word in _id(item) for word in mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Refuse a word that no case has: a case with a new name would be left out unnoticed.

    Here every case of a test is at hand, whichever of them the command line selects.
    """
    made = yield
    cases = made if isinstance(made, list) else []
    words = {word for case in cases for mark in case.iter_markers("in_ci") for word in mark.args}
    for word in sorted(words):
        if not any(word in _id(case) for case in cases):
            test = cases[0].nodeid.partition("[")[0]
            raise pytest.UsageError(
                f"{test}: in_ci names {word!r}, and no case has that in its id: "
                f"{', '.join(map(_id, cases))}"
            )
    return made


def _id(case):
    return case.callspec.id if hasattr(case, "callspec") else ""
