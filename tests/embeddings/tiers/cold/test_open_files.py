"""Files of rows and state are open once, however often they are made."""

from pathlib import Path

import pytest
import torch

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import Adam


def open_files(folder):
    found = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    return sorted(path for path in found if path.is_relative_to(folder))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_state_that_begins_anew_closes_its_earlier_files(tmp_path):
    files = {"cold_tier": "file", "cold_path": tmp_path}
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=Adam(lr=0.1), budget=4000, **files)

    def step():
        bag(torch.tensor([[1, 2, 3]])).sum().backward()

    step()
    before = open_files(tmp_path)
    for _ in range(2):
        bag.row_optimizer.state.pop(bag.weight)
        step()

    assert len(before) == 4  # the lock, the rows and two state arrays
    assert open_files(tmp_path) == before
    assert float(bag.row_optimizer.state[bag.weight]["step"]) == 1.0
