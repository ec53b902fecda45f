"""Random training: all bits are those of plain PyTorch, wherever rows are and whatever runs when.

    python tests/exact/twins.py --minutes 150 --json twins.json
    python tests/exact/twins.py --cases 3000

A case draws a model, where its rows are, a budget, a schedule and an optimizer. A `TrainPipeline`
trains the model, and between its steps other things happen: evaluation, gradients of several
passes, mini-batches that are dropped or fail, checkpoints. `Oracle` repeats each step, by
operations of torch alone, with the mini-batches that the model has seen.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # where it is run as a script

import recsys
from recsys import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.errors import IdOutOfRange, TrainingDiverged
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline
from tests.budget import floor_bytes, slot_bytes
from tests.exact.oracle import Oracle
from tests.unit.transfers import before_transfers

FORMULAS = [
    SGD(lr=1e-3),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
OF_TORCH = {
    torch.optim.SGD: SGD(lr=1e-3),
    torch.optim.Adagrad: Adagrad(lr=0.1, eps=1e-10),
    torch.optim.SparseAdam: Adam(lr=0.1, eps=1e-8),
}
KINDS = ["collection", "rows", "bags", "accelerated"]
DIMS = [4, 7, 16, 33]  # kernels are compiled for each multiple of 8
MEMORIES = ["resident", "host", "file"]
ACTIONS = ["step", "evaluate", "accumulate", "drop", "trouble", "save", "compare"]
TROUBLES = ["forward", "backward", "nan", "id"]
WIDTH = 300


class Trouble(Exception):
    """What a mini-batch may raise."""


class Breaks(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Trouble


class Batch:
    """Ids and weights by feature and sample, and what goes wrong with them."""

    def __init__(self, by_feature, trouble=None):
        self.by_feature, self.trouble = by_feature, trouble
        self.size = len(next(iter(by_feature.values())))

    def select(self, samples):
        chosen = samples.tolist()
        by_feature = {
            name: [bags[number] for number in chosen] for name, bags in self.by_feature.items()
        }
        return Batch(by_feature, self.trouble)

    def jagged(self, features, left_out=None):
        """Ids, where bags begin and end, and weights, of one feature after the other."""
        bags = [
            [pair for pair in bag if pair[0] != left_out]
            for name in features
            for bag in self.by_feature[name]
        ]
        lengths = torch.tensor([0, *map(len, bags)])
        pairs = [pair for bag in bags for pair in bag]
        ids = torch.tensor([number for number, _ in pairs], dtype=torch.int64)
        weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float32)
        return ids, lengths.cumsum(0), weights


def plain_bags(ids, offsets, weights, num_samples):
    """Bags as the oracle takes them."""
    num_bags = len(offsets) - 1
    return SimpleNamespace(
        ids=ids, offsets=offsets, weights=weights, num_samples=num_samples, num_bags=num_bags
    )


class Side:
    """A module of the model, and what the oracle computes in its place.

    Args:
        name: Of the module.
        features: Those of each of its calls.
    """

    def __init__(self, name, features):
        self.name, self.features = name, features
        self.oracle, self.id_dtype = None, torch.int64

    def look_up(self, locations, bags, is_mean=False, trained=None):
        """Of each location: its columns, which the oracle will ask for a gradient.

        Args:
            locations: Table and position of the feature.
            bags: Of all features.
            is_mean: Of each location, or of all.
            trained: The bags that get a gradient, if they are others.
        """
        found = []
        for number, (table, position) in enumerate(locations):
            mean = is_mean[number] if isinstance(is_mean, list) else is_mean
            lookups = SimpleNamespace(locations=[(table, position, 0)], is_mean=mean)
            dim = self.oracle.tables[table].shape[1]
            pooled = self.oracle.look_up(lookups, bags, dim)
            found.append(pooled)
            if self.parameters[table].requires_grad:
                pooled.requires_grad_()
                self.pending.append((lookups, trained or bags, pooled))
        return found


class OneTable(Side):
    """A bag or an embedding, which may be called for several features."""

    def __init__(self, name, module, features, has_weights=False, length=None):
        super().__init__(name, features)
        self.module, self.has_weights, self.length = module, has_weights, length
        self.is_bag = isinstance(module, nn.EmbeddingBag)

    def arguments(self, batch):
        calls = []
        for name in self.features:
            ids, offsets, weights = batch.jagged([name])
            ids, offsets = ids.to(self.id_dtype), offsets[:-1].to(self.id_dtype)
            weights = weights.to(self.module.weight.dtype) if self.has_weights else None
            if self.length is not None:
                ids, offsets = ids.view(batch.size, -1), None
                weights = None if weights is None else weights.view(batch.size, -1)
            calls.append((ids, offsets, weights) if self.is_bag else (ids,))
        return calls

    def results(self, model, batch):
        module = model.get_submodule(self.name)
        return [module(*each) for each in self.arguments(batch)]

    def plain_results(self, batch):
        padding, found = self.module.padding_idx, []
        for name in self.features:
            left_out = padding if self.is_bag else None
            ids, offsets, weights = batch.jagged([name], left_out)
            if self.is_bag:
                weights = weights.to(self.module.weight.dtype).to(self.oracle.dtype)
                bags = plain_bags(ids, offsets, weights if self.has_weights else None, batch.size)
                [pooled] = self.look_up([(self.table, 0)], bags, self.module.mode == "mean")
            else:
                bags = plain_bags(ids, torch.arange(len(ids) + 1), None, len(ids))
                is_trained = ids != padding if padding is not None else ids >= 0
                ends = torch.cat([torch.zeros(1, dtype=torch.int64), is_trained.cumsum(0)])
                trained = plain_bags(ids[is_trained], ends, None, len(ids))
                [pooled] = self.look_up([(self.table, 0)], bags, trained=trained)
                pooled = pooled.view(batch.size, -1, pooled.shape[1])
            found.append(pooled.to(self.module.weight.dtype))
        return found


class Collection(Side):
    """A collection, with bags or without."""

    def __init__(self, name, module, tables, keys, has_weights=False, length=None):
        super().__init__(name, keys)
        self.module, self.tables, self.has_weights = module, tables, has_weights
        self.is_one_hot = length == 1 and not has_weights
        self.is_pooled = isinstance(module, HotColdEmbeddingBagCollection)

    def arguments(self, batch):
        ids, offsets, weights = batch.jagged(self.features)
        ids, offsets = ids.to(self.id_dtype), offsets.to(self.id_dtype)
        if self.is_one_hot:
            return [(JaggedIds.from_one_hot(self.features, ids.view(-1, batch.size)),)]
        return [(JaggedIds(self.features, ids, offsets, weights if self.has_weights else None),)]

    def results(self, model, batch):
        found = self.module(*self.arguments(batch)[0])
        return [found.values()] if self.is_pooled else [rows.values() for rows in found.values()]

    def plain_results(self, batch):
        ids, offsets, weights = batch.jagged(self.features)
        outputs = [
            (number, self.features.index(feature), table.pooling == "mean")
            for number, table in enumerate(self.tables)
            for feature in table.feature_names
        ]
        if not self.is_pooled:
            found = []
            for table, position, _ in outputs:
                begin, end = offsets[[position * batch.size, (position + 1) * batch.size]].tolist()
                count = end - begin
                bags = plain_bags(ids[begin:end], torch.arange(count + 1), None, count)
                found += self.look_up([(table, 0)], bags)
            return found
        bags = plain_bags(ids, offsets, weights if self.has_weights else None, batch.size)
        # A table's gradients are summed in the order of the input's features.
        order = sorted(range(len(outputs)), key=lambda each: outputs[each][1])
        pooled = self.look_up(
            [outputs[each][:2] for each in order], bags, [outputs[each][2] for each in order]
        )
        return [torch.cat([pooled[order.index(each)] for each in range(len(outputs))], 1)]


def loss_of(results, scale, batch, is_mean):
    """A loss for each number of the results."""
    total = sum((each * scale[: each.shape[-1]]).square().sum() for each in results)
    if batch.trouble == "nan":
        total = total * torch.nan
    return total / batch.size if is_mean else total


class Model(nn.Module):
    """The modules of a case, and a dense parameter."""

    def __init__(self, sides, is_mean):
        super().__init__()
        self.sides, self.is_mean = sides, is_mean
        self.seen, self.last = [], None  # in training, and at all
        for side in sides:
            self.add_module(side.name, side.module)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, batch):
        self.last = batch
        if torch.is_grad_enabled():
            self.seen.append(batch)
        early = self.scale.sum() * 0
        if batch.trouble == "backward":
            early = Breaks.apply(early)  # after the lookups' backward
        results = [each for side in self.sides for each in side.results(self, batch)]
        if batch.trouble == "forward":
            raise Trouble
        loss = loss_of(results, self.scale, batch, self.is_mean)
        return loss + early if batch.trouble == "backward" else loss, torch.zeros(batch.size)


class Case:
    """A model in training, and the oracle.

    Args:
        seed: All is drawn from it.
        folder: For files.
    """

    def __init__(self, seed, folder):
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.kind, self.memory = rng.choice(KINDS), rng.choice(["host", *MEMORIES])
        self.folder = Path(folder) / str(seed)
        self.formula, self.auto_apply = rng.choice(FORMULAS), rng.random() < 0.5
        self.share = rng.choice([0, 0.05, 0.2, 0.5, 1])
        schedules = [Sequential(), LookAhead(rng.randint(1, 8)), Hotline(rng.randint(1, 3))]
        self.schedule = rng.choice(schedules)
        self.most_ids = {}  # by feature: rows, and ids of each sample or None
        self.optimizer = None
        sides = getattr(self, f"make_{self.kind}")()
        self.model = Model(sides, rng.random() < 0.5)
        self.begin()
        for side in sides:
            side.id_dtype = rng.choice([torch.int32, torch.int64])
            side.parameters[0].requires_grad_(rng.random() < 0.9)
        rows = [table for side in sides for table in side.module.parameters()]
        dense = [each for each in self.model.parameters() if all(each is not row for row in rows)]
        self.dense = torch.optim.SGD(dense, lr=1e-4)
        self.scale = nn.Parameter(self.model.scale.detach().clone())
        self.plain_dense = torch.optim.SGD([self.scale], lr=1e-4)
        self.optimizers = [self.dense] + ([self.optimizer] if self.optimizer is not None else [])
        self.pipeline = TrainPipeline(
            self.model, self.optimizers, schedule=self.schedule, ids=self.ids_of
        )
        self.iterator = self.batches()
        self.troubles = []
        self.num_steps = 0

    # -- What is drawn.

    def options(self, tables):
        """Of a module whose tables have these sizes, dims and dtypes."""
        found = {"optimizer": self.formula, "auto_apply": self.auto_apply}
        return found | self.memory_options(tables)

    def memory_options(self, tables):
        if self.memory == "resident":
            return {}
        by_kind = Counter()
        for size, dim, dtype in tables:
            by_kind[dim, dtype] += size
        slots = [
            (max(1, int(self.share * size)), slot_bytes(dim, dtype, self.formula.state_sizes(dim)))
            for (dim, dtype), size in by_kind.items()
        ]
        found = {"budget": floor_bytes(sum(size for size, *_ in tables), slots)}
        if self.memory == "file":
            found |= {"cold_tier": "file", "cold_path": self.folder / str(len(self.most_ids))}
        return found

    def new_feature(self, size, length=None):
        name = f"f{len(self.most_ids)}"
        self.most_ids[name] = size, length
        return name

    def make_tables(self, data_types):
        rng = self.rng
        tables, features, length = [], [], rng.choice([None, None, 1])
        dims = DIMS if len(data_types) > 1 else [rng.choice(DIMS)]  # without bags there is one
        for number in range(rng.randint(1, 4)):
            size, own = rng.choice([1, 4, 30, 150]), []
            for _ in range(rng.choice([1, 1, 2])):
                shared = [each for each in features if self.most_ids[each][0] <= size]
                if shared and rng.random() < 0.3:
                    own.append(rng.choice(shared))
                else:
                    features.append(self.new_feature(size, length))
                    own.append(features[-1])
            tables.append(
                TableConfig(
                    name=f"t{number}",
                    num_embeddings=size,
                    embedding_dim=rng.choice(dims),
                    feature_names=tuple(dict.fromkeys(own)),
                    data_type=rng.choice(data_types),
                    pooling=rng.choice(["sum", "mean"]),
                )
            )
        rng.shuffle(features)
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        kinds = [
            (each.num_embeddings, each.embedding_dim, dtypes[each.data_type]) for each in tables
        ]
        return tables, features, length, self.options(kinds)

    def make_collection(self):
        tables, features, length, options = self.make_tables(["fp32", "fp32", "bf16"])
        has_weights = self.rng.random() < 0.3
        module = HotColdEmbeddingBagCollection(tables, is_weighted=has_weights, **options)
        return [Collection("collection", module, tables, features, has_weights, length)]

    def make_rows(self):
        tables, features, length, options = self.make_tables(["fp32"])
        module = HotColdEmbeddingCollection(tables, **options)
        return [Collection("rows", module, tables, features, length=length)]

    def make_one(self, name, own=True):
        """A bag or an embedding; of torch's unless it is `own`."""
        rng, size = self.rng, self.rng.choice([1, 4, 30, 150])
        dim, dtype = rng.choice(DIMS), torch.float32
        padding = rng.choice([None, None, size - 1])
        if own:
            dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
        options = self.options([(size, dim, dtype)]) if own else {}
        if not own:
            options = {"sparse": True}
        options |= {"dtype": dtype, "padding_idx": padding}
        is_bag, mode = rng.random() < 0.6, rng.choice(["sum", "mean"])
        length = rng.choice([None, None, 1, 2]) if is_bag else rng.randint(1, 3)
        features = [self.new_feature(size, length) for _ in range(rng.choice([1, 1, 2]))]
        if is_bag:
            module = (HotColdEmbeddingBag if own else nn.EmbeddingBag)(
                size, dim, mode=mode, **options
            )
        else:
            module = (HotColdEmbedding if own else nn.Embedding)(size, dim, **options)
        has_weights = is_bag and mode == "sum" and rng.random() < 0.3
        return OneTable(name, module, features, has_weights, length)

    def make_bags(self):
        return [self.make_one(f"bag{number}") for number in range(self.rng.randint(1, 4))]

    def make_accelerated(self):
        count = self.rng.randint(1, 4)
        sides = [self.make_one(f"bag{number}", own=False) for number in range(count)]
        first, last = sides[0].module, sides[-1].module
        if first.weight.shape == last.weight.shape:
            last.weight = first.weight
        return sides

    def begin(self):
        """Accelerate the model, and copy its rows for the oracle."""
        sides = self.model.sides
        if self.kind == "accelerated":
            tables = list(dict.fromkeys(side.module.weight for side in sides))
            kind = self.rng.choice([None, *OF_TORCH])
            optimizer = self.formula
            if kind is not None:
                self.formula, self.auto_apply = OF_TORCH[kind], False
                optimizer = self.optimizer = kind(tables, lr=self.formula.lr)
            else:
                self.auto_apply = True
            options = self.memory_options([(*table.shape, table.dtype) for table in tables])
            result = recsys.accelerate(self.model, optimizer=optimizer, **options, always=True)
            self.row_optimizers = [result.row_optimizer] if kind is None else []
            self.oracles = [Oracle(tables, self.formula)]
            for side in sides:
                side.oracle, side.parameters = self.oracles[0], tables
                side.table = next(n for n, each in enumerate(tables) if each is side.module.weight)
            self.tables = [tables]
            return
        self.row_optimizers = [side.module.row_optimizer for side in sides]
        self.tables = [list(side.module.parameters()) for side in sides]
        self.oracles = [Oracle(tables, self.formula, seed=0) for tables in self.tables]
        for side, oracle, tables in zip(sides, self.oracles, self.tables, strict=True):
            side.oracle, side.table, side.parameters = oracle, 0, tables

    def ids_of(self, batch):
        sides = self.model.sides
        if isinstance(sides[0], Collection):
            return sides[0].arguments(batch)[0][0]
        return {side.name: side.arguments(batch) for side in sides}

    def batch(self, trouble=None):
        rng, size = self.rng, self.rng.choice([1, 2, 5, 16])
        by_feature = {}
        for name, (num_rows, length) in self.most_ids.items():
            lengths = [rng.randint(0, 3) if length is None else length for _ in range(size)]
            by_feature[name] = [
                [(int(num_rows * rng.random() ** 2), rng.random()) for _ in range(each)]
                for each in lengths
            ]
        if trouble == "id":
            name = rng.choice(list(by_feature))
            num_rows = max(len(table) for tables in self.tables for table in tables)
            by_feature[name][0] = [(num_rows, 1.0)] * max(1, len(by_feature[name][0]))
        return Batch(by_feature, trouble)

    def batches(self):
        while True:
            yield self.batch(self.troubles.pop() if self.troubles else None)

    # -- What happens.

    def act(self, action):
        """One of `ACTIONS`."""
        getattr(self, action)()

    def step(self):
        self.model.seen.clear()
        try:
            loss, _ = self.pipeline.progress(self.iterator)
        except (Trouble, IdOutOfRange, TrainingDiverged):
            assert self.model.last.trouble
            return
        parts = list(self.model.seen)
        assert not any(part.trouble for part in parts)
        self.num_steps += 1
        expected = self.plain_step(parts, sum(part.size for part in parts))
        if len(parts) == 1:
            assert torch.equal(loss, expected), "the loss of a step"

    def plain_step(self, parts, size=None):
        """A step of the oracle; returns the loss of the last part."""
        self.plain_dense.zero_grad()
        pending = []
        for part in parts:
            loss = self.plain_loss(part)
            is_weighted = size is not None and self.model.is_mean and len(parts) > 1
            (loss * (part.size / size) if is_weighted else loss).backward()
            for side in self.model.sides:
                pending += [(side, *each) for each in side.pending]
        for side, lookups, bags, pooled in pending:
            side.oracle.add(lookups, bags, pooled.grad)
        for oracle in self.oracles:
            oracle.step()
        self.plain_dense.step()
        return loss.detach()

    def plain_loss(self, batch):
        for side in self.model.sides:
            side.pending = []
        results = [each for side in self.model.sides for each in side.plain_results(batch)]
        return loss_of(results, self.scale, batch, self.model.is_mean)

    def evaluate(self):
        batch = self.batch()
        self.model.eval()
        with torch.no_grad():
            loss, _ = self.pipeline.progress(iter([batch]))
        self.model.train()
        assert torch.equal(loss, self.plain_loss(batch).detach()), "the loss of an evaluation"

    def accumulate(self):
        batches = [self.batch() for _ in range(self.rng.randint(1, 3))]
        for optimizer in (*self.optimizers, *self.row_optimizers):
            optimizer.zero_grad()
        with ExitStack() as stack:
            for optimizer in self.row_optimizers if self.auto_apply else ():
                stack.enter_context(optimizer.update_once())
            for batch in batches:
                self.model(batch)[0].backward()
                if self.rng.random() < 0.5:
                    self.prefetch()
        for optimizer in (*self.optimizers, *(() if self.auto_apply else self.row_optimizers)):
            optimizer.step()
        self.plain_step(batches)

    def prefetch(self):
        """Of a mini-batch that is never computed."""
        batch = self.batch()
        for side in self.model.sides:
            for arguments in side.arguments(batch):
                self.model.get_submodule(side.name).prefetch(*arguments)

    def drop(self):
        self.iterator = self.batches()
        for _ in range(self.rng.randint(1, 4)):
            self.prefetch()

    def trouble(self):
        self.troubles.append(self.rng.choice(TROUBLES))

    def save(self):
        for optimizer in self.row_optimizers or [self.optimizer]:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))

    def compare(self):
        """All rows and all state."""
        assert torch.equal(self.model.scale, self.scale), "the dense parameter"
        for optimizer, tables, oracle in zip(
            self.row_optimizers or [self.optimizer], self.tables, self.oracles, strict=True
        ):
            optimizer.state_dict()  # writes the newest state back
            for table, rows, states in zip(tables, oracle.tables, oracle.states, strict=True):
                assert torch.equal(table.detach().clone(), rows), "rows"
                found = arrays_of(optimizer.state.get(table, {}), states)
                assert all(map(torch.equal, found, states)), "state"


