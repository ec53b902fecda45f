"""Random training has the bits of plain PyTorch; see `twins.py`, which also runs for hours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


# Not serial: to compile its kernels takes half a minute, in which other tests run.
def test_two_threads_change_no_bit(folder, monkeypatch):
    kernels = "recsys.embeddings.kernels.cpu"
    limits = ["lookup.MIN_SHARED_BYTES", "update.MIN_SHARED_BYTES"]
    for limit in (*limits, "claim._MIN_SHARED_IDS", "move._MIN_SHARED_ROWS"):
        monkeypatch.setattr(f"{kernels}.{limit}", 0)
    monkeypatch.setattr("tests.exact.twins.DIMS", [7])  # fewer kernels to compile
    torch.set_num_threads(2)
    for seed in range(20):
        play(seed, folder)
