"""Few cases of every reader, chosen by hypothesis; `make fuzz` runs many."""

import tracemalloc
from contextlib import ExitStack

import pytest
from fuzz_cases import Reader, WrongOutcomeError, good_files, run_case
from fuzz_data import DATA
from fuzz_runs import RUNS
from fuzz_tables import TABLES
from fuzz_values import VALUES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

READERS = (*DATA, *TABLES, *RUNS, *VALUES)
NUM_CASES = {"dev": 5, "ci": 3, "stress": 1000}[settings.get_current_profile_name()]


@pytest.fixture(scope="module", autouse=True)
def stop_tracing():
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def good_folders():
    """By what makes them: the folders of the readers.

    They are made before the first case: from then on memory is traced, which takes ten times as
    long. Readers whose good files are the same share a folder.
    """
    makers = {reader.make: reader for reader in READERS}
    with ExitStack() as stack:
        yield {make: stack.enter_context(good_files(makers[make])) for make in makers}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@settings(
    max_examples=NUM_CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
)
@given(random=st.randoms(use_true_random=False))
def test_bad_input_is_read_or_refused_by_name(good_folders, reader, random):
    assert run_case(reader, good_folders[reader.make], random)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: {}["key"], "raised KeyError"),
        (lambda: open("nowhere"), "names no file"),  # noqa: PTH123, SIM115
        (lambda: bytearray(2**29), "bytes of memory for 0 bytes of input"),
    ],
)
def test_a_wrong_outcome_is_found(call, message):
    reader = Reader("wrong", "none", lambda folder: None, lambda folder, random: call)

    with good_files(reader) as folder, pytest.raises(WrongOutcomeError, match=message):
        run_case(reader, folder, None)
