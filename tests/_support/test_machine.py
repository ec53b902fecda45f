import pytest
import torch

from recsys._support import machine


@pytest.fixture
def no_call_before():
    machine._checkout.cache_clear()
    yield
    machine._checkout.cache_clear()


@pytest.mark.usefixtures("no_call_before")
def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "recsys" / "_support" / "machine.py"))

    environment = machine.describe_environment()

    assert (environment["commit"], environment["dirty"]) == (None, None)
    assert environment["torch"] == torch.__version__


@pytest.mark.usefixtures("no_call_before")
def test_a_process_asks_for_its_commit_once(monkeypatch):
    answers = iter(["c0ffee", " M recsys/batch.py"])
    monkeypatch.setattr(machine, "_git", lambda *_: next(answers))

    environments = [machine.describe_environment() for _ in range(2)]

    assert [(each["commit"], each["dirty"]) for each in environments] == [("c0ffee", True)] * 2


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
