"""Mini-batches of full size from chosen samples: none lost, none twice, the position exact."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from recsys.datasets import BatchLoader
from recsys.pipeline.skip.refill import EVERYTHING, Chosen, Position, Refill
from recsys.pipeline.window import Window
from tests.pipeline.test_positions import Numbered, numbers


def choose_by(is_chosen, taken_for):
    """Chooses samples by their index in the stream; notes what raw mini-batches are taken for."""

    def choose(raw):
        taken_for[raw.number] = raw.taken_for
        mask = is_chosen[raw.first_index : raw.first_index + raw.size]
        if mask.all():
            return EVERYTHING
        return Chosen(np.flatnonzero(mask))

    return choose


def chunks_of(sizes):
    """Raw mini-batches whose samples are their own index in the stream."""
    ends = np.cumsum([0, *sizes])
    return [torch.arange(int(begin), int(end)) for begin, end in pairwise(ends)]


def refill_of(is_chosen, position=None, taken_for=None):
    choose = choose_by(is_chosen, {} if taken_for is None else taken_for)
    return Refill(choose, position or Position(), "skip=test")


def take_all(maker, iterator):
    """All mini-batches, and the position after each."""
    found, positions = [], []
    while True:
        try:
            made = maker.take(iterator, lambda batch: batch)
        except StopIteration:
            maker.end(iterator)
            return found, positions
        maker.set_num_waiting(iterator, 0)
        found.append(made.batch.tolist())
        positions.append(maker.position)


streams = st.lists(st.integers(1, 7), min_size=1, max_size=12)
patterns = st.lists(st.booleans(), min_size=84, max_size=84)


@given(sizes=streams, pattern=patterns, stop=st.integers(0, 30))
def test_samples_come_once_in_full_mini_batches_and_a_position_says_which_are_used_up(
    sizes, pattern, stop
):
    is_chosen, raw, total = np.array(pattern), chunks_of(sizes), sum(sizes)
    taken_for, again = {}, {}
    maker = refill_of(is_chosen, taken_for=taken_for)

    found, positions = take_all(maker, iter(raw))

    expected = np.flatnonzero(is_chosen[:total]).tolist()
    assert [sample for batch in found for sample in batch] == expected
    end = maker.position
    assert (end.num_seen, end.num_raw, end.num_kept) == (total, len(sizes), len(expected))
    # Only whole raw mini-batches pass through smaller than full, and the last one.
    lists = [chunk.tolist() for chunk in raw]
    for batch, position in zip(found[:-1], positions, strict=False):
        assert len(batch) == position.full_size or batch in lists
    if not found:
        return
    stop = stop % len(found)
    position = positions[stop]
    maker = refill_of(is_chosen, position, again)
    resumed, later = take_all(maker, iter(raw[position.num_raw :]))
    assert resumed == found[stop + 1 :]
    assert again.items() <= taken_for.items()
    assert later == positions[stop + 1 :]
    used = sum(sizes[: position.num_raw]) + position.offset
    assert position.num_seen == used
    assert position.num_kept == is_chosen[:used].sum() == sum(map(len, found[: stop + 1]))


def test_a_mini_batch_that_is_kept_whole_passes_through_untouched():
    raw = [torch.arange(4), torch.arange(3), torch.arange(4)]
    maker = refill_of(np.ones(11, bool))
    iterator = iter(raw)

    found = [maker.take(iterator, lambda batch: batch).batch for _ in raw]

    assert all(ours is theirs for ours, theirs in zip(found, raw, strict=True))


def test_an_iterator_that_fails_loses_no_sample_before_and_after():
    class Failing:
        def __init__(self):
            self.chunks, self.count = iter(chunks_of([4, 4, 4])), 0

        def __next__(self):
            self.count += 1
            if self.count == 2:
                raise OSError("the disk is gone")
            return next(self.chunks)

    is_chosen = np.array([True, True, False] * 4)
    maker, iterator = refill_of(is_chosen), Failing()
    with pytest.raises(OSError, match="disk"):
        maker.take(iterator, lambda batch: batch)

    found, _ = take_all(maker, iterator)

    assert [sample for batch in found for sample in batch] == np.flatnonzero(is_chosen).tolist()


@given(
    num_samples=st.integers(1, 60),
    parts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=3),
    last_size=st.integers(1, 9),
    pattern=patterns,
    depth=st.integers(0, 5),
)
@example(  # the first 4 samples of raw mini-batch 1 are used, and pass in mini-batches of 2
    num_samples=30,
    parts=[(9, 1)],
    last_size=2,
    pattern=[True] * 5 + [False] * 4 + [True] * 75,
    depth=0,
)
def test_a_run_stopped_and_resumed_with_another_batch_size_loses_no_sample(
    num_samples, parts, last_size, pattern, depth
):
    """A loader and a position say the next sample, however many mini-batches wait."""
    is_chosen, found, position, state = np.array(pattern), [], Position(), None
    for size, stop in [*parts, (last_size, 10**6)]:
        loader = BatchLoader(Numbered(num_samples), "train", size, shuffle=True)
        if state is not None:
            loader.load_state_dict(state)
        window, iterator = Window(), iter(loader)
        window.refill = refill_of(is_chosen, position._replace(full_size=size))
        for _ in range(stop):
            window.fill(iterator, depth, None)
            try:
                found += numbers(window.pop(iterator, None).batch)
            except StopIteration:
                break
        position, state = window.refill.position, loader.state_dict()
        if state["epoch"]:
            break
        assert state["next_sample"] + position.offset == position.num_seen

    assert state["epoch"] == 1
    assert position.num_seen == num_samples
    order = [
        sample
        for batch in BatchLoader(Numbered(num_samples), "train", 5, shuffle=True)
        for sample in numbers(batch)
    ]
    assert found == [sample for sample, kept in zip(order, is_chosen, strict=False) if kept]


@dataclass
class Weighable:
    """A dataclass that knows nothing of recsys, with weights."""

    values: torch.Tensor
    weights: torch.Tensor | None = None


def test_a_part_without_weights_gets_ones():
    def choose(raw):
        samples = np.arange(3)
        return Chosen(samples, np.full(3, 2, np.float32) if raw.number else None)

    raw = [Weighable(torch.arange(4)), Weighable(torch.arange(4, 8))]
    made = Refill(choose, Position(), "skip=test").take(iter(raw), lambda batch: batch)

    assert made.batch.values.tolist() == [0, 1, 2, 4]
    assert made.batch.weights.tolist() == made.weights.tolist() == [1, 1, 1, 2]


def test_a_loader_that_overwrites_samples_that_wait_is_refused():
    chunks = chunks_of([4, 4, 4, 4])
    buffer = chunks[0].clone()

    def refilled_buffer():
        yield buffer
        yield buffer.copy_(chunks[1])
        yield from chunks[2:]

    iterator, maker = refilled_buffer(), refill_of(np.array([1, 1, 1, 0] * 4, bool))

    with pytest.raises(RuntimeError, match="has filled an earlier mini-batch again, which still"):
        take_all(maker, iterator)
    found, _ = take_all(maker, iterator)

    assert found == [[8, 9, 10, 12], [13, 14]]
