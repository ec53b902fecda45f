import errno
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import IndexDataCacheFile

from recsys._support import jit


def test_a_kernel_runs_where_nothing_can_be_kept_and_says_so(monkeypatch):
    def njit(*, cache=False, **options):
        if cache:
            raise RuntimeError("no locator available")
        return numba.njit(**options)

    def double(number):
        return 2 * number

    monkeypatch.setattr(jit, "njit", njit)

    with pytest.warns(UserWarning, match="each process compiles them again"):
        compiled = jit.kernel(double)

    assert compiled(21) == 42


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_new_process_loads_the_cached_code_of_each_signature(cache_folder):
    first = jit.kernel(_doubled)
    first(21)
    first(1.5)

    second = jit.kernel(_doubled)

    assert [second(21), second(1.5)] == [42, 3.0]
    assert sum(second.stats.cache_hits.values()) == 2
    assert not second.stats.cache_misses


PART = "from recsys._support.jit import inlined_part\n@inlined_part\ndef part(n): return {}\n"
KERNEL = """
from recsys._support.jit import kernel
from package.part import part
@kernel
def run(n): return part(n)
print(run(21), sum(run.stats.cache_hits.values()))
"""


def test_cached_code_is_compiled_again_when_a_part_in_another_file_has_changed(
    cache_folder, tmp_path
):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    places = {
        "PYTHONPATH": str(Path(jit.__file__).parents[2]),
        "NUMBA_CACHE_DIR": str(cache_folder),
    }

    def run():
        command = [sys.executable, "-c", "import package.kernel"]
        env = os.environ | places
        return subprocess.check_output(command, cwd=tmp_path, env=env, text=True).strip()

    (folder / "part.py").write_text(PART.format("n * 2"))
    found = [run(), run()]
    (folder / "part.py").write_text(PART.format("n + 100"))

    assert [*found, run()] == ["42 0", "42 1", "121 0"]


def test_old_code_is_not_run_if_new_code_could_not_be_written(cache_folder, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    jit.kernel(_doubled)(21)
    monkeypatch.setattr(jit, "_stamps_of_parts", lambda _: ["another source"])
    with monkeypatch.context() as full:
        full.setattr(IndexDataCacheFile, "_save_data", fail)
        with pytest.warns(UserWarning, match="No space left"):
            jit.kernel(_doubled)(21)

    compiled = jit.kernel(_doubled)

    assert compiled(21) == 42
    assert sum(compiled.stats.cache_misses.values()) == 1


def test_a_kernel_divides_by_zero_as_numpy_does():
    def divide(dividends, divisor):
        for number in range(len(dividends)):
            dividends[number] /= divisor

    quotients = np.array([1.0, 0.0, -1.0])

    jit.kernel(divide)(quotients, 0.0)

    assert np.array_equal(quotients, [np.inf, np.nan, -np.inf], equal_nan=True)


def run(program, **variables):
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


COUNTS_AND_FORK = """
import multiprocessing
import torch
from recsys._support import jit
from recsys.models.interaction import InteractionArch
arch, dense, sparse = InteractionArch(3), torch.randn(64, 8), torch.randn(64, 3, 8)
for number in (2, 1, 3):
    torch.set_num_threads(number)
    arch(dense, sparse.requires_grad_()).sum().backward()
    print(torch.get_num_threads(), jit.num_parts())

torch.set_num_threads(2)
expected = arch(dense, sparse).detach()

def child(answers):
    torch.set_num_threads(2)
    answers.put((arch(dense, sparse) - expected).abs().max().item())

context = multiprocessing.get_context("fork")
answers = context.SimpleQueue()
process = context.Process(target=child, args=(answers,))
process.start()
process.join(60)
print(process.exitcode, answers.get() if process.exitcode == 0 else None)
"""


@pytest.fixture(scope="module")
def printed():
    """What a process prints that runs kernels on several threads, and forks."""
    return run(COUNTS_AND_FORK, NUMBA_NUM_THREADS="4").splitlines()


@pytest.mark.serial
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_torchs_number_of_threads_outlives_the_first_kernel(printed):
    assert printed[:3] == ["2 2", "1 1", "3 3"]


@pytest.mark.serial
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_run_kernels_that_its_parent_has_run(printed):
    assert printed[3:] == ["0 0.0"]


@pytest.mark.serial
def test_a_parallel_kernel_made_for_a_number_knows_it_on_one_thread_and_on_two():
    def adding(number):
        @jit.parallel_kernel
        def add(numbers):
            for place in numba.prange(len(numbers)):
                numbers[place] += number

        return add

    numbers = np.zeros(3)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            adding(1)(numbers)
            adding(10)(numbers)
    finally:
        torch.set_num_threads(before)

    assert numbers.tolist() == [22, 22, 22]


def _doubled(numbers):
    return 2 * numbers
