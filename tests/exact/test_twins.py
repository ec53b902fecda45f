"""Random training has the bits of plain PyTorch; see `twins.py`, which also runs for hours."""

import pytest
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


def test_without_a_wait_for_rows_bits_differ(folder, monkeypatch):
    def begin_update(self, entries):
        self._versions = None

    monkeypatch.setattr(Fetcher, "before_update", begin_update)

    def play_many():
        for seed in range(300):
            play(seed, folder)

    with pytest.raises(AssertionError):
        play_many()