def arrays_of(known, states):
    """The arrays of a table's state, in the shapes of the oracle's; zeros if there are none yet."""
    arrays = [each for each in known.values() if isinstance(each, torch.Tensor) and each.dim()]
    arrays = arrays or list(map(torch.zeros_like, states))
    return [each.view_as(state) for each, state in zip(arrays, states, strict=True)]


def play(seed, folder, actions=None):
    """A case from its seed; returns it.

    Args:
        seed: Of all that is drawn.
        folder: For files.
        actions: What happens; None to draw it.
    """
    rng = random.Random(seed)
    if actions is None:
        actions = rng.choices(ACTIONS, [8, 2, 2, 1, 2, 1, 1], k=rng.randint(5, 40))

    def wait(*_):
        if rng.random() < 0.2:
            time.sleep(0.002)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        before_transfers(patch, wait)
        case = Case(seed, folder)
        for action in [*actions, "compare"]:
            case.act(action)
        case.pipeline.detach()
    return case


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begin, steps, failed = time.monotonic(), [], []
    most = given.cases or (10**9 if given.minutes < float("inf") else 3000)
    torch.set_num_threads(1)
    for seed in range(given.seed, given.seed + most):
        if time.monotonic() - begin > 60 * given.minutes:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                steps.append(play(seed, folder).num_steps)
            except Exception as error:  # all of them are reported, at the end
                failed.append(seed)
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    found = {
        "torch": torch.__version__,
        "seconds": time.monotonic() - begin,
        "num_cases": len(steps) + len(failed),
        "num_steps": sum(steps),
        "failed": failed,
    }
    print(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
