"""Runs the fuzz cases for a time, reader by reader, and writes what became of them.

    python tests/fuzz/fuzz.py --seconds 600 --json benchmarks/results/fuzz.json
    python tests/fuzz/fuzz.py --reader store --first-seed 17 --seconds 0     one case

Each reader has a process of its own, so a crash of the interpreter is counted, too, and memory is
limited. Case n of a reader is always the same.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

from fuzz_cases import TimeIsUp, WrongOutcomeError, good_files, run_case
from fuzz_data import DATA
from fuzz_runs import RUNS
from fuzz_tables import TABLES
from fuzz_values import VALUES

from tests.records import write_record

READERS = {reader.name: reader for reader in (*DATA, *TABLES, *RUNS, *VALUES)}
_MEMORY_BYTES = 12 * 2**30  # of addresses: libraries reserve some that they never use
_CASES_PER_COLLECTION = 10


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="of all readers together, without the time to start them",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reader", choices=list(READERS))
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.reader is not None:
        return _run_reader(READERS[options.reader], options)
    found = {}
    for name in READERS:
        found[name] = _run_in_process(name, options.seconds / len(READERS), options.first_seed)
        print(f"{name}: {found[name]}", flush=True)
    if options.json is not None:
        write_record(options.json, f"make fuzz SECONDS={options.seconds:g}", readers=found)
    return int(any(each["num_wrong"] for each in found.values()))


def _run_in_process(name, seconds, first_seed):
    """Run a reader in its own process; a process that dies counts as one wrong case."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--reader", name]
    command += ["--seconds", str(seconds), "--first-seed", str(first_seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    result = {"faults": READERS[name].faults, "num_cases": 0, "seconds": seconds, "num_wrong": 1}
    with suppress(ValueError, IndexError):
        result |= json.loads(done.stdout.splitlines()[-1])
    return result


def _run_reader(reader, options):
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    outcomes, wrong = Counter(), 0
    seed = options.first_seed
    with good_files(reader) as good:
        begin = time.monotonic()
        while seed == options.first_seed or time.monotonic() - begin < options.seconds:
            try:
                outcomes[run_case(reader, good, Random(seed))] += 1
            except (WrongOutcomeError, TimeIsUp) as error:
                wrong += 1
                sys.stderr.write(f"{reader.name}, seed {seed}: {error}\n")
                traceback.print_exception(error)
            seed += 1
            if not seed % _CASES_PER_COLLECTION:
                gc.collect()  # modules in cycles keep threads and mapped files
    result = {
        "num_cases": seed - options.first_seed,
        "seconds": round(time.monotonic() - begin, 1),
        "num_wrong": wrong,
        "outcomes": dict(sorted(outcomes.items())),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
