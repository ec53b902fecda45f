"""Mini-batches of a source: shuffled by a seed, read ahead by threads, exactly resumable.

The order of samples in an epoch is a function of (seed, epoch), so a position is two numbers: the
epoch and the next sample. Batches that are read ahead, or that a `TrainPipeline` has taken but not
trained on, do not change the position.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.states import SavedState
from recsys._support.untrusted import is_whole
from recsys.datasets.iteration import ResumableLoader
from recsys.datasets.read_ahead import ReadAhead
from recsys.datasets.splits import SPLITS
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource

__all__ = ["BatchLoader"]


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
        self._reader = ReadAhead(source, prefetch, pin_memory=pin_memory)
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
        with closing(self._reader.read(parts)) as batches:
            for start, batch in zip(starts, batches, strict=True):
                yield batch, min(start + self.batch_size, self._num_used)

    def _end_epoch(self) -> int:
        self.epoch += 1
        return 0

    def finish_reading(self) -> None:
        """Wait until the reading threads are idle; they stay so until the next batch is taken.

        Benchmarks call it before they stop a clock in the middle of an iteration.
        """
        self._reader.finish()

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
        found = SavedState("loader state", state, self.state_dict())
        found.require_same("loader", self._identity())
        epoch = found.whole("epoch")
        next_sample = found.whole("next_sample", most=len(self._samples))
        self._require_idle("loaded with a state")
        self.epoch, self._settled = epoch, next_sample

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
