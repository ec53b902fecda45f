"""One process that computes the halves of every rank: what two ranks must compute, to the last bit.

`OneProcess` is for parts of pooled vectors: a row-wise table is several tables, one for each rank's
rows, whose pooled vectors are added in the order of the ranks. `OneProcessOfRows` is for distinct
rows. Everything is resident.
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
        self.kind, self.world, self.pooling = kind, world, pooling
        self.pieces = self.all_pieces()
        configs = [
            TableConfig(
                name=piece,
                num_embeddings=num_rows,
                embedding_dim=DIM[name],
                feature_names=self.features_of(name, piece),
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
        self.is_weighted = is_weighted
        self.formula = FORMULAS[optimizer]

    def all_pieces(self):
        """The tables that stand for each table, by name."""
        return {
            name: pieces_of(name, number, self.kind, self.world) for number, name in enumerate(ROWS)
        }

    def features_of(self, name, piece):
        """The features of a piece of a table."""
        return tuple(f"{feature}/{piece}" for feature in FEATURES[name])

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

    def pooled(self, lengths, values, weights, bounds):
        """The pooled vectors of all samples, by name of output; `bounds` are those of ranks."""
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
            pooled = self.pooled(lengths, values, weights, bounds)
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


class OneProcessOfRows(OneProcess):
    """Each rank's samples look up the distinct rows of a row-wise table, and pool them."""

    def all_pieces(self):
        """The tables themselves."""
        return {name: [(name, 0, num_rows)] for name, num_rows in ROWS.items()}

    def features_of(self, name, piece):
        """For a row-wise table, one feature for each rank: the distinct ids of its samples."""
        if is_row_wise(self.kind, list(ROWS).index(name)):
            return tuple(f"{piece}/{rank}" for rank in range(self.world))
        return super().features_of(name, piece)

    def pooled(self, lengths, values, weights, bounds):
        """As in `OneProcess`; sums of rows and of their gradients are in lookup order."""
        ids, of_ids, lengths_of, numbers = {}, {}, {}, {}
        for number, (name, features) in enumerate(FEATURES.items()):
            if not is_row_wise(self.kind, number):
                for feature in features:
                    position = KEYS.index(feature)
                    key = f"{feature}/{name}"
                    ids[key], lengths_of[key] = values[position], lengths[position]
                    of_ids[key] = None if weights is None else weights[position]
                continue
            for rank in range(self.world):
                looked_up = torch.cat(
                    [self.cut(values, lengths, KEYS.index(each), bounds, rank) for each in features]
                )
                key = f"{name}/{rank}"
                ids[key], numbers[key] = looked_up.unique(return_inverse=True)
                lengths_of[key] = torch.ones_like(ids[key])
                of_ids[key] = torch.ones(len(ids[key]))
        most = max(map(len, lengths_of.values()))  # a feature has as many bags as any other
        bags = [
            torch.nn.functional.pad(each, (0, most - len(each))) for each in lengths_of.values()
        ]
        ends = torch.nn.functional.pad(torch.cat(bags).cumsum(0), (1, 0))
        all_weights = None if weights is None else torch.cat(list(of_ids.values()))
        looked_up = JaggedIds(list(ids), torch.cat(list(ids.values())), ends, all_weights)
        vectors = self.tables(looked_up).to_dict()
        found = {}
        for number, (name, features) in enumerate(FEATURES.items()):
            outputs = [output for output, table in OUTPUTS.items() if table == name]
            outputs.sort(key=lambda output: features.index(output.partition("@")[0]))
            if not is_row_wise(self.kind, number):
                for output, feature in zip(outputs, features, strict=True):
                    found[output] = vectors[f"{feature}/{name}"][: bounds[-1]]
                continue
            of_ranks = []
            for rank in range(self.world):
                key = f"{name}/{rank}"
                rows = vectors[key][: len(ids[key])].index_select(0, numbers[key])
                of_ranks.append(self.pool(rows, features, lengths, weights, bounds, rank))
            for output, parts in zip(outputs, zip(*of_ranks, strict=True), strict=True):
                found[output] = torch.cat(parts)
        return found

    def pool(self, rows, features, lengths, weights, bounds, rank):
        """The vectors of one rank's samples, for each feature of a table."""
        begin, end, found, first = bounds[rank], bounds[rank + 1], [], 0
        for feature in features:
            position = KEYS.index(feature)
            counts = lengths[position][begin:end]
            its_rows = rows[first : first + int(counts.sum())]
            first += len(its_rows)
            if weights is not None:
                its_weights = self.cut(weights, lengths, position, bounds, rank)
                its_rows = its_rows * its_weights.unsqueeze(1)
            bags = torch.arange(end - begin).repeat_interleave(counts)
            found.append(torch.zeros(end - begin, rows.shape[1]).index_add(0, bags, its_rows))
        return found

    @staticmethod
    def cut(values, lengths, position, bounds, rank):
        """The ids or weights of one feature of one rank's samples."""
        ends = torch.nn.functional.pad(lengths[position].cumsum(0), (1, 0))
        return values[position][ends[bounds[rank]] : ends[bounds[rank + 1]]]


def one_process(kind, optimizer, world=2, *, exchange="pooled", **options):
    """One process that computes what ranks compute by an exchange."""
    made = OneProcessOfRows if exchange == "rows" else OneProcess
    return made(kind, optimizer, world, **options)
