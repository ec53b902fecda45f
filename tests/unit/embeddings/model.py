"""A small module over the engine: what tests train, resident or with a budget."""

from functools import partial

import numpy as np
import torch
from torch import nn

from recsys.embeddings.lookup.inputs import read_bags
from recsys.embeddings.lookup.lookup import Nodes, look_up
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.tiers.fetch import Fetcher
from recsys.embeddings.tiers.file_store import ColdFiles
from recsys.embeddings.tiers.write_back import write_back
from recsys.embeddings.update.fused_optimizer import FusedOptimizer

# Of the warning that a mini-batch has more rows than there are slots.
TOO_MANY_ROWS = "tables .* were used in the cold tier"


class Tables:
    """Tables of one group with an optimizer.

    Args:
        sizes: Rows of each table.
        features: The table of each feature.
        dim: D.
        formula: How rows are updated.
        dtype: Of the rows.
        num_slots: Rows in fast memory; None for all rows in their tables.
        planned: Rows that do not leave their slots, counted over all tables.
        folder: Of files for tables and state; None to keep them in memory.
        is_mean: Whether bags are averaged.
        auto_apply: Whether rows are updated at the end of each backward.
        device: Where Triton kernels run; None for a group on the CPU.
    """

    def __init__(
        self,
        sizes,
        features,
        dim,
        formula,
        *,
        dtype=torch.float32,
        num_slots=None,
        folder=None,
        planned=(),
        is_mean=False,
        auto_apply=False,
        device=None,
    ):
        generator = torch.Generator().manual_seed(0)
        names = [f"t{number}" for number in range(len(sizes))]
        rows = [torch.randn(size, dim, generator=generator).to(dtype) for size in sizes]
        files = None if folder is None else ColdFiles(folder)
        if files is not None:
            rows = [files.keep(name, table) for name, table in zip(names, rows, strict=True)]
        if device is not None:
            rows = [table.to(device) for table in rows]
        self.weights = [nn.Parameter(table) for table in rows]
        self.group = group_on(device)(names, self.weights)
        self.group.files = files
        keyed = {name: (table, "") for name, table in zip(names, self.weights, strict=True)}
        self.optimizer = FusedOptimizer(keyed, [self.group], formula, rounding_seed=7)
        if num_slots is not None:
            fetcher_of(self.group)(self.group, num_slots, np.array(planned, np.int32))
        self.nodes = Nodes(self.optimizer if auto_apply else None)
        self.features, self.dim = features, dim
        self.width = dim * len(features)
        self.lookups = Lookups(
            [(table, place, place * dim) for place, table in enumerate(features)], is_mean=is_mean
        )

    @property
    def fetcher(self):
        """Moves rows."""
        return self.group.fetcher

    def bags(self, ids, offsets=None, weights=None):
        """One feature's bags after the other's."""
        num_bags = len(ids) if offsets is None else len(offsets)
        num_samples = num_bags // len(self.features)
        return read_bags(ids, offsets, weights, num_samples, num_bags, self.group.compute_dtype)

    def __call__(self, bags):
        """The pooled rows, (B, W)."""
        return look_up(self.nodes, [(self.group, self.lookups)], bags, self.width)

    def train(self, bags, factors=None):
        """One step."""
        pooled = self(bags)
        (pooled if factors is None else pooled * factors).sum().backward()
        self.optimizer.step()

    def claim_ahead(self, bags):
        """Fetch the rows of a later mini-batch in the background."""
        return self.fetcher.claim_ahead([(self.lookups, bags)])

    def values(self):
        """All rows and state, after what is in slots was written back."""
        write_back(self.group)
        found = {}
        for number, weight in enumerate(self.weights):
            found[number, "rows"] = weight.detach().clone()
            for name, value in self.optimizer.state.get(weight, {}).items():
                found[number, name] = torch.as_tensor(value).clone()
        return found


def are_equal(one, other):
    """Whether rows and state are the same to the last bit."""
    mine, its = one.values(), other.values()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


def group_on(device):
    """What makes a group there; a machine without triton needs none for the CPU."""
    if device is None:
        return TableGroup
    from recsys.embeddings.rows.device_tables import DeviceGroup

    return partial(DeviceGroup, device=device)


def fetcher_of(group):
    """The class of the group's fetcher."""
    if not group.is_on_device:
        return Fetcher
    from recsys.embeddings.tiers.device_fetch import DeviceFetcher

    return DeviceFetcher
