"""Checkpoints and exports from a stranger are refused by name, in bounded time and memory."""

from __future__ import annotations

import os
import random
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

FORGERIES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("forgeries.py"))))
NUM_CASES = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else 60


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    FORGERIES.make_good(folder)
    return folder


def test_damaged_files_are_refused_by_name(good, tmp_path):
    start = int(os.environ.get("RECSYS_SEED", "0"))
    outcomes = Counter()
    for seed in range(start, start + NUM_CASES):
        try:
            outcomes[FORGERIES.run_case(good, tmp_path / "case", random.Random(seed))] += 1
        except BaseException as error:
            error.add_note(f"RECSYS_SEED={seed}")
            raise

    assert outcomes["CheckpointError"] > NUM_CASES // 4
    assert outcomes["done"] > 5
