"""Files of rows and state are open once, however often they are made."""

import torch

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import Adam
from tests.scratch_files import scratch_files


def test_state_that_begins_anew_closes_its_earlier_files(tmp_path):
    files = {"cold_tier": "file", "cold_path": tmp_path}
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=Adam(lr=0.1), budget=4000, **files)

    def step():
        bag(torch.tensor([[1, 2, 3]])).sum().backward()

    step()
    assert len(scratch_files(tmp_path)) == 3  # the rows and two state arrays
    for _ in range(2):
        bag.row_optimizer.state.pop(bag.weight)
        step()

    assert len(scratch_files(tmp_path)) == 3
    assert float(bag.row_optimizer.state[bag.weight]["step"]) == 1.0
