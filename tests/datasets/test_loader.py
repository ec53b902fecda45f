import functools
import json
import operator
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import Batch, JaggedIds
from recsys.datasets import BatchLoader


class Numbered:
    """A source whose samples say their own number."""

    num_dense = 1
    fingerprint = "numbered"

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.table_sizes = {"number": num_samples}
        half = num_samples // 2
        self.splits = {
            "train": range(half, num_samples),
            "test": range(half),
            "validation": range(0),
        }

    def read(self, samples):
        numbers = torch.from_numpy(samples)
        ids = JaggedIds.from_one_hot(["number"], numbers.unsqueeze(0))
        return Batch(numbers.unsqueeze(1).float(), ids, torch.zeros(len(samples)))

    def describe(self):
        return {}


def numbers(batch):
    return batch.sparse_features.values().tolist()


def epochs_of(loader, num_epochs):
    return [[numbers(batch) for batch in loader] for _ in range(loader.epoch, num_epochs)]


@given(
    num_samples=st.integers(2, 60),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32),
    prefetch=st.integers(1, 4),
    permutation_seed=st.none() | st.integers(0, 9),
    data=st.data(),
)
def test_a_loader_stopped_anywhere_and_resumed_gives_the_batches_of_an_uninterrupted_one(
    num_samples, batch_size, shuffle, drop_last, seed, prefetch, permutation_seed, data
):
    drop_last &= batch_size <= num_samples - num_samples // 2

    def make():
        return BatchLoader(
            Numbered(num_samples),
            "train",
            np.int64(batch_size),
            shuffle=shuffle,
            seed=np.int64(seed),
            drop_last=drop_last,
            prefetch=prefetch,
            permutation_seed=permutation_seed,
        )

    epochs = epochs_of(make(), 3)
    expected = [batch for epoch in epochs for batch in epoch]
    assert [len(epoch) for epoch in epochs] == [len(make())] * 3
    if not drop_last:
        samples = sorted(sample for batch in epochs[0] for sample in batch)
        assert samples == list(range(num_samples // 2, num_samples))
    num_before = data.draw(st.integers(0, len(expected)))
    stopped, seen = make(), []
    while len(seen) < num_before:
        for batch in stopped:
            seen.append(numbers(batch))
            if len(seen) == num_before:
                break

    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    seen += [batch for epoch in epochs_of(resumed, 3) for batch in epoch]

    assert seen == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    def orders(seed):
        loader = BatchLoader(Numbered(200), "train", 100, shuffle=True, seed=seed)
        return epochs_of(loader, 2)

    (first, second), (other, _) = orders(0), orders(1)

    assert first != second
    assert first != other
    assert orders(0) == [first, second]


def test_batches_that_wait_to_be_used_are_not_counted():
    loader = BatchLoader(Numbered(40), "train", 5, shuffle=False)
    batches = iter(loader)
    assert batches.num_waiting == 0
    positions = []
    for num_waiting in (0, 1, 2, 0):
        next(batches)
        batches.num_waiting = num_waiting
        positions.append(loader.state_dict()["next_sample"])
    assert positions == [5, 5, 5, 20]

    batches.num_waiting = 1
    assert list(batches) == []  # the epoch is not over: one of its batches waits
    assert loader.state_dict()["next_sample"] == 15
    assert loader.epoch == 0
    batches.num_waiting = 0
    assert list(batches) == []
    assert loader.epoch == 1


def test_an_iteration_closed_early_goes_on_with_the_batches_that_waited():
    loader = BatchLoader(Numbered(40), "train", 5, shuffle=False)
    batches = iter(loader)
    first = [numbers(next(batches))]
    for num_waiting in (1, 2, 3):
        first.append(numbers(next(batches)))
        batches.num_waiting = num_waiting

    batches.close()

    assert list(batches) == []
    assert [numbers(batch) for batch in loader] == first[1:]
    assert loader.epoch == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside the reading thread
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_go_on_with_an_iteration():
    loader = BatchLoader(Numbered(4000), "train", 5, shuffle=False)
    running = iter(loader)
    next(running)

    child = os.fork()
    if not child:
        signal.alarm(30)  # it hung
        with pytest.raises(RuntimeError, match="began in another process, which forked this one"):
            list(running)
        running.close()
        os._exit(len(list(loader)) % 100)  # 399 are left

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
    assert len(list(running)) == 399


def test_large_sources_are_addressed_with_64_bits():
    source = Numbered(4)
    source.splits = {"train": range(2**31 - 2, 2**31 + 2)}

    batches = [numbers(batch) for batch in BatchLoader(source, "train", 3, shuffle=False)]

    assert batches == [[2**31 - 2, 2**31 - 1, 2**31], [2**31 + 1]]
    assert np.iinfo(np.int32).max < batches[1][0]


def test_with_many_cores_several_batches_are_read_at_once_and_come_in_order(monkeypatch):
    class AllAtOnce(Numbered):
        def read(self, samples):
            everyone_reads.wait()
            return super().read(samples)

    everyone_reads = threading.Barrier(3, timeout=30)
    monkeypatch.setattr("recsys.datasets.loader.num_cores", lambda: 12)

    loader = BatchLoader(AllAtOnce(36_000), "train", 3000, shuffle=False)

    assert [numbers(batch)[0] for batch in loader] == list(range(18_000, 36_000, 3000))


class Broken(Numbered):
    """Notes what is read; a sample cannot be read."""

    def __init__(self, num_samples, broken):
        super().__init__(num_samples)
        self.broken, self.begun = broken, []

    def read(self, samples):
        self.begun.append(int(samples[0]))
        if self.broken in samples:
            raise OSError("the disk is gone")
        return super().read(samples)


def test_an_error_while_reading_ahead_comes_after_the_batches_before_it():
    before = threading.active_count()
    loader = BatchLoader(Broken(40, 30), "train", 5, shuffle=False)

    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)

    assert loader.state_dict()["next_sample"] == 10
    assert threading.active_count() == before


# Small mini-batches are read in groups of 2,048 samples, or of 16 mini-batches.
@pytest.mark.parametrize(
    ("num_samples", "batch_size", "prefetch", "num_taken", "end"),
    [(100, 1, 2, 1, 82), (20_000, 500, 2, 6, 17_500), (30_000, 3000, 2, 1, 24_000)],
)
def test_so_many_batches_are_read_ahead_and_no_more(
    num_samples, batch_size, prefetch, num_taken, end
):
    source = Broken(num_samples, end)
    batches = iter(BatchLoader(source, "train", batch_size, shuffle=False, prefetch=prefetch))
    for _ in range(num_taken):
        next(batches)
    for _ in range(3):  # at the third time nothing new has begun for a while
        time.sleep(0.05)
        begun = sorted(source.begun)
    batches.close()

    assert begun == list(range(num_samples // 2, end, batch_size))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_read_into_page_locked_memory():
    loader = BatchLoader(Numbered(6), "train", 2, shuffle=False, pin_memory=True)

    for batch in loader:
        parts = batch.dense_features, batch.sparse_features.values(), batch.labels
        assert all(each.is_pinned() for each in parts)


def test_the_order_inside_of_mini_batches_can_be_drawn_anew():
    plain, other, same, seeded = (
        epochs_of(
            BatchLoader(Numbered(120), "train", 16, shuffle=True, seed=3, permutation_seed=seed), 2
        )
        for seed in (None, 5, 5, 6)
    )

    assert other == same
    assert plain != other != seeded
    for epoch, permuted in zip(plain, other, strict=True):
        assert [sorted(batch) for batch in epoch] == [sorted(batch) for batch in permuted]
        assert all(a != b for a, b in zip(epoch, permuted, strict=True))


@given(
    num_samples=st.integers(2, 60),
    batch_size=st.integers(1, 20),
    num_ranks=st.integers(1, 4),
    stop=st.integers(0, 8),
)
def test_ranks_divide_every_batch_and_have_one_position(num_samples, batch_size, num_ranks, stop):
    arguments = {"split": "train", "batch_size": batch_size, "shuffle": True, "seed": 3}
    whole = BatchLoader(Numbered(num_samples), **arguments)
    parts = [
        BatchLoader(Numbered(num_samples), **arguments, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]

    iterators = [iter(loader) for loader in parts]
    for number, batch in enumerate(whole):
        own = [numbers(next(each)) for each in iterators]
        assert functools.reduce(operator.add, own) == numbers(batch)
        sizes = [len(each) for each in own]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= -(-batch_size // num_ranks)
        assert all(loader.state_dict() == whole.state_dict() for loader in parts)
        if number == stop:
            break
    for each in iterators:
        each.close()
