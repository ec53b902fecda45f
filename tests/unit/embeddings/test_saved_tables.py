"""Tables read and written in blocks, as checkpoints do it, in every tier."""

import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import ColdTierError, ConfigError, WeightsError

SIZES, DIM, BATCH_SIZE = [150, 40, 1, 90], 4, 5
TIERS = ["resident", "host", "file"]
each_tier = pytest.mark.parametrize("tier", TIERS)


def options_of(tier, folder, budget):
    if tier == "resident":
        return {}
    return {"budget": budget} | (
        {"cold_tier": "file", "cold_path": folder} if tier == "file" else {}
    )


def configs(data_type="fp32"):
    return [
        TableConfig(
            name=f"t{number}",
            num_embeddings=size,
            embedding_dim=DIM,
            feature_names=[f"f{number}"],
            data_type=data_type,
        )
        for number, size in enumerate(SIZES)
    ]


class Bags(nn.Module):
    """A model with bags, two of which share their table."""

    def __init__(self):
        super().__init__()
        self.first = nn.EmbeddingBag(SIZES[0], DIM, mode="sum", sparse=True)
        self.others = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in SIZES[1:]
        )
        self.tied = nn.EmbeddingBag(SIZES[0], DIM, mode="sum", sparse=True)
        self.tied.weight = self.first.weight

    def forward(self, ids):
        bags = [self.first, *self.others]
        return sum(bag(each) for bag, each in zip(bags, ids, strict=True)) + self.tied(ids[0] // 2)


FORMULAS = {
    "pooled, SGD": SGD(lr=0.1),
    "pooled, row-wise Adagrad": RowWiseAdagrad(lr=0.1),
    "pooled, Adam": Adam(lr=0.1),
}


class Trained:
    """A module, its optimizer, and how to train it."""

    def __init__(self, kind, tier, folder, seed=0, budget=3500, formula=None):
        torch.manual_seed(seed)
        options = options_of(tier, folder, budget)
        formula = formula or FORMULAS.get(kind, Adagrad(lr=0.1))
        self.is_flat, self.torch_optimizer = False, None
        if kind.startswith("pooled"):
            tables = configs("bf16" if kind == "pooled, 16 bits" else "fp32")
            self.model = HotColdEmbeddingBagCollection(tables, optimizer=formula, **options)
        elif kind == "unpooled":
            self.model = HotColdEmbeddingCollection(configs(), optimizer=formula, **options)
        elif kind == "bag":
            self.is_flat = True
            self.model = HotColdEmbeddingBag(
                SIZES[0], DIM, mode="sum", optimizer=formula, **options
            )
        else:
            self.is_flat, self.model = True, Bags()
            if kind != "accelerated":
                self.torch_optimizer = formula = {
                    "torch's Adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1),
                    "torch's SparseAdam": lambda tables: torch.optim.SparseAdam(tables, lr=0.1),
                }[kind](list(self.model.parameters()))
            recsys.accelerate(self.model, optimizer=formula, **options, always=True)
        self.saved = SavedTables(self.model)

    def inputs(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, size, (BATCH_SIZE, 1), generator=generator) for size in SIZES]
        if isinstance(self.model, HotColdEmbeddingBag):
            return ids[0]
        if self.is_flat:
            return ids
        offsets = torch.arange(BATCH_SIZE * len(SIZES) + 1)
        keys = [f"f{number}" for number in range(len(SIZES))]
        return JaggedIds(keys, torch.cat(ids).flatten(), offsets=offsets)

    def train(self, *seeds):
        for seed in seeds:
            found = self.model(self.inputs(seed))
            if isinstance(self.model, HotColdEmbeddingBagCollection):
                found = found.values()
            if isinstance(self.model, HotColdEmbeddingCollection):
                found = torch.cat([each.values() for each in found.values()])
            found.square().sum().backward()
            if self.torch_optimizer is not None:
                self.torch_optimizer.step()
                self.torch_optimizer.zero_grad()

    def optimizer(self):
        return self.saved.tables[0].optimizer


KINDS = [
    "pooled",
    *FORMULAS,
    "pooled, 16 bits",
    "unpooled",
    "bag",
    "accelerated",
    "torch's Adagrad",
    "torch's SparseAdam",
]


def arrays_of(table):
    return {"weight": table.weight} | {
        name: value
        for name, value in table.state().items()
        if isinstance(value, torch.Tensor) and value.dim()
    }


def read_all(saved, size=37):
    """All arrays of all tables, read in blocks."""
    saved.flush()
    return {
        (table.key, name): torch.cat(
            [
                table.read(name, begin, min(begin + size, table.num_rows))
                for begin in range(0, table.num_rows, size)
            ]
        )
        for table in saved.tables
        for name in arrays_of(table)
    }


def taken(saved):
    saved.flush()
    return saved.take_changed()


def are_equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[key].flatten(), right[key].flatten()) for key in left
    )


def with_arrays(state, replacements):
    """A state dict with other arrays, by the `id` of those in it."""
    if isinstance(state, dict):
        return {key: with_arrays(value, replacements) for key, value in state.items()}
    return replacements.get(id(state), state)


