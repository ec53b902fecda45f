"""Mini-batches of a source: shuffled by a seed, read ahead by threads, exactly resumable.

The order of samples in an epoch is a function of (seed, epoch), so a position is two numbers: the
epoch and the next sample. Batches that are read ahead, or that a `TrainPipeline` has taken but not
trained on, do not change the position: the pipeline writes their number to `num_waiting`.

Small mini-batches are read in groups: handing one from thread to thread, which waits for the GIL,
takes longer than reading it.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from recsys._support.machine import num_cores
from recsys._support.untrusted import is_whole, require_same, require_state
from recsys.datasets.store_writer import SPLITS
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import Self

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource

    _Read = tuple[list[Batch], Exception | None]

__all__ = [
    "BatchIterator",
    "BatchLoader",
    "ResumableLoader",
    "num_read_ahead",
    "one_ahead",
    "read_ahead",
]

P = TypeVar("P")
_T = TypeVar("_T")

_SAMPLES_AT_ONCE, _BATCHES_AT_ONCE = 2048, 16
_CORES_PER_READER = 4  # the others train


class ResumableLoader(ABC, Generic[P]):
    """A loader with one position, which at most one running iterator changes.

    Args:
        split: The name of the split, for errors.
        position: Where the first iteration begins.
        in_turn_because: See `BatchIterator`.
    """

    def __init__(self, split: str, position: P, in_turn_because: str = "") -> None:
        self.split = split
        self._in_turn_because = in_turn_because
        self._settled = position  # the position while no iterator runs
        self._running: weakref.ref[BatchIterator[P]] | None = None

    def __iter__(self) -> BatchIterator[P]:
        return BatchIterator(self, self._in_turn_because)

    @abstractmethod
    def _read(self, position: P) -> Generator[tuple[Batch, P]]:
        """Yield the rest of the epoch: each mini-batch with the position after it."""

    @abstractmethod
    def _end_epoch(self) -> P:
        """Count an epoch that has ended, and return the position where the next one begins."""

    @property
    def _position(self) -> P:
        iterator = self._running and self._running()
        return iterator.position if iterator else self._settled

    def _require_idle(self, action: str) -> None:
        iterator = self._running and self._running()
        if iterator and iterator.is_running:
            raise RuntimeError(
                f"the loader of the {self.split} split cannot be {action}: an iteration of it is "
                "still running; end that one first, or use a second loader"
            )
        if iterator:
            iterator.close()


class BatchIterator(Iterator["Batch"], Generic[P]):
    """One pass over a loader: the rest of its epoch.

    The iteration begins with the first `next`. It ends when `next` is called after the last
    mini-batch was used, by `close`, or when the iterator is dropped.

    Args:
        loader: Is read.
        in_turn_because: See the attribute.

    Attributes:
        loader: The loader that is read.
        num_waiting: How many of the last mini-batches handed out are not used yet. A caller that
            takes mini-batches before it uses them, as `TrainPipeline` does, sets it after each one
            taken and after each one used. The loader's position stays before these mini-batches,
            and the epoch does not end before they are used. It must not include mini-batches that
            count as used already.
        is_over: Whether the iteration has ended. Then mini-batches that wait must not be used: the
            next iteration of the loader returns them again.
        in_turn_because: The reason why each mini-batch must be used before the next one is taken;
            empty if there is none.

    Raises:
        RuntimeError: another iteration of the loader is running, or this one began in a process
            that forked this one.
    """

    def __init__(self, loader: ResumableLoader[P], in_turn_because: str) -> None:
        self.num_waiting = 0
        self.in_turn_because = in_turn_because
        self.loader = loader
        self._batches: Generator[tuple[Batch, P]] | None = None
        # Before the first mini-batch that may wait, and after each of them.
        self._positions: deque[P] = deque()
        self._process = 0
        self.is_over = self._has_failed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.is_over:
            raise StopIteration
        if self._batches is None:
            self._begin()
            assert self._batches is not None
        if self._process != os.getpid():  # the thread that reads exists only there
            raise RuntimeError(
                f"this iteration of the loader of the {self.loader.split} split began in another "
                "process, which forked this one; close it and iterate the loader again, or make "
                "a loader here"
            )
        while len(self._positions) > 1 + self.num_waiting:
            self._positions.popleft()
        try:
            batch, position = next(self._batches)
        except StopIteration:
            if self._has_failed and not self.num_waiting:
                self.close()
            elif not self.num_waiting:
                self._end()
            raise
        except BaseException:
            self._has_failed = True
            raise
        self._positions.append(position)
        return batch

    def close(self) -> None:
        """End the iteration. The loader's next one begins with the first unused mini-batch."""
        batches, self._batches = self._batches, None
        self.is_over = True
        if batches is not None:
            self.loader._settled, self.loader._running = self.position, None
            batches.close()

    def __del__(self) -> None:
        """Close an iterator that was dropped."""
        self.close()

    @property
    def position(self) -> P:
        """The loader's position: before the first mini-batch that is not used."""
        if not self._positions:  # the iteration has not begun
            return self.loader._position
        return self._positions[-1 - self.num_waiting]

    @property
    def last_taken(self) -> tuple[P, P]:
        """The positions before and after the last mini-batch handed out."""
        return self._positions[-2], self._positions[-1]

    @property
    def is_running(self) -> bool:
        """Whether more mini-batches may follow, or some that were handed out are not used yet."""
        return self._batches is not None and not (self._has_failed and not self.num_waiting)

    def _begin(self) -> None:
        self.loader._require_idle("iterated")
        start = self.loader._position
        self._positions.append(start)
        self._process = os.getpid()
        self._batches = self.loader._read(start)
        self.loader._running = weakref.ref(self)

    def _end(self) -> None:
        self._batches, self.is_over = None, True
        self.loader._settled, self.loader._running = self.loader._end_epoch(), None


