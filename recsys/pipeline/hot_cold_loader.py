"""Mini-batches of hot samples alone and of cold ones alone, as FAE's scheduler wants them.

    turn     a share of the cold mini-batches, then the same share of the hot ones
    swap     the end of a turn; then the loss on other samples decides how long the next one is

Within its kind every sample comes once per epoch, in an order that is a function of (seed, epoch).
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.datasets.read_ahead import ReadAhead
from recsys.errors import ConfigError
from recsys.pipeline.shuffle_scheduler import ShuffleScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.source import SampleSource
    from recsys.pipeline.shuffle_scheduler import FAE

__all__ = ["HotColdLoader"]

_COLD, _HOT = 0, 1


class HotColdLoader:
    """Iterates over one split of a source, cold and hot samples in turns; every one once per epoch.

        loader = HotColdLoader(store, "train", 128, is_hot, FAE(), seed=0)
        for batch in loader:
            ...
            if loader.wants_loss:
                loader.observe(validation_loss())

    An iteration left early goes on where it stopped when the loader is iterated again. There is one
    position, so there is one iteration at a time.

    Args:
        source: Where samples come from.
        split: "train", "test" or "validation".
        batch_size: B. The last mini-batch of each kind may be smaller.
        is_hot: Which of the split's samples are hot, (N,).
        fae: The scheduler's constants.
        seed: Of the order.
        prefetch: Mini-batches read ahead, at least, within a turn.

    Attributes:
        epoch: Epochs that have ended.
        scheduler: Has the rate.
        wants_loss: Whether a turn has ended, and the next one waits for `observe`.

    Raises:
        ConfigError: an argument is out of range.
        RuntimeError: an iteration is begun, or a state loaded, while another one is running; or a
            mini-batch is asked for before `observe`.
    """

    def __init__(
        self,
        source: SampleSource,
        split: str,
        batch_size: int,
        is_hot: NDArray[np.bool_],
        fae: FAE,
        *,
        seed: int = 0,
        prefetch: int = 2,
    ) -> None:
        samples = source.splits[split]
        if len(is_hot) != len(samples):
            raise ConfigError(
                f"is_hot must say it of the {len(samples)} samples of the {split} split, got "
                f"{len(is_hot)}; find them for this split"
            )
        if batch_size < 1 or prefetch < 1:
            raise ConfigError(
                f"batch_size and prefetch must be at least 1, got {batch_size} and {prefetch}"
            )
        self.source, self.split, self.batch_size = source, split, batch_size
        self.seed, self.fae = seed, fae
        self.epoch, self.wants_loss = 0, False
        self.scheduler = ShuffleScheduler(fae)
        numbers = np.arange(samples.start, samples.stop)
        self._samples = [numbers[~is_hot], numbers[is_hot]]
        self._told = hashlib.sha256(np.packbits(is_hot).tobytes()).hexdigest()[:16]
        self._num_done = [0, 0]  # mini-batches of this epoch, cold and hot
        self._num_left = [0, 0]  # of this turn
        self._reader = ReadAhead(source, prefetch)
        self._is_iterating = False

    def __len__(self) -> int:
        """Mini-batches in a whole epoch."""
        return sum(self._num_batches)

    @property
    def hot_share(self) -> float:
        """Hot samples, of all."""
        cold, hot = map(len, self._samples)
        return hot / max(1, cold + hot)

    def __iter__(self) -> Iterator[Batch]:
        self._require_idle("iterated")
        orders = [self._order(kind) for kind in (_COLD, _HOT)]
        self._is_iterating = True
        try:
            while self._num_done != self._num_batches:
                self._require_loss()
                if not any(self._num_left):
                    self._begin_turn()
                kinds = [kind for kind in (_COLD, _HOT) for _ in range(self._num_left[kind])]
                parts = self._parts(orders, kinds)
                with closing(self._reader.read(parts)) as batches:
                    for kind, batch in zip(kinds, batches, strict=True):
                        self._num_done[kind] += 1
                        self._num_left[kind] -= 1
                        is_over = self._num_done == self._num_batches
                        is_swap = not any(self._num_left) and not is_over
                        self.wants_loss = is_swap and self.fae.is_adaptive
                        yield batch
        finally:
            self._is_iterating = False
        self.epoch += 1
        self._num_done = [0, 0]

    def observe(self, loss: float) -> None:
        """Take note of the loss that the turn has led to, on samples that are not trained on."""
        self.scheduler.observe(loss)
        self.wants_loss = False

    def finish_reading(self) -> None:
        """Wait until all that is read ahead is there; until the next mini-batch nothing more is."""
        self._reader.finish()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, what its order rests on, and the scheduler's state, in JSON types."""
        return {
            "epoch": self.epoch,
            "num_done": list(self._num_done),
            "num_left": list(self._num_left),
            "wants_loss": self.wants_loss,
            "scheduler": self.scheduler.state_dict(),
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: it was taken with other data, another plan, seed or batch size.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ConfigError(
                f"loader state: keys must be {sorted(own)}, got {sorted(state)}; use what "
                "state_dict returned"
            )
        for key, value in self._identity().items():
            if state[key] != value:
                raise ConfigError(
                    f"loader state: {key} is {state[key]!r}, but this loader has {value!r}; make "
                    "the loader as the one that was saved"
                )
        self._require_idle("given a state")
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.wants_loss = state["epoch"], state["wants_loss"]
        self._num_done, self._num_left = list(state["num_done"]), list(state["num_left"])

    @property
    def _num_batches(self) -> list[int]:
        return [-(-len(samples) // self.batch_size) for samples in self._samples]

    def _begin_turn(self) -> None:
        for kind, num_batches in enumerate(self._num_batches):
            share = self.scheduler.share_of(num_batches)
            self._num_left[kind] = min(share, num_batches - self._num_done[kind])

    def _parts(
        self, orders: list[NDArray[np.int64]], kinds: list[int]
    ) -> Iterator[NDArray[np.int64]]:
        """The samples of mini-batches of these kinds, from here on."""
        starts = [num * self.batch_size for num in self._num_done]
        for kind in kinds:
            yield orders[kind][starts[kind] : starts[kind] + self.batch_size]
            starts[kind] += self.batch_size

    def _order(self, kind: int) -> NDArray[np.int64]:
        order = self._samples[kind].copy()
        np.random.Generator(np.random.PCG64([self.seed, self.epoch, kind])).shuffle(order)
        return order

    def _identity(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "data": self.source.fingerprint,
            "is_hot": self._told,
        }

    def _require_loss(self) -> None:
        if self.wants_loss:
            raise RuntimeError(
                "the loader's next turn waits for the loss behind the last one; call observe(loss) "
                "where wants_loss is set, or use FAE(is_adaptive=False)"
            )

    def _require_idle(self, action: str) -> None:
        if self._is_iterating:
            raise RuntimeError(
                f"the loader of the {self.split} split cannot be {action}: an iteration of it is "
                "still running; end that first, or use a loader of its own"
            )
