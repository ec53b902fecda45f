"""FAE's shuffle scheduler: decides how many cold and hot mini-batches make a turn.

    rate = percent of the cold mini-batches, then of the hot ones, that come before the next swap

A rate near 100 trains on all cold samples and then on all hot ones. A rate near 1 is close to a
random order, at the price of more swaps. The scheduler reads a validation loss after each swap: it
divides the rate when the loss rises, and multiplies it when the loss falls several times in a row.

The rule is a reconstruction: the paper describes its purpose, and the published code has no
scheduler. So every constant is a field.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from recsys._support.states import SavedState
from recsys._support.untrusted import is_number, is_whole
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAE", "ShuffleScheduler"]

_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (is_number, "a finite number"),
    "int": (partial(is_whole, least=1), "an integer of at least 1"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
}


@dataclass(frozen=True)
class FAE:
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

    rate: float = 50.0
    is_adaptive: bool = True
    min_rate: float = 1.0
    max_rate: float = 100.0
    patience: int = 4
    factor: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (is_right, rule) = getattr(self, field.name), _CHECKS[str(field.type)]
            if not is_right(value):
                raise ConfigError(f"FAE: {field.name} must be {rule}, got {value!r}")
        if not 0 < self.min_rate <= self.rate <= self.max_rate <= 100:
            raise ConfigError(
                "FAE: rates are percentages with 0 < min_rate <= rate <= max_rate <= 100, got "
                f"{self.min_rate}, {self.rate} and {self.max_rate}"
            )
        if not self.factor > 1:
            raise ConfigError(f"FAE: factor must be above 1, got {self.factor}")


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
        """Continue where `state` was taken.

        Raises:
            ConfigError: it is no state of a scheduler; or its rate is out of the bounds of `FAE`,
                or differs from a fixed one.
        """
        found = SavedState("shuffle scheduler state", state, self.state_dict())
        fae, last_loss = self._fae, found["last_loss"]
        if last_loss is not None and type(last_loss) not in (int, float):
            raise found.error("last_loss", "a number or None")
        rate = found.number("rate", least=fae.min_rate, most=fae.max_rate)
        if rate != fae.rate and not fae.is_adaptive:
            raise found.error("rate", f"{fae.rate:g}, which FAE(is_adaptive=False) keeps")
        num_swaps = found.whole("num_swaps")
        num_falls = found.whole("num_falls", most=fae.patience - 1)
        self.rate, self.num_swaps, self._num_falls = rate, num_swaps, num_falls
        self._last_loss = last_loss
