"""Tables read and written in blocks; `tests/train/checkpoint/machine.py` restores them."""

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
    TableConfig,
)
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import ColdTierError, ConfigError, WeightsError

SIZES, DIM, BATCH_SIZE = [150, 40, 1, 90], 4, 5
KEYS = [f"f{number}" for number in range(len(SIZES))]
each_tier = pytest.mark.parametrize("tier", ["resident", "host", "file"])


def options_of(tier, folder, budget=3500):
    more = {"cold_path": folder} if tier == "file" else {}
    return {} if tier == "resident" else {"budget": budget, "cold_tier": tier, **more}


def make_model(tier="resident", folder=None, optimizer=Adagrad(lr=0.1)):  # noqa: B008
    tables = [
        TableConfig(
            name=f"t{number}", num_embeddings=size, embedding_dim=DIM, feature_names=[KEYS[number]]
        )
        for number, size in enumerate(SIZES)
    ]
    options = options_of(tier, folder)
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **options)


def train(model, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in SIZES]
    model(JaggedIds.from_one_hot(KEYS, torch.stack(ids))).values().square().sum().backward()


def arrays_of(table):
    return {"weight": table.weight} | {
        name: value
        for name, value in table.state().items()
        if isinstance(value, torch.Tensor) and value.dim()
    }


def read_all(saved, size=37):
    """All arrays of all tables, read in blocks."""
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
    model = make_model(tier, tmp_path)
    saved = SavedTables(model)
    train(model, 0)
    saved.track()
    copies, failures = {}, []

    def copy():
        try:
            for _ in range(20):  # the last copy counts
                copies.update(read_all(saved, 13))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    seed = 2
    while thread.is_alive():
        train(model, seed)
        seed += 1
    thread.join()
    train(model, seed)
    assert not failures
    saved.flush()
    for table, bits in zip(saved.tables, saved.take_changed(), strict=True):
        rows = rows_of(bits)
        for name in arrays_of(table):
            copies[table.key, name][rows] = table.gather(name, rows)
    found = read_all(saved)
    assert copies.keys() == found.keys()
    assert all(torch.equal(copies[key], found[key]) for key in found)


@each_tier
def test_restoring_drops_gradients_and_claims(tier, tmp_path):
    model = HotColdEmbeddingBag(
        SIZES[0],
        DIM,
        mode="sum",
        optimizer=SGD(lr=1.0),
        auto_apply=False,
        **options_of(tier, tmp_path, 1500),
    )
    ids, saved = torch.tensor([[1, 2]]), SavedTables(model)
    model(ids).sum().backward()
    model.row_optimizer.step()
    model.prefetch(ids)
    model(ids).sum().backward()
    saved.begin_restoring()
    saved.tables[0].write("weight", 0, torch.ones(SIZES[0], DIM))
    model.row_optimizer.step()
    assert (model.weight == 1).all()
    with torch.no_grad():
        assert (model(ids) == 2).all()


def test_one_object_records_changes():
    model = make_model()
    first, second = SavedTables(model), SavedTables(model)
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
    saved = SavedTables(make_model(tier, tmp_path, Adam(lr=0.1)))
    table, rows = saved.tables[0], torch.zeros(2, DIM)
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
    bag = HotColdEmbeddingBag(500, 4, optimizer=SGD(lr=0.1), **options_of("file", tmp_path))
    [table] = SavedTables(bag).tables
    os.ftruncate(bag.groups()[0].files._arrays["weight"][1], 100)

    with pytest.raises(ColdTierError, match="cut off"):
        table.read("weight", 0, 9)
