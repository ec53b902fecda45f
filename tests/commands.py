"""Commands of recsys in this process."""

import contextlib
import io

from recsys.cli import main


def run(*words):
    """Run `recsys WORDS`; returns the status, what it prints, and its errors."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = main([str(word) for word in words])
    return status, printed.getvalue(), errors.getvalue()


def recsys(*words):
    """Run `recsys WORDS`, which must succeed; returns what it prints."""
    status, printed, errors = run(*words)
    assert status == 0, errors
    return printed


def refused(*words):
    """Run `recsys WORDS`, which must be refused; returns the error."""
    status, _, errors = run(*words)
    assert status == 2, errors
    return errors


def options(*settings):
    """`--set` options of the settings."""
    return [part for setting in settings for part in ("--set", setting)]
