"""Cases under random delays leave nothing open, and what is left open is found: `threads.py`."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD

SCRIPT = Path(__file__).with_name("threads.py")
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


@pytest.mark.serial
def test_cases_under_random_delays_leave_nothing_open(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--cases", "2", "--seed", "34", "--json", tmp_path / "found.json"],
        env=os.environ | {"PYTHONDEVMODE": "1"},
        check=False,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_cases"] == 2
    assert found["delays"] > 100
    assert found["most_threads"] > 2
    assert not any(found["left"].values())


@pytest.fixture
def opened():
    """Watches what this process has open."""
    spec = importlib.util.spec_from_file_location("threads_under_delays", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        spec.loader.exec_module(script)
    watching = script.Open()
    with watching.watched():
        watching.begin()
        yield watching


def test_what_is_left_open_is_found_and_what_is_closed_is_not(opened, tmp_path):
    (tmp_path / "table").write_bytes(bytes(36))
    end, file = threading.Event(), (tmp_path / "file").open("w")
    thread = threading.Thread(target=end.wait)
    thread.start()
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=9)
    bag = HotColdEmbeddingBag(300, 4, optimizer=SGD(lr=0.1), budget=3000)

    with pytest.raises(AssertionError, match="a case left behind"):
        opened.require_closed(0.05)
    assert {what for what, number in opened.left.items() if number} == set(opened.left)
    end.set()
    thread.join()
    file.close()
    del table, bag
    opened.require_closed()

    assert not any(opened.left.values())
