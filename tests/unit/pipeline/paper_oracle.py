"""What Slipstream's published code does, in plain Python, on a toy model.

The toy model is a sum: the loss of a sample is its label times the sum of its rows' numbers, each
column with a factor. So the gradient of a row is the sum of the labels of its lookups, and with
numbers that are small multiples of a power of two every step is exact in float32.
"""

from copy import deepcopy
from dataclasses import dataclass, field

FACTORS = (1.0, 0.5)  # of the columns


@dataclass
class Sample:
    """Its row of each table, and its label."""

    rows: list[int]
    label: float


@dataclass
class Constants:
    """As in the published code, but for the number of samples in a mini-batch."""

    batch_size: int
    first_snapshot: int
    window_share: float
    target: float
    tolerance: float
    highest_threshold: float
    first_threshold: float
    max_tries: int
    sample_share: float


@dataclass
class Epoch:
    """What happened in an epoch; `threshold` is None if the search did not begin."""

    mini_batches: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    threshold: float | None = None
    tries: int = 0
    num_stale_rows: int = 0


class Oracle:
    """Trains `tables` (lists of rows) on `samples`; `hot_rows` are pairs (table, row)."""

    def __init__(self, tables, samples, hot_rows, constants, lr):
        self.tables, self.samples, self.hot_rows = deepcopy(tables), samples, hot_rows
        self.constants, self.lr = constants, lr

    def epoch(self, cold, hot, draw):
        """Train on cold samples, then on hot ones, given as sample numbers in order.

        `draw(num_left, num)` gives the places, among the inputs after the window, of the sample.
        """
        use, found = self.constants, Epoch()
        for mini_batch in self._cut(cold):
            self._train(mini_batch, found)

        hot_batches = self._cut(hot)
        first = use.first_snapshot
        last = first + round(use.window_share * len(hot_batches))
        before = None
        for number, mini_batch in enumerate(hot_batches[: last + 1]):
            if number == first:
                before = deepcopy(self.tables)
            self._train(mini_batch, found)
        left = hot[(last + 1) * use.batch_size :]
        num_sampled = int(use.sample_share * len(hot))
        if not left or not num_sampled:  # the published code stops with an error
            for mini_batch in self._cut(left):
                self._train(mini_batch, found)
            return found

        changes = {
            (table, row): [abs(a - b) for a, b in zip(old, new, strict=True)]
            for table, (olds, news) in enumerate(zip(before, self.tables, strict=True))
            for row, (old, new) in enumerate(zip(olds, news, strict=True))
            if (table, row) in self.hot_rows
        }

        def stale_rows(threshold):
            return {
                pair
                for pair, columns in changes.items()
                if all(change < threshold for change in columns)
            }

        def is_stale(sample, stale):
            return all(pair in stale for pair in self._lookups(sample))

        sampled = [left[place] for place in draw(len(left), num_sampled)]
        low, high, threshold, found.threshold = 0.0, use.highest_threshold, use.first_threshold, 0.0
        while found.tries < use.max_tries:
            found.tries += 1
            stale = stale_rows(threshold)
            share = sum(is_stale(each, stale) for each in sampled) / len(sampled)
            if use.target - use.tolerance <= share <= use.target + use.tolerance:
                found.threshold = threshold
                break
            if share < use.target - use.tolerance:
                low = threshold
            else:
                high = threshold
            threshold = (low + high) / 2

        stale = stale_rows(found.threshold)
        found.num_stale_rows = len(stale)
        found.dropped = [each for each in left if is_stale(each, stale)]
        for mini_batch in self._cut([each for each in left if not is_stale(each, stale)]):
            self._train(mini_batch, found)
        return found

    def _cut(self, numbers):
        size = self.constants.batch_size
        return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]

    def _lookups(self, number):
        return list(enumerate(self.samples[number].rows))

    def _train(self, mini_batch, found):
        found.mini_batches.append(mini_batch)
        gradients = {}
        for number in mini_batch:
            for pair in self._lookups(number):
                gradients[pair] = gradients.get(pair, 0.0) + self.samples[number].label
        for (table, row), gradient in gradients.items():
            for column, factor in enumerate(FACTORS):
                self.tables[table][row][column] -= self.lr * gradient * factor
