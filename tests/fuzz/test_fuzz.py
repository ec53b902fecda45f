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
def good_folders(request):
    """By what makes them: the folders of all readers that are tested.

    They are made before the first case: from then on memory is traced, which takes ten times as
    long. Readers whose good files are the same share a folder.
    """
    folders = {}
    with ExitStack() as stack:
        for item in request.session.items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            reader = params.get("good")
            is_tested = reader is not None and item.getparent(pytest.Module) is request.node
            if is_tested and reader.make not in folders:
                folders[reader.make] = stack.enter_context(good_files(reader))
        yield folders


@pytest.fixture(scope="module")
def good(request, good_folders):
    return request.param, good_folders[request.param.make]


@pytest.mark.parametrize("good", READERS, indirect=True, ids=lambda reader: reader.name)
@settings(
    max_examples=NUM_CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
)
@given(random=st.randoms(use_true_random=False))
def test_bad_input_is_read_or_refused_by_name(good, random):
    reader, folder = good

    assert run_case(reader, folder, random)


def wrong_reader(call):
    return Reader("wrong", "none", lambda folder: None, lambda folder, random: call)


def raise_unnamed():
    raise KeyError("key")


def raise_without_file():
    raise OSError(2, "no such file")


def take_memory():
    return bytearray(2**29)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (raise_unnamed, "raised KeyError"),
        (raise_without_file, "names no file"),
        (take_memory, "bytes of memory for 0 bytes of input"),
    ],
)
def test_a_wrong_outcome_is_found(call, message):
    reader = wrong_reader(call)

    with good_files(reader) as folder, pytest.raises(WrongOutcomeError, match=message):
        run_case(reader, folder, None)
