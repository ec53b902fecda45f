"""Random training has the bits of plain PyTorch; see `twins.py`, which also runs for hours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.tiers.fetch import Fetcher
from tests.exact.twins import ACTIONS, play


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("twins")


@settings(max_examples=max(300, settings().max_examples))
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["step", "step", "step", *ACTIONS]), min_size=3, max_size=25),
)
def test_rows_in_tiers_and_schedules_change_no_bit(folder, seed, actions):
    play(seed, folder, actions)


@pytest.mark.threads
def test_two_threads_change_no_bit(folder, monkeypatch):
    kernels = "recsys.embeddings.kernels.cpu"
    limits = ["lookup.MIN_SHARED_BYTES", "update.MIN_SHARED_BYTES"]
    for limit in (*limits, "claim._MIN_SHARED_IDS", "move._MIN_SHARED_ROWS"):
        monkeypatch.setattr(f"{kernels}.{limit}", 0)
    torch.set_num_threads(2)
    for seed in range(20):
        play(seed, folder)


def test_with_rows_that_are_not_written_back_bits_differ(folder, monkeypatch):
    accept_writes = Fetcher.accept_writes

    def forget_changes(self):
        self.marks.is_dirty[:] = 0
        accept_writes(self)

    monkeypatch.setattr(Fetcher, "accept_writes", forget_changes)

    def play_many():
        for seed in range(30):
            play(seed, folder)

    with pytest.raises(AssertionError):
        play_many()
