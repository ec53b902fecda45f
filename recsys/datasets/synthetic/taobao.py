"""`synthetic:taobao`: any number of generated samples with the shape of TBSM's Taobao data.

A sample is a user, a history of items that the user clicked, the oldest first, and a candidate. Its
label tells whether the user clicked the candidate next. Sample i is a pure function of the seed,
the settings and i: every random number in it is a hash of (seed, i, the number's purpose).

- Items are numbered by a seeded bijection, so a row says nothing about popularity. An item's
  category is a function of its row. Categories, and the items of a category, are popular by power
  laws.
- A user has two interests at a time, which are categories. Time passes in phases of five clicks. In
  each phase, one of the two interests is replaced. A click is on an item of a current interest with
  probability 0.8, and otherwise of any category, by popularity.
- A sample is at a random phase of a random user. The candidate of a positive is the next click. The
  candidate of a negative is drawn uniformly from all items, as in TBSM's data. Half of the samples
  are positives.
- Four of five histories are full; the others have any number of steps, at least one.

So the category of a positive's candidate is mostly among the latest of the history, and a model
that compares the candidate with each step can learn it. Labels are planted: an AUC on these samples
compares models and tests code, and says nothing about real data. Since negatives are uniform,
popularity alone tells something of the label, as it does in TBSM's data.

Shape letters: B samples, T steps of a full history. Arrays (B, T + 1) have a column for each click
of a full history and one for the candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import torch

from recsys._support.hashing import GOLDEN, mix64
from recsys.batch import Batch, JaggedIds
from recsys.datasets.splits import classic_splits
from recsys.datasets.synthetic.parameters import multiplier_for
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SyntheticTaobao"]

# Raise it if a change of the code changes the samples of the same settings.
_VERSION: Final = "v1"
_MAX_TABLE_SIZE: Final = 1 << 31  # products of two rows must fit in 63 bits

_NUM_INTERESTS: Final = 2
_CLICKS_OF_PHASE: Final = 5
_NUM_PHASES: Final = 16
_INTEREST_SHARE: Final = 0.8
_FULL_SHARE: Final = 0.8
# Popularity falls as rank**-exponent.
_CATEGORY_EXPONENT: Final = 0.6
_ITEM_EXPONENT: Final = 0.6

# The counter of the first hash of each purpose.
_USER, _PHASE, _FULL, _LENGTH, _LABEL, _KIND, _OWN, _ITEM, _NEGATIVE, _INTEREST, _BIJECTION = (
    np.uint64(purpose << 32) for purpose in range(1, 12)
)
_FIRST: Final = np.zeros(1, np.uint64)

_FEATURE_TABLES: Final = {
    "user": "user",
    "item_history": "item",
    "item": "item",
    "category_history": "category",
    "category": "category",
}
_HISTORIES: Final = {"item_history": "item", "category_history": "category"}


@final
class SyntheticTaobao:
    """Samples with histories and planted labels; a `SampleSource`.

    The real data have about 988,000 users, 4.2 million items and 9,400 categories; the defaults are
    smaller.

    Args:
        num_samples: Samples in all splits together. It does not change sample i.
        seed: Any integer; only its low 64 bits are used.
        num_users: Rows of the table "user".
        num_items: Rows of the table "item".
        num_categories: Rows of the table "category", at most as many as items.
        num_steps: T, the most steps of a history.

    Raises:
        ConfigError: there are fewer than 7 samples or no steps, a table size is not in [1, 2**31],
            or there are more categories than items.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        *,
        num_users: int = 100_000,
        num_items: int = 400_000,
        num_categories: int = 9_000,
        num_steps: int = 20,
    ) -> None:
        self._num_samples, self._seed = int(num_samples), int(seed)
        self._table_sizes = {
            "user": int(num_users),
            "item": int(num_items),
            "category": int(num_categories),
        }
        self._num_steps = int(num_steps)
        _check(self._num_samples, self._table_sizes, self._num_steps)
        self._key = np.array([self._seed & (2**64 - 1)], np.uint64)
        keys = _hash(self._key, _BIJECTION, np.arange(2, dtype=np.uint64)).tolist()
        self._items = _Bijection.of(keys[0], self._table_sizes["item"])
        self._categories = _Bijection.of(keys[1], self._table_sizes["category"])

    @property
    def num_samples(self) -> int:
        """Samples in all splits together."""
        return self._num_samples

    @property
    def num_dense(self) -> int:
        """I, the number of dense features: 0."""
        return 0

    @property
    def table_sizes(self) -> dict[str, int]:
        """`num_embeddings` by table: "user", "item" and "category"."""
        return dict(self._table_sizes)

    @property
    def feature_tables(self) -> dict[str, str]:
        """The table that each feature looks up."""
        return dict(_FEATURE_TABLES)

    @property
    def histories(self) -> dict[str, str]:
        """The candidate's feature of each history's feature."""
        return dict(_HISTORIES)

    @property
    def splits(self) -> dict[str, range]:
        """The sample numbers of "train", "test" and "validation", as in `classic_splits`."""
        return classic_splits(self._num_samples)

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Several threads may call it at once.

        Shape:
            samples (B,); result: dense_features (B, 0); sparse_features int64, with one row of
            "user", "item" and "category" for each sample, and one to T rows of each history, as
            many of items as of categories; labels (B,) float32.

        Raises:
            IndexError: a sample number is not in [0, num_samples).
        """
        samples = np.ascontiguousarray(samples, np.int64)
        outside = (samples < 0) | (samples >= self._num_samples)
        if outside.any():
            raise IndexError(
                f"synthetic:taobao: sample {samples[outside.argmax()]} is not in "
                f"[0, {self._num_samples}); raise num_samples"
            )
        keys_B = mix64(self._key + (samples.astype(np.uint64) + np.uint64(1)) * GOLDEN)
        users_B = _below(_hash(keys_B, _USER), self._table_sizes["user"])
        is_click_B = (_hash(keys_B, _LABEL) >> np.uint64(63)).astype(bool)
        items_BT, categories_BT = self._clicks(keys_B, users_B, is_click_B)
        lengths_B = self._lengths(keys_B)
        is_step_BT = np.arange(self._num_steps) >= self._num_steps - lengths_B[:, None]
        ones_B = np.ones_like(lengths_B)
        values = [
            users_B,
            items_BT[:, :-1][is_step_BT],
            items_BT[:, -1],
            categories_BT[:, :-1][is_step_BT],
            categories_BT[:, -1],
        ]
        lengths = [ones_B, lengths_B, ones_B, lengths_B, ones_B]
        offsets = np.concatenate([np.zeros(1, np.int64), np.concatenate(lengths).cumsum()])
        return Batch(
            torch.empty(len(samples), 0),
            JaggedIds(
                list(_FEATURE_TABLES),
                torch.from_numpy(np.concatenate(values)),
                torch.from_numpy(offsets),
            ),
            torch.from_numpy(is_click_B.astype(np.float32)),
        )

    @property
    def fingerprint(self) -> str:
        """Equal for equal settings."""
        sizes = ",".join(map(str, self._table_sizes.values()))
        return (
            f"synthetic:taobao {_VERSION} {self._num_samples} {self._seed} {sizes} "
            f"steps={self._num_steps}"
        )

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record; JSON types only."""
        return {
            "name": "synthetic:taobao",
            "num_samples": self._num_samples,
            "seed": self._seed,
            "num_dense": self.num_dense,
            "table_sizes": self.table_sizes,
            "features": [
                {
                    "name": name,
                    "table": table,
                    "kind": "sequence" if name in _HISTORIES else "one",
                }
                for name, table in _FEATURE_TABLES.items()
            ],
            "max_history": self._num_steps,
        }

    def _lengths(self, keys_B: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of steps of each history."""
        is_full_B = _uniform(_hash(keys_B, _FULL)) < _FULL_SHARE
        shorter_B = 1 + _below(_hash(keys_B, _LENGTH), self._num_steps)
        return np.where(is_full_B, self._num_steps, shorter_B)

    def _clicks(
        self, keys_B: NDArray[np.uint64], users_B: NDArray[np.int64], is_click_B: NDArray[np.bool]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The items of full histories and of candidates, (B, T + 1), and their categories.

        In a rank, an item is category + num_categories * (rank among the items of the category).
        """
        num_items, num_categories = self._table_sizes["item"], self._table_sizes["category"]
        back_T = np.arange(self._num_steps, -1, -1)  # clicks until the candidate
        keys, counters = keys_B[:, None], back_T.astype(np.uint64)
        categories = self._category_ranks(keys_B, users_B, back_T)
        own = _uniform(_hash(keys, _ITEM, counters))
        num_own = (num_items - 1 - categories) // num_categories + 1
        ranks = categories + num_categories * _popular(own, num_own, _ITEM_EXPONENT)
        negatives_B = _below(_hash(keys_B, _NEGATIVE), num_items)
        ranks[:, -1] = np.where(is_click_B, ranks[:, -1], negatives_B)
        return self._items.rows(ranks), self._categories.rows(ranks % num_categories)

    def _category_ranks(
        self, keys_B: NDArray[np.uint64], users_B: NDArray[np.int64], back_T: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The category of each click, by popularity; result (B, T + 1)."""
        counters = back_T.astype(np.uint64)
        kinds = _hash(keys_B[:, None], _KIND, counters)
        is_interest = _uniform(kinds) < _INTEREST_SHARE
        # `_uniform` leaves the low 11 bits of a hash unused.
        interest = (kinds % np.uint64(_NUM_INTERESTS)).astype(np.int64)

        # The first phase is so late that no click of a history is before phase 0.
        first_phase = self._num_steps // _CLICKS_OF_PHASE
        phases_B = first_phase + _below(_hash(keys_B, _PHASE), _NUM_PHASES)
        phases = phases_B[:, None] - back_T // _CLICKS_OF_PHASE
        # An interest lasts two phases. The two interests are replaced in turn.
        number = _NUM_INTERESTS * ((phases + interest) // _NUM_INTERESTS) + interest
        users = mix64(self._key + (users_B.astype(np.uint64) + _INTEREST) * GOLDEN)
        of_interest = _uniform(_hash(users[:, None], _INTEREST, number.astype(np.uint64)))

        own = _uniform(_hash(keys_B[:, None], _OWN, counters))
        draws = np.where(is_interest, of_interest, own)
        return _popular(draws, self._table_sizes["category"], _CATEGORY_EXPONENT)


class _Bijection(NamedTuple):
    """A seeded bijection between popularity ranks and rows: rank * multiplier + shift mod size."""

    size: int
    multiplier: int
    shift: int

    @classmethod
    def of(cls, key: int, size: int) -> _Bijection:
        multiplier = multiplier_for(key, size)
        return cls(size, multiplier, key // size % size)

    def rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        return (ranks * self.multiplier + self.shift) % self.size


def _hash(
    keys: NDArray[np.uint64], purpose: np.uint64, counters: NDArray[np.uint64] = _FIRST
) -> NDArray[np.uint64]:
    """The numbers `counters` of a purpose, for each key; keys and counters broadcast."""
    return mix64(keys + (counters + purpose) * GOLDEN)


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _below(bits: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Numbers in [0, size)."""
    return (bits % np.uint64(size)).astype(np.int64)


def _popular(
    uniform: NDArray[np.float64], sizes: NDArray[np.int64] | int, exponent: float
) -> NDArray[np.int64]:
    """Ranks below `sizes`, whose density falls as (rank + 1)**-exponent, from uniform numbers."""
    limits, power = np.asarray(sizes, np.int64), 1 - exponent
    highest = np.power(limits + 1.0, power)
    ranks = np.power(1 + uniform * (highest - 1), 1 / power).astype(np.int64) - 1
    found: NDArray[np.int64] = np.minimum(ranks, limits - 1)
    return found


def _check(num_samples: int, table_sizes: dict[str, int], num_steps: int) -> None:
    if num_samples < 7:
        raise ConfigError(
            "synthetic.num_samples must be at least 7, one for each part of the classic split, "
            f"got {num_samples}; raise it"
        )
    if num_steps < 1:
        raise ConfigError(f"synthetic:taobao: num_steps must be at least 1, got {num_steps}")
    for table, size in table_sizes.items():
        if not 1 <= size <= _MAX_TABLE_SIZE:
            raise ConfigError(
                f"synthetic:taobao: the size of table {table!r} must be in [1, {_MAX_TABLE_SIZE}], "
                f"got {size}"
            )
    if table_sizes["category"] > table_sizes["item"]:
        raise ConfigError(
            "synthetic:taobao: there must be an item for each category, got "
            f"{table_sizes['item']} items and {table_sizes['category']} categories; "
            "lower num_categories"
        )
