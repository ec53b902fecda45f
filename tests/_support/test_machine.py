import pytest
import torch

from recsys._support import machine


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "recsys" / "_support" / "machine.py"))

    environment = machine.describe_environment()

    assert (environment["commit"], environment["dirty"]) == (None, None)
    assert environment["torch"] == torch.__version__


def test_peak_memory_only_grows():
    before = machine.peak_memory_bytes()

    block = bytearray(b"x" * 50_000_000)

    assert machine.peak_memory_bytes() >= before
    assert machine.peak_memory_bytes() >= len(block)


@pytest.mark.parametrize("wanted", [None, "1", " 1,2 ", "0", "", "many", "9" * 30])
def test_threads_are_set_for_torch(monkeypatch, wanted):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)

    machine.set_num_threads(1)
    one = torch.get_num_threads()
    machine.set_num_threads(0)
    by_default = torch.get_num_threads()

    torch.set_num_threads(before)
    assert (one, by_default) == (1, 1 if wanted in ("1", " 1,2 ") else machine.num_cores())
