"""What plain PyTorch computes, one lookup after the other: the engine must give the same bits."""

import numpy as np
import torch

from recsys.embeddings import SGD, Adagrad, Adam, RowWiseAdagrad

# Constants of SplitMix64, and bits of float32 numbers without the sign.
GOLDEN, FACTOR1, FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
INFINITY, LARGEST_BFLOAT16 = 0x7F800000, 0x7F7F0000


class Oracle:
    """Tables, their state, and the lookups that wait for the update.

    Args:
        tables: Copied; all are computed in one dtype.
        formula: How rows are updated.
        seed: Of stochastic rounding; None to round to nearest.
    """

    def __init__(self, tables, formula, seed=None):
        self.tables = [table.detach().clone() for table in tables]
        self.dtype = torch.promote_types(tables[0].dtype, torch.float32)
        self.formula, self.seed = formula, seed
        self.states = [
            [
                torch.zeros(len(table), size, dtype=self.dtype)
                for size in formula.state_sizes(table.shape[1]).values()
            ]
            for table in tables
        ]
        self.steps = [0] * len(tables)
        self.pending = []

    def look_up(self, lookups, bags, width):
        """The pooled rows, (B, W), each bag added up row by row."""
        pooled = torch.zeros(bags.num_samples, width, dtype=self.dtype)
        for table, position, column in lookups.locations:
            ids, lengths, weights = feature(bags, position)
            rows = self.tables[table].to(self.dtype)
            begins = lengths.cumsum(0) - lengths
            part = torch.zeros(bags.num_samples, rows.shape[1], dtype=self.dtype)
            for number in range(int(lengths.max()) if len(lengths) else 0):
                has_one = lengths > number
                places = begins[has_one] + number
                added = rows[ids[places]]
                if weights is not None:
                    added = weights[places].unsqueeze(1) * added
                part[has_one] += added
            if lookups.is_mean:
                part /= lengths.clamp(min=1).unsqueeze(1).to(self.dtype)
            pooled[:, column : column + rows.shape[1]] = part
        return pooled

    def add(self, lookups, bags, gradient):
        """Keep the gradient of a lookup until the step."""
        self.pending.append((lookups, bags, gradient))

    def step(self):
        """Update every row once, by the sum of its gradients in the order of lookups."""
        for table, weight in enumerate(self.tables):
            rows, gradients = [], []
            for lookups, bags, gradient in self.pending:
                for at, position, column in lookups.locations:
                    if at != table:
                        continue
                    ids, lengths, weights = feature(bags, position)
                    scales = torch.ones(len(ids), dtype=self.dtype) if weights is None else weights
                    if lookups.is_mean:
                        scales = scales / lengths.repeat_interleave(lengths).to(self.dtype)
                    part = gradient[:, column : column + weight.shape[1]]
                    gradients.append(scales.unsqueeze(1) * part.repeat_interleave(lengths, dim=0))
                    rows.append(ids)
            if not rows:
                continue
            self.steps[table] += 1
            step = self.steps[table]
            if sum(map(len, rows)):
                key = None if self.seed is None else key_of(self.seed, step, table)
                self._update(table, torch.cat(rows), torch.cat(gradients), step, key)
        self.pending = []

    def _update(self, table, rows, gradients, step, key):
        update_rows(
            self.formula, self.tables[table], self.states[table], rows, gradients, step, key
        )


def update_rows(formula, weight, states, rows, gradients, step=1, key=None):
    """Update rows in place. A table of bfloat16 is computed in float32 and rounded.

    Args:
        formula: How.
        weight: The table, (E, D).
        states: Its state, initially zeros, in the order of `state_sizes`, (E, size) each.
        rows: The row of each gradient, (N,); a row may occur several times.
        gradients: In the order of lookups, (N, D).
        step: Number of the step, from 1.
        key: `key_of` a table of bfloat16, to round it stochastically; None to round to nearest.
    """
    distinct, inverse = torch.unique(rows, return_inverse=True)
    summed = gradients.new_zeros(len(distinct), weight.shape[1])
    summed.index_add_(0, inverse, gradients)
    rate, eps = formula.rate_and_eps(formula.lr, step)
    change, new = change_of(formula, [state[distinct] for state in states], summed, rate, eps)
    for state, values in zip(states, new, strict=True):
        state[distinct] = values
    updated = weight[distinct].to(gradients.dtype) - change
    if weight.dtype == torch.bfloat16:
        updated = round_rows(updated, None if key is None else fold(key, distinct))
    weight[distinct] = updated


