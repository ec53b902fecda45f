"""FAE: mini-batches of hot samples alone, and of others alone, in turns.

    hot      a sample whose rows are all pinned by a plan; `HotPlan.find_hot_samples` finds them
    turn     a share of the cold mini-batches, the *rate*, then the same share of the hot ones
    swap     the end of a turn; the validation loss then decides how long the next turn is

A rate near 100 trains on all cold samples and then on all hot ones. A rate near 1 is close to a
random order, at the price of more swaps. The scheduler reads a validation loss after each swap: it
divides the rate when the loss rises, and multiplies it when the loss falls several times in a row.
The rule is a reconstruction: the paper describes its purpose, and the published code has no
scheduler. So every constant is a field.

Each sample comes once per epoch. The order of the hot samples and that of the cold ones are
functions of (seed, epoch).
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.untrusted import (
    AbstractSettings,
    is_whole,
    require_same,
    require_state,
    setting,
)
from recsys.datasets.loader import ResumableLoader, read_ahead
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource
    from recsys.datasets.loader import BatchIterator

__all__ = ["FAE", "HotColdLoader", "ShuffleScheduler"]

_COLD, _HOT = 0, 1


@dataclass(frozen=True)
class FAE(AbstractSettings):
    """Trains on mini-batches of only hot samples, whose rows are all pinned, or only cold ones.

    This changes the order of samples, and therefore losses and rows. A run equals, to the last bit,
    a plain run over the samples in that order.

    Args:
        rate: The first rate, in percent.
        is_adaptive: Whether losses change the rate.
        min_rate: The lowest rate.
        max_rate: The highest rate.
        patience: How many times in a row the loss must fall before the rate is multiplied.
        factor: What the rate is multiplied and divided by.

    Raises:
        ConfigError: a constant is out of range, or of another type.
    """

    rate: float = setting(50.0, "percent of mini-batches issued before a swap", gt=0, le=100)
    is_adaptive: bool = setting(True, "whether losses change the rate")
    min_rate: float = setting(1.0, "the lowest rate", gt=0)
    max_rate: float = setting(100.0, "the highest rate", le=100)
    patience: int = setting(4, "falls of the loss before the rate is multiplied", ge=1)
    factor: float = setting(2.0, "what the rate is multiplied and divided by", gt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_rate <= self.rate <= self.max_rate:
            raise ConfigError(
                "FAE: rates must be min_rate <= rate <= max_rate, got "
                f"{self.min_rate}, {self.rate} and {self.max_rate}"
            )


class ShuffleScheduler:
    """Adapts the rate to the losses.

    Args:
        fae: The constants.

    Attributes:
        rate: The current rate, in percent.
        num_swaps: Losses seen.
    """

    def __init__(self, fae: FAE) -> None:
        self._fae = fae
        self.rate, self.num_swaps = float(fae.rate), 0
        self._last_loss: float | None = None
        self._num_falls = 0

    def share_of(self, num_batches: int) -> int:
        """How many of `num_batches` come before the next swap: at least one, if there is any."""
        return min(num_batches, max(1, ceil(num_batches * self.rate / 100)))

    def observe(self, loss: float) -> None:
        """Adapt the rate to the loss after a swap; nan leaves it as it is."""
        loss = float(loss)  # a tensor, or a number of numpy
        last, self._last_loss = self._last_loss, loss
        self.num_swaps += 1
        if not self._fae.is_adaptive or last is None:
            return
        if loss > last:
            self.rate = max(self._fae.min_rate, self.rate / self._fae.factor)
            self._num_falls = 0
        elif loss < last:
            self._num_falls += 1
            if self._num_falls == self._fae.patience:
                self.rate = min(self._fae.max_rate, self.rate * self._fae.factor)
                self._num_falls = 0
        else:
            self._num_falls = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that later rates depend on, in JSON types."""
        return {
            "rate": self.rate,
            "num_swaps": self.num_swaps,
            "last_loss": self._last_loss,
            "num_falls": self._num_falls,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.rate, self.num_swaps = state["rate"], state["num_swaps"]
        self._last_loss, self._num_falls = state["last_loss"], state["num_falls"]


@dataclass
class _Position:
    """A position in an epoch.

    Attributes:
        num_done: Cold and hot mini-batches of this epoch that were used.
        num_left: Cold and hot mini-batches left in this turn.
        wants_loss: Whether a turn has ended and the next one waits for `observe`.
    """

    num_done: list[int]
    num_left: list[int]
    wants_loss: bool = False


class HotColdLoader(ResumableLoader[_Position]):
    """Iterates over one split of a source, over cold and hot samples in turns, each once per epoch.

        loader = HotColdLoader(store, "train", 128, is_hot, FAE(), seed=0)
        for batch in loader:
            ...
            if loader.wants_loss:
                loader.observe(validation_loss())

    If an iteration is left early, the next one continues where it stopped. The loader has one
    position, so only one iteration can run at a time.

    The position is the next mini-batch to be used. Mini-batches handed out count as used, except
    for the last `num_waiting`, an attribute of the iterator (`iter(loader).num_waiting`, default
    0). A `TrainPipeline` sets it to the number of mini-batches that it has taken ahead. With
    `FAE(is_adaptive=True)` none can be taken ahead, because the loss after a turn decides which
    mini-batches come next; a pipeline that looks ahead refuses such a loader.

    Args:
        source: Where samples come from.
        split: "train", "test" or "validation".
        batch_size: B. The last mini-batch of each kind may be smaller.
        is_hot: Which samples of the split are hot, (N,) bool.
        fae: The scheduler's constants.
        seed: Seed of the order.
        prefetch: The least number of mini-batches to read ahead within a turn.
        pin_memory: As for `BatchLoader`.

    Attributes:
        epoch: Epochs that have ended.
        scheduler: Holds the current rate.
        wants_loss: Whether a turn has ended and the next one waits for `observe`.

    Raises:
        ConfigError: an argument is out of range, or `is_hot` is not boolean.
        RuntimeError: an iteration begins, or a state is loaded, while another iteration runs; the
            next mini-batch is requested before `observe`; or `observe` is called at another time.
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
        prefetch: int = 4,
        pin_memory: bool = False,
    ) -> None:
        samples, is_hot = source.splits[split], np.asarray(is_hot)
        if is_hot.dtype != np.bool_:  # integers would choose samples by their numbers
            raise ConfigError(
                f"is_hot must be boolean, got {is_hot.dtype}; give is_hot.astype(bool)"
            )
        if is_hot.shape != (len(samples),):
            raise ConfigError(
                f"is_hot must have one value for each of the {len(samples)} samples of the {split} "
                f"split, got {is_hot.shape}; find the hot samples of this split"
            )
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("prefetch", prefetch, 1),
        ):
            if not is_whole(value, least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        super().__init__(
            split, _Position([0, 0], [0, 0]), _WHY_NOT_AHEAD if fae.is_adaptive else ""
        )
        self.source, self.fae = source, fae
        self.batch_size, self.seed = int(batch_size), int(seed)  # states hold no numbers of numpy
        self.epoch = 0
        self.scheduler = ShuffleScheduler(fae)
        numbers = np.arange(samples.start, samples.stop)
        self._samples = [numbers[~is_hot], numbers[is_hot]]
        self._is_hot_digest = hashlib.sha256(np.packbits(is_hot).tobytes()).hexdigest()[:16]
        self.prefetch, self.pin_memory = prefetch, pin_memory

    def __len__(self) -> int:
        """Mini-batches in a whole epoch."""
        return sum(self._num_batches)

    @property
    def hot_share(self) -> float:
        """Share of the samples that are hot."""
        cold, hot = map(len, self._samples)
        return hot / max(1, cold + hot)

    @property
    def num_hot_samples(self) -> int:
        """Number of hot samples."""
        return len(self._samples[_HOT])

    @property
    def num_hot_batches(self) -> int:
        """Hot mini-batches in a whole epoch."""
        return self._num_batches[_HOT]

    def hot_samples(self, first: int = 0) -> NDArray[np.int64]:
        """The hot samples in this epoch's order, from hot mini-batch `first` on; (M,) int64.

        Args:
            first: Number of a hot mini-batch of the epoch.
        """
        return self._order(_HOT)[first * self.batch_size :]

    def last_hot_number(self, iterator: BatchIterator[_Position]) -> int | None:
        """The number, among this epoch's hot mini-batches, of the last mini-batch handed out.

        Args:
            iterator: The running iteration, after it has handed out a mini-batch.

        Returns:
            The number; None if that mini-batch is cold.
        """
        before, after = (position.num_done[_HOT] for position in iterator.last_taken)
        return before if after > before else None

    @property
    def wants_loss(self) -> bool:
        """Whether a turn has ended and the next one waits for `observe`."""
        return self._position.wants_loss

    def observe(self, loss: float) -> None:
        """Give the scheduler the loss after a turn, on samples that are not trained on.

        Args:
            loss: The mean loss of those samples.

        Raises:
            RuntimeError: no turn has ended since the last loss.
        """
        if not self.wants_loss:
            raise RuntimeError(
                "no turn of the loader has ended since the last loss; call observe(loss) only "
                "where wants_loss is set"
            )
        self.scheduler.observe(loss)
        self._position.wants_loss = False

    def state_dict(self) -> dict[str, Any]:
        """The position, what the order depends on, and the scheduler's state, in JSON types."""
        return {
            "epoch": self.epoch,
            **asdict(self._position),
            "scheduler": self.scheduler.state_dict(),
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: `state` comes from other data, another plan, seed or batch size.
        """
        found = require_state("loader state", state, self.state_dict())
        require_same("loader", found, self._identity())
        self._require_idle("given a state")
        self.scheduler.load_state_dict(found["scheduler"])
        self.epoch = found["epoch"]
        self._settled = _Position(
            list(found["num_done"]), list(found["num_left"]), found["wants_loss"]
        )

    @property
    def _num_batches(self) -> list[int]:
        return [-(-len(samples) // self.batch_size) for samples in self._samples]

    def _read(self, position: _Position) -> Generator[tuple[Batch, _Position]]:
        orders = [self._order(kind) for kind in (_COLD, _HOT)]
        current = position
        while current.num_done != self._num_batches:
            self._require_loss(current)
            num_left = current.num_left if any(current.num_left) else self._new_turn(current)
            kinds = [kind for kind in (_COLD, _HOT) for _ in range(num_left[kind])]
            parts = self._parts(orders, kinds, current)
            reader = read_ahead(self.source, parts, self.prefetch, pin_memory=self.pin_memory)
            with closing(reader) as batches:
                for kind, batch in zip(kinds, batches, strict=True):
                    num_done, num_left = list(current.num_done), list(num_left)
                    num_done[kind] += 1
                    num_left[kind] -= 1
                    is_over = num_done == self._num_batches
                    is_swap = not any(num_left) and not is_over
                    current = _Position(num_done, num_left, is_swap and self.fae.is_adaptive)
                    yield batch, current

    def _end_epoch(self) -> _Position:
        self.epoch += 1
        return _Position([0, 0], [0, 0])

    def _new_turn(self, position: _Position) -> list[int]:
        """Numbers of cold and hot mini-batches in the next turn."""
        return [
            min(self.scheduler.share_of(num_batches), num_batches - num_done)
            for num_batches, num_done in zip(self._num_batches, position.num_done, strict=True)
        ]

    def _parts(
        self, orders: list[NDArray[np.int64]], kinds: list[int], position: _Position
    ) -> Iterator[NDArray[np.int64]]:
        """The samples of mini-batches of these kinds, beginning at a position."""
        starts = [num * self.batch_size for num in position.num_done]
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
            "is_hot": self._is_hot_digest,
        }

    def _require_loss(self, position: _Position) -> None:
        if position.wants_loss:
            raise RuntimeError(
                "the loader's next turn waits for the loss after the last one; call observe(loss) "
                "where wants_loss is set, or use FAE(is_adaptive=False)"
            )


_WHY_NOT_AHEAD = (
    "HotColdLoader with FAE(is_adaptive=True) decides by the loss after each turn which "
    "mini-batches come next; use schedule=Sequential() and no skip= that leaves samples out, or "
    "FAE(is_adaptive=False)"
)
