"""One process that computes the halves of every rank: what two ranks must compute, to the last bit.

A row-wise table is several tables here, one for each rank's rows, whose pooled vectors are added in
the order of the ranks. Everything is resident.
"""

import itertools

import torch
from ranks_shared import (
    DIM,
    EPS,
    FEATURES,
    KEYS,
    LR,
    NUM_STEPS,
    OUTPUTS,
    ROWS,
    OverArch,
    first_rows,
    global_batch,
    is_row_wise,
    loss_of,
)

from recsys import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBagCollection,
    RowWiseAdagrad,
    TableConfig,
)

FORMULAS = {
    "sgd": SGD(lr=LR),
    "adagrad": Adagrad(lr=LR, eps=EPS),
    "rowwise_adagrad": RowWiseAdagrad(lr=LR, eps=EPS),
}


def pieces_of(name, number, kind, world):
    """The tables that stand for a table: (name, first row, number of rows)."""
    if not is_row_wise(kind, number):
        return [(name, 0, ROWS[name])]
    block = -(-ROWS[name] // world)
    found = [(f"{name}_{rank}", rank * block) for rank in range(world)]
    return [
        (piece, first, min(block, ROWS[name] - first))
        for piece, first in found
        if first < ROWS[name]
    ]


class OneProcess:
    def __init__(self, kind, optimizer, world=2, *, is_weighted=False, pooling="sum"):
        self.pieces = {
            name: pieces_of(name, number, kind, world) for number, name in enumerate(ROWS)
        }
        configs = [
            TableConfig(
                name=piece,
                num_embeddings=num_rows,
                embedding_dim=DIM[name],
                feature_names=tuple(f"{feature}/{piece}" for feature in FEATURES[name]),
                pooling=pooling,
            )
            for name, pieces in self.pieces.items()
            for piece, _, num_rows in pieces
        ]
        self.tables = HotColdEmbeddingBagCollection(
            configs, is_weighted, optimizer=FORMULAS[optimizer]
        )
        with torch.no_grad():
            for name, pieces in self.pieces.items():
                for piece, first, num_rows in pieces:
                    rows = first_rows(name)[first : first + num_rows]
                    self.tables.embedding_bags[piece].weight.copy_(rows)
        self.over = OverArch()
        self.world, self.is_weighted = world, is_weighted
        self.formula = FORMULAS[optimizer]

    def features(self, lengths, values, weights):
        """The ids of each piece: those of its rows, counted from its first row."""
        keys, found, ends, of_ids, end = [], [], [torch.zeros(1, dtype=torch.long)], [], 0
        for name, pieces in self.pieces.items():
            for piece, first, num_rows in pieces:
                for feature in FEATURES[name]:
                    ids, of_key = values[KEYS.index(feature)], lengths[KEYS.index(feature)]
                    is_here = (ids >= first) & (ids < first + num_rows)
                    bags = torch.arange(len(of_key)).repeat_interleave(of_key)[is_here]
                    counts = torch.bincount(bags, minlength=len(of_key))
                    keys.append(f"{feature}/{piece}")
                    found.append(ids[is_here] - first)
                    ends.append(end + counts.cumsum(0))
                    end += int(counts.sum())
                    if weights is not None:
                        of_ids.append(weights[KEYS.index(feature)][is_here])
        return JaggedIds(
            keys, torch.cat(found), torch.cat(ends), torch.cat(of_ids) if of_ids else None
        )

    def pooled(self, lengths, values, weights):
        """The pooled vectors of all samples, by name of output."""
        vectors = self.tables(self.features(lengths, values, weights)).to_dict()
        found = {}
        for output, name in OUTPUTS.items():
            feature = output.partition("@")[0]
            parts = [vectors[f"{feature}/{piece}"] for piece, _, _ in self.pieces[name]]
            found[output] = sum(parts[1:], parts[0])
        return found

    def train(self, bounds, num_steps=NUM_STEPS):
        """Losses of every step and rank; `bounds` are the ranks' first samples, and the end."""
        dense_optimizer = torch.optim.SGD(self.over.parameters(), lr=LR)
        losses = []
        for step in range(num_steps):
            lengths, values, dense, labels, weights = global_batch(
                step, bounds[-1], self.is_weighted
            )
            dense_optimizer.zero_grad()
            pooled = self.pooled(lengths, values, weights)
            of_ranks = []
            for begin, end in itertools.pairwise(bounds):
                its = {name: vectors[begin:end] for name, vectors in pooled.items()}
                of_ranks.append(loss_of(self.over(dense[begin:end], its), labels[begin:end]))
            sum(loss / self.world for loss in of_ranks).backward()
            dense_optimizer.step()
            losses.append([float(loss.detach()) for loss in of_ranks])
        return losses

    def rows(self):
        """The rows of whole tables."""
        return {
            name: torch.cat(
                [self.tables.embedding_bags[piece].weight.detach() for piece, _, _ in pieces]
            )
            for name, pieces in self.pieces.items()
        }

    def state(self):
        """The optimizer's state of whole tables; zeros for a table that was never updated."""
        known = self.tables.row_optimizer.state_dict()["state"]
        found = {}
        for name, pieces in self.pieces.items():
            for key, size in self.formula.state_sizes(DIM[name]).items():
                columns = () if key in self.formula.row_states else (size,)
                found[f"{name}.{key}"] = torch.cat(
                    [
                        known[f"embedding_bags.{piece}.weight"].get(
                            f"{piece}.{key}", torch.zeros(num_rows, *columns)
                        )
                        for piece, _, num_rows in pieces
                    ]
                )
        return found
