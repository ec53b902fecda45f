"""Every kernel is compiled for GPUs that are not there; see `compiling.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

PROFILE = settings.get_current_profile_name()
FORMS = {"stress": ["--all"], "ci": ["--once"]}
MOST_REGISTERS = 128  # of a thread, so that 512 threads fit on a multiprocessor
MOST_SPILLED = 16  # bytes: a number or two, which some kernels keep aside to record an error


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What each kernel takes on sm_90, and on sm_80 in one form, or in all of `make stress`.

    In CI each kernel has one form on both.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compiling.py")
    command = [sys.executable, script, "90", "80", *FORMS.get(PROFILE, [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_every_module_of_kernels_is_compiled():
    here = Path(__file__).parent
    recsys = here.parents[3] / "recsys"
    with_kernels = {
        path.stem for path in recsys.rglob("*.py") if "\n@launched\n" in path.read_text("utf-8")
    }

    # Of two modules named `row_sums`, one is launched by `update`.
    assert with_kernels == {
        path.stem.removeprefix("launches_") for path in here.glob("launches_*.py")
    }


def test_no_kernel_spills_registers(compiled):
    spilling = [kernel for kernel in compiled if kernel["spilled_bytes"] > MOST_SPILLED]
    names = {
        number: {kernel["kernel"] for kernel in compiled if kernel["capability"] == number}
        for number in (80, 90)
    }

    assert names[80] == names[90]
    assert not spilling


def test_kernels_leave_room_for_others_on_a_multiprocessor(compiled):
    large = [kernel for kernel in compiled if kernel["registers"] > MOST_REGISTERS]
    wide = [kernel for kernel in compiled if kernel["shared_bytes"] > 48 * 1024]

    assert not large
    assert not wide


def test_rows_are_moved_sixteen_bytes_at_a_time(compiled):
    """Launches that count on it say so in their name; after "by", they name which kernels do."""
    wide = []
    for kernel in compiled:
        _, is_wide, kernels = kernel["launch"].partition("16 bytes")
        if is_wide and (not kernels or kernel["kernel"] in kernels):
            wide.append(kernel)
    narrow = [kernel for kernel in wide if min(kernel["widest_load"], kernel["widest_store"]) < 128]

    assert wide
    assert not narrow


@pytest.mark.outside_ci
def test_products_are_rounded_before_they_are_added(compiled):
    """By launches that say so in their name."""
    rounding = [kernel for kernel in compiled if "unfused" in kernel["launch"]]
    fused = [kernel for kernel in rounding if kernel["num_fused"]]

    assert rounding
    assert not fused


def test_numbers_that_several_threads_read_are_replaced_after_a_barrier(compiled):
    """By launches that say so in their name. The interpreter has no threads that could be late."""
    replacing = [
        kernel
        for kernel in compiled
        if "of several threads" in kernel["launch"] and kernel["kernel"] == "_update_kernel"
    ]

    assert replacing
    assert all(kernel["waits"] for kernel in replacing)


@pytest.mark.outside_ci
def test_another_mini_batch_compiles_nothing_anew(compiled):
    """Launches that differ in their mini-batch alone have one name."""
    keys = {}
    for kernel in compiled:
        if "each mini-batch" in kernel["launch"]:
            name = kernel["launch"], kernel["kernel"], kernel["capability"]
            keys.setdefault(name, []).append(kernel["key"])

    assert keys
    assert all(len(of_name) > 1 for of_name in keys.values())
    assert all(len(set(of_name)) == 1 for of_name in keys.values())
