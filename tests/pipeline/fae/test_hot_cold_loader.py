"""Hot and cold mini-batches: every sample once, kinds apart, turns as long as the rate says."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.pipeline import FAE, HotColdLoader

NUM_SAMPLES = 210


class Numbered:
    """A source whose samples are their numbers."""

    num_samples, fingerprint = NUM_SAMPLES, "numbers"

    def __init__(self, num_train=NUM_SAMPLES):
        self.splits = {"train": range(num_train), "test": range(0), "validation": range(0)}

    def read(self, samples):
        return samples.tolist()


def make(is_hot, batch_size=7, seed=0, num_train=None, **constants):
    source = Numbered(len(is_hot) if num_train is None else num_train)
    return HotColdLoader(source, "train", batch_size, np.array(is_hot), FAE(**constants), seed=seed)


def take(loader, losses=()):
    """All batches, and after which of them a loss was wanted."""
    losses, swaps, batches = iter(losses), [], []
    for batch in loader:
        batches.append(batch)
        if loader.wants_loss:
            swaps.append(len(batches))
            loader.observe(next(losses, 1.0))
    return batches, swaps


@given(
    is_hot=st.lists(st.booleans(), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    rate=st.sampled_from([1, 10, 50, 99.5, 100]),
    losses=st.lists(st.floats(0, 1), max_size=10),
    is_adaptive=st.booleans(),
)
def test_every_sample_comes_once_and_kinds_stay_apart(
    is_hot, batch_size, rate, losses, is_adaptive
):
    loader = make(is_hot, batch_size, rate=rate, is_adaptive=is_adaptive)

    batches, swaps = take(loader, losses)

    assert sorted(sample for batch in batches for sample in batch) == list(range(len(is_hot)))
    assert all(len({is_hot[sample] for sample in batch}) == 1 for batch in batches)
    assert len(batches) == len(loader)
    assert loader.epoch == 1
    assert is_adaptive or not swaps


def test_a_turn_is_a_share_of_the_cold_then_of_the_hot_mini_batches():
    is_hot = [number % 3 == 0 for number in range(NUM_SAMPLES)]  # 20 cold and 10 hot mini-batches
    loader = make(is_hot, rate=25)

    batches, swaps = take(loader)

    kinds = "".join("H" if is_hot[batch[0]] else "c" for batch in batches)
    assert kinds == "cccccHHH" * 3 + "cccccH"
    assert swaps == [8, 16, 24]
    assert take(loader)[0] != batches  # each epoch has an order of its own


def test_the_next_turn_waits_for_the_loss():
    loader = make([True, False] * 30, rate=10)

    with pytest.raises(RuntimeError, match="call observe"):
        list(loader)

    loader.observe(1.0)
    assert next(iter(loader))


@given(stop=st.integers(0, 60), rate=st.sampled_from([5, 30, 100]))
def test_a_state_goes_on_with_the_very_next_mini_batch(stop, rate):
    is_hot = [number % 3 == 0 for number in range(60)]
    losses = [1.0, 2.0, 1.5, 1.4, 1.3]
    whole, _ = take(make(is_hot, 3, rate=rate), losses)
    loader, taken, left = make(is_hot, 3, rate=rate), [], iter(losses)
    for batch in loader:
        taken.append(batch)
        if loader.wants_loss:
            loader.observe(next(left, 1.0))
        if len(taken) == stop:
            break

    resumed = make(is_hot, 3, rate=rate)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))

    if len(taken) < len(whole):
        assert taken + take(resumed, left)[0] == whole
