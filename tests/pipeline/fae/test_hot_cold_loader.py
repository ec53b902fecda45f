"""Hot and cold mini-batches: every sample once, kinds apart, turns as long as the rate says."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.synthetic.samples import SyntheticCriteo
from recsys.pipeline.fae import FAE, HotColdLoader

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


def test_hot_mini_batches_are_numbered_in_their_order():
    is_hot = [number % 3 == 0 for number in range(NUM_SAMPLES)]
    loader = make(is_hot, rate=30, is_adaptive=False)
    for _ in range(2):
        hot, numbers, expected = [], [], loader.hot_samples().tolist()

        iterator = iter(loader)
        for batch in iterator:
            if is_hot[batch[0]]:
                hot += batch
                numbers.append(loader.last_hot_number(iterator))
                assert loader.hot_samples(len(numbers)).tolist() == expected[len(hot) :]
            else:
                assert loader.last_hot_number(iterator) is None

        assert hot == expected
        assert numbers == list(range(loader.num_hot_batches))
        assert len(hot) == loader.num_hot_samples


def test_losses_make_turns_shorter():
    is_hot = [number % 2 == 0 for number in range(NUM_SAMPLES)]

    _, swaps = take(make(is_hot, rate=20), [1.0, 2.0, 3.0, 4.0])

    assert swaps == [6, 12, 16, 18, 20, 22, 24, 26, 28]


def test_the_next_turn_waits_for_the_loss():
    loader = make([True, False] * 30, rate=10)

    with pytest.raises(RuntimeError, match="call observe"):
        list(loader)

    loader.observe(1.0)
    assert next(iter(loader))


def test_order_is_a_function_of_seed_and_epoch():
    is_hot = [number % 3 == 0 for number in range(60)]
    one, other, third = (make(is_hot, seed=seed) for seed in (0, 0, 1))

    first = [take(loader)[0] for loader in (one, other, third)]
    second = [take(loader)[0] for loader in (one, other)]

    assert first[0] == first[1] != first[2]
    assert second[0] == second[1] != first[0]


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


def test_a_loader_with_numbers_of_numpy_has_the_state_of_one_without():
    of_numpy, of_python = (
        make([True, False] * 9, number(4), number(3)) for number in (np.int64, int)
    )

    state = json.loads(json.dumps(of_numpy.state_dict()))

    assert state == of_python.state_dict()
    of_numpy.load_state_dict(state)


def test_a_loss_that_no_turn_waits_for_is_refused():
    loader = make([True, False] * 30, rate=10)

    with pytest.raises(RuntimeError, match="no turn of the loader has ended"):
        loader.observe(1.0)

    assert loader.scheduler.num_swaps == 0


def test_there_is_one_iteration_at_a_time():
    loader = make([True, False] * 10)
    running = iter(loader)
    next(running)

    with pytest.raises(RuntimeError, match="an iteration of it is still running"):
        next(iter(loader))
    running.close()
    next(iter(loader))


def test_a_real_source_is_read_whole():
    source = SyntheticCriteo(num_samples=350, table_sizes=[30, 7], seed=0)
    split = source.splits["train"]
    is_hot = np.arange(len(split)) % 4 == 0

    loader = HotColdLoader(source, "train", 16, is_hot, FAE(is_adaptive=False))

    assert sum(len(batch.labels) for batch in loader) == len(split)
