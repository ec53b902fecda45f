"""Random runs under random delays: `make threads`. What a run opens must be closed after it.

    PYTHONDEVMODE=1 python tests/unit/threads.py --cases 500 --json FILE

A case is a user of `tests/users.py` who trains by a pipeline, also by Hotline. The seed of a case
decides everything in it, except for the order in which threads run. Threads sleep for random times
before and after each transfer and each change of a window. Python switches between threads at a
random interval, from a microsecond to some milliseconds.

After each case, no thread, open file, mapped file or `Fetcher` of it may be left. Errors that
Python cannot raise, such as a ResourceWarning in a destructor, end the run. So does a case that
takes longer than `HANG_SECONDS`: it hangs.
"""

import argparse
import faulthandler
import gc
import random
import re
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[2]))  # where it is run as a script

from recsys._support.machine import describe_environment
from recsys.embeddings.tiers.fetch import Fetcher
from recsys.embeddings.tiers.queue import TransferQueue
from recsys.embeddings.tiers.transfer import Transfer
from recsys.pipeline.window import Window
from recsys.train.run_folder import write_json
from tests.users import PipelineUsers

HANG_SECONDS = 120
END_SECONDS = 10  # a thread of an executor ends soon after the executor is deleted
USER_EXAMPLES = 5  # cases that one call of hypothesis makes


class Delays:
    """Random sleeps, and how many there were."""

    def __init__(self):
        self.num, self.most_threads = 0, 0
        self._random = random.Random(0)

    def begin(self, seed):
        """Draw new delays for a case."""
        self._random = random.Random(seed)
        sys.setswitchinterval(10 ** self._random.uniform(-6, -2.3))

    def sleep(self):
        """Usually not at all, else up to 10 ms."""
        self.most_threads = max(self.most_threads, threading.active_count())
        chance = self._random.random()
        if chance < 0.6:
            return
        self.num += 1
        time.sleep(0 if chance < 0.9 else 0.002 * chance if chance < 0.99 else 0.01)

    @contextmanager
    def everywhere(self):
        """Sleep before and after what threads do for each other."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (TransferQueue, "add"),
                (TransferQueue, "start"),
                (TransferQueue, "finish"),
                (Transfer, "run"),
                (Window, "fill"),
                (Window, "pop"),
            ):
                patch.setattr(owner, name, self._around(getattr(owner, name)))
            yield

    def _around(self, function):
        def call(*arguments, **options):
            self.sleep()
            try:
                return function(*arguments, **options)
            finally:
                self.sleep()

        return call


class Open:
    """What this process has open, and what of it a case must not leave behind."""

    def __init__(self):
        self.left = {}  # how much more of each kind is open than before, if anything
        self._fetchers = WeakSet()
        self._before = {}

    @contextmanager
    def watched(self):
        """Note every fetcher from now on."""
        make = Fetcher.__init__

        def note(fetcher, *arguments):
            make(fetcher, *arguments)
            self._fetchers.add(fetcher)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fetcher, "__init__", note)
            yield

    def begin(self):
        """Compare with this moment."""
        gc.collect()
        self._before = self._count()

    def require_closed(self, seconds=END_SECONDS):
        """Raise if there is still more than before after so many seconds."""
        end = time.monotonic() + seconds
        while True:
            gc.collect()
            left = {what: now - self._before[what] for what, now in self._count().items()}
            self.left = {what: more.total() for what, more in left.items()}
            if not any(self.left.values()):
                return
            if time.monotonic() > end:
                raise AssertionError(f"a case left behind {left}")
            time.sleep(0.01)

    def _count(self):
        return {
            "threads": Counter(re.sub(r"\d+", "", each.name) for each in threading.enumerate()),
            "files": Counter(_open_files()),
            "mapped files": Counter(_mapped_files()),
            "fetchers": Counter(fetchers=len(self._fetchers)),
        }


def _open_files():
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself was open while it was listed
            yield str(each.readlink())


def _mapped_files():
    """Mapped files in the folder for temporary files: tables, not libraries."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, path = line.partition("/")
        is_library = ".so" in path.rpartition("/")[2]  # of an environment that lies there
        if f"{slash}{path}".startswith(tempfile.gettempdir()) and not is_library:
            yield slash + path


def run_users(seed, num_examples):
    """Let hypothesis play users of a pipeline; no shrinking, because delays differ each time."""

    run_state_machine_as_test(
        hypothesis.seed(seed)(type("Case", (PipelineUsers,), {})),
        settings=hypothesis.settings(
            max_examples=1 + num_examples,  # the first is not random but the simplest one
            stateful_step_count=25,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def run_cases(num_cases, first_seed=0):
    """Run cases until there are enough of them.

    Returns:
        For the record: the number of cases, of delays, of threads at once, and of what was left.
    """
    delays, opened, problems = Delays(), Open(), []
    num_done, seed = 0, first_seed
    sys.unraisablehook = lambda found: problems.append(repr(found.exc_value))
    threading.excepthook = lambda found: problems.append(repr(found.exc_value))
    with delays.everywhere(), opened.watched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ResourceWarning)
        while num_done < num_cases:
            num_examples = min(USER_EXAMPLES, num_cases - num_done)
            faulthandler.dump_traceback_later(HANG_SECONDS * num_examples, exit=True)
            opened.begin()
            delays.begin(seed)
            try:
                run_users(seed, num_examples)
                opened.require_closed()
                assert not problems, problems
            except BaseException as error:
                error.add_note(f"make this case again with --cases 1 --seed {seed}")
                raise
            num_done, seed = num_done + num_examples, seed + 1
    faulthandler.cancel_dump_traceback_later()
    return {
        "num_cases": num_done,
        "delays": delays.num,
        "most_threads": delays.most_threads,
        "left": opened.left | {"errors in destructors and threads": len(problems)},
    }


def main(arguments=None):
    """Run the cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    if not sys.flags.dev_mode:
        parser.error("set PYTHONDEVMODE=1, which checks memory and shows resource warnings")
    begin = time.perf_counter()
    found = run_cases(options.cases, options.seed)
    record = {
        "command": "make threads",
        "environment": describe_environment(),
        **found,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_json(options.json, record)


if __name__ == "__main__":
    main()