def change_of(formula, states, summed, rate, eps):
    """What one step subtracts from rows, and their new state; in the kernel's order."""
    if isinstance(formula, SGD):
        return rate * summed, []
    squares = summed * summed
    is_by_row = not isinstance(formula, Adagrad | Adam)
    if is_by_row:
        squares = mean_of(squares)
    if isinstance(formula, Adagrad | RowWiseAdagrad):
        direction, new = summed, [states[0] + squares]
    else:
        beta1, beta2 = formula.betas
        direction = states[0] + (1 - beta1) * (summed - states[0])
        new = [direction, states[1] + (1 - beta2) * (squares - states[1])]
    # numpy's root is the nearest number; torch's may be the one beside it.
    divisor = torch.from_numpy(np.sqrt(new[-1].numpy())) + eps
    if is_by_row:
        return torch.full_like(divisor, rate) / divisor * direction, new
    if isinstance(formula, Adagrad):
        return rate * direction / divisor, new
    return rate * (direction / divisor), new


def mean_of(squares):
    """The mean of each row, (U, 1), by eight sums that run beside each other."""
    dim = squares.shape[1]
    sums = squares.new_zeros(len(squares), 8)
    for first in range(0, dim - dim % 8, 8):
        sums += squares[:, first : first + 8]
    for column in range(dim - dim % 8, dim):
        sums[:, 0] += squares[:, column]
    pairs = sums[:, :4] + sums[:, 4:]
    total = (pairs[:, 0] + pairs[:, 2]) + (pairs[:, 1] + pairs[:, 3])
    return (total / dim).unsqueeze(1)


def feature(bags, position):
    """The ids of a feature, the length of each of its bags, and its weights."""
    ids, offsets = bags.ids.reshape(-1).long(), bags.offsets
    if offsets is None:
        length = len(ids) // max(bags.num_bags, 1)
        bounds = torch.arange(bags.num_bags + 1) * length
    else:
        bounds = torch.cat([offsets.long(), torch.tensor([len(ids)])])[: bags.num_bags + 1]
    first, end = position * bags.num_samples, (position + 1) * bags.num_samples
    begin, until = int(bounds[first]), int(bounds[end])
    weights = None if bags.weights is None else bags.weights.detach()[begin:until]
    return ids[begin:until], bounds[first : end + 1].diff(), weights


def signed(number):
    """The int64 with the bits of an unsigned number of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def key_of(*numbers):
    """The hash of seed, step and table, as int64."""
    key = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        key = fold(key, torch.tensor(number))
    return key


def fold(key, number):
    """The hash of a key and one more number; 64 bits, as int64."""
    mixed = key + (number + 1) * signed(GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(FACTOR1)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(FACTOR2)
    return mixed ^ _shifted(mixed, 31)


def round_rows(values, keys):
    """Rows as bfloat16, (U, D), of float32.

    Args:
        values: The rows.
        keys: The hash of (seed, step, table, row) for each row, (U,) int64; None to round to
            nearest.
    """
    chance = None
    if keys is not None:
        chance = _shifted(fold(keys.unsqueeze(1), torch.arange(values.shape[1])), 32)
    bits = values.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    fixed = magnitude << 16
    if chance is None:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    chance = torch.where(magnitude > LARGEST_BFLOAT16, 1 << 31, chance)
    stored = (fixed + chance) >> 32
    stored = torch.where(magnitude > INFINITY, 0x7FC0, stored) | ((bits >> 16) & 0x8000)
    return stored.to(torch.uint16).view(torch.bfloat16)


def _shifted(number, places):
    """Logical shift to the right."""
    return (number >> places) & ((1 << (64 - places)) - 1)