def copy_to(trained, other, size=29):
    """Restore a trained module in another one: the even blocks by ranges, the others by rows."""
    content = read_all(trained.saved)
    state = trained.optimizer().state_dict()
    live = {}
    with other.saved.restoring():
        for source, table in zip(trained.saved.tables, other.saved.tables, strict=True):
            for name, array in arrays_of(source).items():
                values = content[source.key, name]
                if name != "weight":
                    live[id(array)] = table.make_array(name, array.shape, array.dtype)
                    assert not table.read(name, 0, table.num_rows).any()
                for number, begin in enumerate(range(0, len(values), size)):
                    end = min(begin + size, len(values))
                    if number % 2:
                        table.scatter(name, np.arange(begin, end), values[begin:end])
                    else:
                        table.write(name, begin, values[begin:end])
        other.optimizer().load_state_dict(with_arrays(state, live))
    assert are_equal(content, read_all(other.saved))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tier", "other_tier"),
    [("resident", "host"), ("host", "file"), ("file", "resident"), ("host", "host")],
)
def test_a_module_restored_in_another_tier_trains_on_bit_for_bit(kind, tier, other_tier, tmp_path):
    trained = Trained(kind, tier, tmp_path / "trained")
    trained.train(*range(6))
    other = Trained(kind, other_tier, tmp_path / "other", seed=9, budget=3000)
    other.train(20, 21)  # has rows in slots and a state of its own
    copy_to(trained, other)
    for seed in range(6, 14):
        trained.train(seed)
        other.train(seed)
    assert are_equal(read_all(trained.saved), read_all(other.saved))
    steps = []
    for each in (trained, other):
        states = each.optimizer().state_dict()["state"].values()
        steps.append([float(of_table.get("step", 0)) for of_table in states])
    assert steps[0] == steps[1]


def test_tables_have_their_first_key_in_the_order_of_the_state_dict():
    model = Bags()
    recsys.accelerate(model, optimizer=Adagrad(lr=0.1))
    keys = [table.key for table in SavedTables(model).tables]
    assert keys == [key for key in model.state_dict() if not key.startswith("tied")]


def test_tables_that_torch_updates_are_left_out():
    model = Bags()
    recsys.accelerate(model)
    saved = SavedTables(model)
    assert saved.tables == []
    saved.track()
    assert saved.take_changed() == []


@each_tier
def test_a_copy_made_while_rows_change_and_the_changed_rows_are_the_table(tier, tmp_path):
    trained = Trained("pooled", tier, tmp_path / "cold")
    saved = trained.saved
    trained.train(0, 1)
    saved.track()
    copies, failures = {}, []

    def copy():
        try:
            for _ in range(20):  # the last copy counts
                for table in saved.tables:
                    for name in arrays_of(table):
                        blocks = [
                            table.read(name, begin, min(begin + 13, table.num_rows))
                            for begin in range(0, table.num_rows, 13)
                        ]
                        copies[table.key, name] = torch.cat(blocks)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    seed = 2
    while thread.is_alive():
        trained.train(seed)
        seed += 1
    thread.join()
    trained.train(seed)
    assert not failures
    saved.flush()
    for table, bits in zip(saved.tables, saved.take_changed(), strict=True):
        rows = rows_of(bits)
        for name in arrays_of(table):
            copies[table.key, name][rows] = table.gather(name, rows)
    assert are_equal(copies, read_all(saved))


def test_what_was_not_saved_is_put_back():
    trained = Trained("pooled", "host", None)
    saved = trained.saved
    saved.track()
    trained.train(0)
    first = taken(saved)
    trained.train(1)
    saved.put_back(first)
    both = taken(saved)
    trained.train(2)
    last = taken(saved)
    for before, found in zip(first, both, strict=True):
        assert set(rows_of(before)) <= set(rows_of(found))
    assert sum(len(rows_of(each)) for each in last) <= BATCH_SIZE * len(SIZES)


@each_tier
def test_restoring_drops_gradients_and_claims(tier, tmp_path):
    options = options_of(tier, tmp_path / "cold", 1500)
    model = HotColdEmbeddingBag(
        SIZES[0], DIM, mode="sum", optimizer=SGD(lr=1.0), auto_apply=False, **options
    )
    ids, saved = torch.tensor([[1, 2]]), SavedTables(model)
    model(ids).sum().backward()
    model.row_optimizer.step()
    model.prefetch(ids)
    model(ids).sum().backward()
    with saved.restoring():
        saved.tables[0].write("weight", 0, torch.ones(SIZES[0], DIM))
    model.row_optimizer.step()
    assert (model.weight == 1).all()
    with torch.no_grad():
        assert (model(ids) == 2).all()


def test_one_object_records_changes():
    first = Trained("pooled", "resident", None)
    first, second = first.saved, SavedTables(first.model)
    first.track()
    second.track()
    first.stop_tracking()
    second.take_changed()
    second.stop_tracking()
    for saved in (first, second):
        with pytest.raises(ConfigError, match="track"):
            saved.take_changed()


@each_tier
def test_what_does_not_fit_is_refused(tier, tmp_path):
    table, rows = Trained("pooled, Adam", tier, tmp_path).saved.tables[0], torch.zeros(2, DIM)
    for call in (
        lambda: table.write("weight", SIZES[0] - 1, rows),
        lambda: table.write("weight", 0, rows.double()),
        lambda: table.write("weight", 0, rows[:, :3]),
        lambda: table.scatter("weight", np.array([-1, 3]), rows),
        lambda: table.make_array("momentum1", (SIZES[0], 3), torch.float32),
        lambda: table.make_array("momentum1", (SIZES[0], DIM), torch.float64),
        lambda: table.make_array("sum", (SIZES[0], DIM), torch.float32),
    ):
        with pytest.raises(WeightsError, match="t0"):
            call()
    assert table.state() == {}


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    bag = HotColdEmbeddingBag(
        2**12, 32, optimizer=SGD(lr=0.1), budget="64KiB", cold_tier="file", cold_path=tmp_path
    )
    [table] = SavedTables(bag).tables
    os.ftruncate(bag.groups()[0].files._arrays["weight"][1], 100)

    with pytest.raises(ColdTierError, match="cut off"):
        table.read("weight", 0, 9)