class BatchLoader(ResumableLoader[int]):
    """Iterates over one split of a source; every sample once per epoch.

        loader = BatchLoader(store, "train", batch_size=128, shuffle=True, seed=0)
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:                # the rest of the current epoch
                ...
                state = loader.state_dict()     # continues after `batch`

    If an iteration is left early, the next iteration of the loader continues where it stopped. The
    loader has one position, so it allows one iteration at a time.

    The position is the next sample to be used. All batches handed out count as used, except for the
    last `num_waiting`, an attribute of the iterator (`iter(loader).num_waiting`, 0 unless set). A
    `TrainPipeline` sets it to the number of batches that it has taken ahead. Then, at any depth,
    `state_dict()` holds the next sample to be trained on, the next iteration continues with that
    sample, and an epoch ends after its last batch is trained on.

    Args:
        source: Is read.
        split: "train", "test" or "validation".
        batch_size: B. The last batch of an epoch may be smaller.
        shuffle: Draw a new order for every epoch; otherwise samples keep the source's order.
        seed: Seed of the shuffling.
        drop_last: Leave out a last batch smaller than B.
        prefetch: Batches read ahead, at least.
        pin_memory: Hand out batches in page-locked memory, from which CUDA copies without waiting.
        permutation_seed: If given, permute the samples inside each batch by this seed. Each batch
            keeps its set of samples.
        rank: With several processes that train together, the number of this one. Each hands out
            its own part of every batch, of `batch_size / num_ranks` samples, rounded up or down.
            All have the same position.
        num_ranks: The number of these processes.

    Raises:
        ConfigError: an argument is out of range, or the split is empty.
        RuntimeError: an iteration is started, or a state loaded, while another iteration is
            running.
    """

    def __init__(
        self,
        source: SampleSource,
        split: str,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 4,
        pin_memory: bool = False,
        permutation_seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {SPLITS}, got {split!r}")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("prefetch", prefetch, 1),
            ("seed", seed, 0),
            ("permutation_seed", permutation_seed or 0, 0),
        ):
            if not is_whole(value, least):
                raise ConfigError(f"{name} must be an integer and at least {least}, got {value!r}")
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank must lie in [0, num_ranks={num_ranks}), got {rank}")
        if not source.splits[split]:
            raise ConfigError(
                f"the {split} split is empty: the data has {source.num_samples} samples; use more "
                "data"
            )
        if drop_last and batch_size > len(source.splits[split]):
            raise ConfigError(
                f"batch_size must be at most {len(source.splits[split])}, the samples of the "
                f"{split} split, with drop_last, got {batch_size}: no batch would be left"
            )
        super().__init__(split, 0)
        self.source = source
        self.batch_size = int(batch_size)  # states hold no numbers of numpy
        self.shuffle = shuffle
        self.seed = int(seed)
        self.drop_last = drop_last
        self.prefetch = prefetch
        self.permutation_seed = None if permutation_seed is None else int(permutation_seed)
        self.rank, self.num_ranks = rank, num_ranks
        self.epoch = 0
        self._samples = source.splits[split]
        self.pin_memory = pin_memory
        self._num_used = len(self._samples)
        if drop_last:
            self._num_used -= self._num_used % batch_size

    def __len__(self) -> int:
        """Batches in a complete epoch."""
        return (self._num_used + self.batch_size - 1) // self.batch_size

    def _read(self, position: int) -> Generator[tuple[Batch, int]]:
        order = self._order()
        starts = range(position, self._num_used, self.batch_size)
        parts = (self._part(order[: self._num_used], start) for start in starts)
        reader = read_ahead(self.source, parts, self.prefetch, pin_memory=self.pin_memory)
        with closing(reader) as batches:
            for start, batch in zip(starts, batches, strict=True):
                yield batch, min(start + self.batch_size, self._num_used)

    def _end_epoch(self) -> int:
        self.epoch += 1
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, its next sample to be used, and the settings that fix the order of samples.

        JSON types only. Batches that wait to be used (`num_waiting`) do not count as used.
        """
        return {"epoch": self.epoch, "next_sample": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`. The batch size may differ.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: the state was taken with other data, another seed or another shuffling, or
                it is no state of a loader.
            RuntimeError: an iteration is running.
        """
        require_state("loader state", state, self.state_dict())
        require_same("loader", state, self._identity())
        self._require_idle("loaded with a state")
        self.epoch, self._settled = state["epoch"], state["next_sample"]

    def _identity(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "num_samples": len(self._samples),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "permutation_seed": self.permutation_seed,
            "data": self.source.fingerprint,
        }

    def _order(self) -> NDArray[Any]:
        # 32-bit numbers if they suffice: 157 MB instead of 314 MB for Kaggle's training part.
        dtype = np.int32 if self._samples.stop < 2**31 else np.int64
        order = np.arange(self._samples.start, self._samples.stop, dtype=dtype)
        if self.shuffle:
            np.random.Generator(np.random.PCG64([self.seed, self.epoch])).shuffle(order)
        return order

    def _part(self, order: NDArray[Any], start: int) -> NDArray[Any]:
        """This rank's samples of the batch that begins there."""
        samples = order[start : start + self.batch_size]
        if self.permutation_seed is not None:
            key = [self.seed, self.epoch, start, self.permutation_seed]
            samples = np.random.Generator(np.random.PCG64(key)).permutation(samples)
        begin, end = (len(samples) * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return samples[begin:end]


def num_read_ahead(prefetch: int, batch_size: int) -> int:
    """How many mini-batches are read ahead: at least `prefetch`, more if they are small."""
    return max(prefetch, min(_BATCHES_AT_ONCE, -(-_SAMPLES_AT_ONCE // batch_size)))


def one_ahead(items: Iterator[_T], thread_name: str) -> Generator[_T]:
    """The same items; a thread makes the next one while the caller uses one.

    Close it where it may not come to its end: the thread ends then.
    """
    with ThreadPoolExecutor(1, thread_name) as reader:
        upcoming = reader.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = reader.submit(next, items, None)
            yield item


def read_ahead(
    source: SampleSource,
    parts: Iterable[NDArray[np.integer]],
    num_ahead: int,
    *,
    pin_memory: bool = False,
) -> Generator[Batch]:
    """The samples of each part as a mini-batch, in order; some of them are read ahead.

    As many of them are read at once as there are readers: one thread for every four cores. The
    threads end with the iteration.

    Args:
        source: Is read.
        parts: Numbers of samples.
        num_ahead: Mini-batches read ahead, at least; see `num_read_ahead`.
        pin_memory: Return mini-batches in page-locked memory, from which CUDA copies without
            waiting.
    """
    num_readers = min(num_ahead, max(1, num_cores() // _CORES_PER_READER))
    begin = None
    if pin_memory:  # a thread begins with device 0, and would take memory there
        begin = partial(torch.cuda.set_device, torch.cuda.current_device())
    readers = ThreadPoolExecutor(num_readers, "recsys-load", begin)
    groups = _grouped(parts)
    ahead: deque[tuple[int, Future[_Read]]] = deque()  # sizes and results of groups

    def read_on() -> None:
        while sum(num for num, _ in ahead) < num_ahead and (group := next(groups, None)):
            ahead.append((len(group), readers.submit(_read_group, source, group, pin_memory)))

    try:
        read_on()
        while ahead:
            _, future = ahead.popleft()
            batches, error = future.result()
            read_on()
            yield from batches
            if error is not None:
                raise error
    finally:
        readers.shutdown(cancel_futures=True)


def _read_group(source: SampleSource, group: list[NDArray[np.integer]], pin_memory: bool) -> _Read:
    """The mini-batches of a group, and the error that ended it early."""
    batches: list[Batch] = []
    try:
        for samples in group:
            batch = source.read(samples.astype(np.int64))
            batches.append(batch.pin_memory() if pin_memory else batch)
    except Exception as error:  # raised after the mini-batches before it are handed out
        return batches, error
    return batches, None


def _grouped(parts: Iterable[NDArray[np.integer]]) -> Iterator[list[NDArray[np.integer]]]:
    """Group mini-batches to be read in one go."""
    group: list[NDArray[np.integer]] = []
    for part in parts:
        group.append(part)
        if len(group) == _BATCHES_AT_ONCE or sum(map(len, group)) >= _SAMPLES_AT_ONCE:
            yield group
            group = []
    if group:
        yield group
