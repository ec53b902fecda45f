"""Runs one case: damages an input, reads it, and checks what became of it.

A case is right if the reader succeeds, or raises a class of `recsys.errors` or an error of the
system that names the file; in bounded time and memory; and leaves no file under its final name.
"""

import shutil
import signal
import tempfile
import tracemalloc
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recsys.errors import ConfigError, RecsysError
from tests.commands import run

# Of CPU time, so that a busy machine makes no case slow; a case that only waits ends later.
TIMERS = (
    (signal.ITIMER_PROF, signal.SIGPROF, 10),
    (signal.ITIMER_REAL, signal.SIGALRM, 100),
)
# Text is read in blocks of 16 MiB, and other files in blocks of 64 MiB.
MOST_BYTES, MOST_BYTES_PER_BYTE = 256 * 2**20, 64


@dataclass(frozen=True)
class Reader:
    """One entry point.

    Attributes:
        name: As in the table of the docs.
        faults: What `attack` may do, in words.
        make: Writes good files to a folder, once.
        attack: Damages a copy of that folder, or makes bad arguments, as a `Random` decides.
            Returns the call to be tried.
        outputs: Names in the folder that must not exist after an error.
        names_file: Whether errors must name the folder.
        of_all_rows: Words of errors that are about all rows together, and so name no file.
        is_bounded: Whether memory must be bounded; numpy allocates what a header states.
    """

    name: str
    faults: str
    make: object
    attack: object
    outputs: tuple = ()
    names_file: bool = True
    of_all_rows: tuple = ()
    is_bounded: bool = True


class Refused(RecsysError):
    """A command ended with an error."""


class WrongOutcomeError(AssertionError):
    """A case that is not right."""


class TimeIsUp(BaseException):  # no reader may catch it
    """A reader hangs."""


def command(*words):
    """Run `recsys WORDS`.

    Raises:
        Refused: it is refused.
    """
    status, _, errors = run(*words)
    if status:
        raise Refused(errors)


@contextmanager
def good_files(reader):
    """A folder with the good files of a reader."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        good = Path(folder, "good")
        good.mkdir()
        reader.make(good)
        yield good


def run_case(reader, good, random):
    """Run one case; returns the name of its outcome: "read", or the class of the error.

    Raises:
        WrongOutcomeError: the case is not right.
    """
    folder = shutil.copytree(good, good.with_name("case"), symlinks=True)
    try:
        call = reader.attack(folder, random)
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        before = {path.name for path in folder.iterdir()}
        with bounded(size, has_limit=reader.is_bounded):
            outcome = _outcome(reader, folder, call)
        if outcome != "read":
            left = {path.name for path in folder.iterdir()} - before
            _require(not left & set(reader.outputs), f"{outcome}, but {sorted(left)} were written")
            _require(not [each for each in left if each.startswith(".")], f"{outcome} left {left}")
        return outcome
    finally:
        shutil.rmtree(folder)


def _outcome(reader, folder, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UserWarning)  # how recsys says that it makes something anew
        try:
            call()
        except (RecsysError, OSError) as error:
            message = str(error)
            is_of_no_file = isinstance(error, ConfigError) or any(
                words in message for words in reader.of_all_rows
            )
            if (reader.names_file and not is_of_no_file) or not isinstance(error, RecsysError):
                _require(str(folder) in message, f"{type(error).__name__} names no file: {message}")
            _require(len(message) < 20_000, f"{type(error).__name__} of {len(message)} characters")
            return type(error).__name__
        except Exception as error:
            kind = type(error).__name__
            raise WrongOutcomeError(f"{reader.name}: raised {kind}: {error}"[:2000]) from error
    return "read"


@contextmanager
def bounded(num_bytes, *, has_limit):
    """Raise if the block takes too long, or too much memory for input of this size."""

    def on_alarm(number, _):
        raise TimeIsUp(f"a case ends in {signal.Signals(number).name}: it takes too long")

    before = [signal.signal(number, on_alarm) for _, number, _ in TIMERS]
    for timer, _, seconds in TIMERS:
        signal.setitimer(timer, seconds)
    # Never stopped after a case: Python crashes if a thread of pyarrow allocates at that moment.
    tracemalloc.start()
    tracemalloc.reset_peak()
    at_start, _ = tracemalloc.get_traced_memory()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] - at_start
    finally:
        for (timer, number, _), handler in zip(TIMERS, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
    most = MOST_BYTES + MOST_BYTES_PER_BYTE * num_bytes
    _require(
        peak <= most or not has_limit, f"{peak} bytes of memory for {num_bytes} bytes of input"
    )


def _require(holds, message):
    if not holds:
        raise WrongOutcomeError(message)
