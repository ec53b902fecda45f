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


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, [["5000"]]),
        ("\n0::/\n", {"memory.max": "7000"}, [["7000"]]),
        ("0::/of/the/host\n", {"memory.max": "7000"}, [["7000"]]),
        ("4:memory:/a\n", {"memory.max": "1"}, []),
        ("", {"memory.max": "7000"}, []),
    ],
)
def test_limits_are_those_of_the_groups_of_the_process(tmp_path, groups, limits, expected):
    (tmp_path / "groups").write_text(groups)
    for name, limit in limits.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    for name, found in (("groups", expected), ("none", [])):
        places = tmp_path / name, tmp_path / "root"
        assert machine.limits_of_groups("memory.max", *places) == found


def test_memory_and_cores_are_at_most_those_of_the_container(monkeypatch):
    alone = machine.memory_bytes()
    limits = {"memory.max": [["4096"], [str(2**70)]], "cpu.max": [["150000", "100000"]]}
    monkeypatch.setattr(machine, "limits_of_groups", limits.get)

    assert machine.memory_bytes() == 4096
    assert machine.num_cores() == 1
    assert alone > 2**30


@pytest.mark.parametrize("wanted", [None, "1", " 1,2 ", "0", "", "many", "9" * 30])
def test_threads_are_set_for_torch(monkeypatch, wanted, threads_as_before):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "_busy_cores", lambda: 0.2)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)

    machine.set_num_threads(1)
    one = torch.get_num_threads()
    machine.set_num_threads(0)

    by_default = 1 if wanted in ("1", " 1,2 ") else machine.num_cores()
    assert (one, torch.get_num_threads()) == (1, by_default)
