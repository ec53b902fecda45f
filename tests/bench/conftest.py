"""What tests of benchmarks share."""

import multiprocessing
from types import SimpleNamespace

import pytest

from recsys.bench.parts import worker


@pytest.fixture(scope="session")
def forking():
    """Processes of their own that need not import anew: forks of one that has imported, no more."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    context = multiprocessing.get_context("forkserver")
    benchmarks = [f"recsys.bench.{name}" for name in ("lookup", "tiers", "file_tier", "prepare")]
    context.set_forkserver_preload([*benchmarks, "fbgemm_gpu", "torch._dynamo"])
    return SimpleNamespace(get_context=lambda _: context)


@pytest.fixture
def quick_workers(forking, monkeypatch):
    """Workers whose processes fork; those of `test_worker.py` are started as they are for users."""
    monkeypatch.setattr(worker, "multiprocessing", forking)
