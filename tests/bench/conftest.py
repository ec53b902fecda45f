"""What tests of benchmarks share."""

from types import SimpleNamespace

import pytest

from recsys.bench.parts import worker
from tests.forks import server_of_forks


@pytest.fixture(scope="session")
def forking():
    """Processes of their own that need not import anew: forks of one that has imported, no more."""
    context = server_of_forks()
    return SimpleNamespace(get_context=lambda _: context)


@pytest.fixture
def quick_workers(forking, monkeypatch):
    """Workers whose processes fork; those of `test_worker.py` are started as they are for users."""
    monkeypatch.setattr(worker, "multiprocessing", forking)
