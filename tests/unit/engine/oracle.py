"""What plain PyTorch computes, one lookup after the other: the engine must give the same bits."""

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.rounding import table_key
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from recsys.engine.rows.tables import compute_dtype
from tests.torch_kernels import fold, round_rows


class Oracle:
    """Tables, their state, and the lookups that wait for the update.

    Args:
        tables: Copied.
        formula: How rows are updated.
        seed: Of stochastic rounding; None to round to nearest.
    """

    def __init__(self, tables, formula, seed=None):
        self.tables = [table.detach().clone() for table in tables]
        self.dtype = compute_dtype(tables[0].dtype)
        self.formula, self.seed = formula, seed
        sizes = formula.state_sizes(tables[0].shape[1])
        self.states = [
            [torch.zeros(len(table), size, dtype=self.dtype) for size in sizes.values()]
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
                key = None if self.seed is None else table_key(self.seed, step, table)
                self._update(table, torch.cat(rows), torch.cat(gradients), step, key)
        self.pending = []

    def _update(self, table, rows, gradients, step, key):
        weight, states = self.tables[table], self.states[table]
        distinct, inverse = torch.unique(rows, return_inverse=True)
        summed = gradients.new_zeros(len(distinct), weight.shape[1])
        summed.index_add_(0, inverse, gradients)
        rate, eps = self.formula.rate_and_eps(self.formula.lr, step)
        change, new = change_of(
            self.formula, [state[distinct] for state in states], summed, rate, eps
        )
        for state, values in zip(states, new, strict=True):
            state[distinct] = values
        updated = weight[distinct].to(self.dtype) - change
        if weight.dtype == torch.bfloat16:
            signed = None if key is None else key - 2**64 * (key >= 2**63)
            updated = round_rows(updated, None if key is None else fold(signed, distinct))
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
