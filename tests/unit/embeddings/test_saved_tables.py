"""What checkpoints save of tables, and restore into others."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recsys._support.memory import _madvise as advise
from recsys.batch import JaggedIds
from recsys.embeddings.attach import Attachment
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adam, PartialRowWiseAdam
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.table import TableConfig
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import ColdTierError, ConfigError, WeightsError
from tests.unit.embeddings.model import TOO_MANY_ROWS

pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")
SIZES, DIMS = [300, 70, 200], [4, 8, 4]
BUDGET = {"budget": 570 * 4 + 40 * (96 + 11)}
TIERS = {"resident": {}, "host": BUDGET, "files": BUDGET | {"cold_tier": "file"}}


def collection(tiers, tmp_path, formula=Adam(lr=0.1)):  # noqa: B008
    torch.manual_seed(0)
    tables = [
        TableConfig(name=f"t{number}", num_embeddings=size, embedding_dim=dim)
        for number, (size, dim) in enumerate(zip(SIZES, DIMS, strict=True))
    ]
    if "cold_tier" in tiers:
        tiers = tiers | {"cold_path": tmp_path}
    return HotColdEmbeddingBagCollection(tables, optimizer=formula, **tiers)


def train(model, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, size, (12,), generator=generator) for size in SIZES])
    features = JaggedIds(["t0", "t1", "t2"], ids, torch.arange(0, 37, 4))
    (model(features).values() ** 2).sum().backward()


def are_same(one, other):
    for saved in (one, other):
        saved.flush()
    for mine, its in zip(one.tables, other.tables, strict=True):
        assert mine.state()["step"] == its.state()["step"]
        found = arrays(mine), arrays(its)
        assert found[0].keys() == found[1].keys()
        if not all(torch.equal(array, found[1][name]) for name, array in found[0].items()):
            return False
    return True


def arrays(table):
    return {"weight": table.weight} | {
        name: value for name, value in table.state().items() if name != "step"
    }


def copy_all(saved, others):
    with others.restoring():
        for table, other in zip(saved.tables, others.tables, strict=True):
            for name, array in arrays(table).items():
                if name != "weight":
                    other.make_array(name, array.shape, array.dtype)
                for begin in range(0, table.num_rows, 64):
                    end = min(begin + 64, table.num_rows)
                    other.write(name, begin, table.read(name, begin, end))
            other.state()["step"] = table.state()["step"]


def copy_changed(saved, others):
    saved.flush()
    found = list(map(rows_of, saved.take_changed()))
    with others.restoring():
        for table, other, rows in zip(saved.tables, others.tables, found, strict=True):
            for name in arrays(table):
                other.scatter(name, rows, table.gather(name, rows))
            other.state()["step"] = table.state()["step"]
    return list(map(len, found))


@pytest.mark.parametrize("formula", [Adam(lr=0.1), PartialRowWiseAdam(lr=0.1)], ids=repr)
@pytest.mark.parametrize("others", TIERS)
@pytest.mark.parametrize("tiers", TIERS)
def test_a_copy_by_blocks_and_then_by_changed_rows_is_whole(tiers, others, formula, tmp_path):
    models = [collection(TIERS[each], tmp_path, formula) for each in (tiers, others)]
    mine, its = map(SavedTables, models)
    assert [table.key for table in mine.tables] == [
        f"embedding_bags.t{number}.weight" for number in range(3)
    ]
    its.track()
    for seed in (7, 8):  # rows are in slots with their state from the second step on
        train(models[0], seed)
        train(models[1], seed + 2)  # so the copy has rows and state of its own
    mine.track()
    copy_all(mine, its)
    assert are_same(mine, its)
    assert [len(rows_of(bits)) for bits in its.take_changed()] == SIZES
    for step in range(2, 5):
        train(models[0], step)
    assert 0 < max(copy_changed(mine, its)) <= 3 * 12
    assert are_same(mine, its)
    for model in models:
        train(model, 5)
    assert are_same(mine, its)


def test_a_table_in_another_place_is_taken(tmp_path):
    model = collection({}, tmp_path)
    saved, weight = SavedTables(model), model.embedding_bags["t1"].weight
    saved.track()
    weight.data = weight.data.clone()
    assert [len(rows_of(bits)) for bits in saved.take_changed()] == [0, 70, 0]
    weight.data = torch.zeros(9, 8)
    with pytest.raises(RuntimeError, match="number of rows"):
        saved.take_changed()


@pytest.mark.parametrize("tiers", TIERS)
def test_writes_of_callers_and_new_state_are_taken(tiers, tmp_path):
    models = [collection(TIERS[tiers], tmp_path) for _ in range(2)]
    mine, its = map(SavedTables, models)
    mine.track()
    train(models[0], 2)
    mine.flush()
    bits = mine.take_changed()
    assert max(len(rows_of(of_table)) for of_table in bits) <= 12
    mine.put_back(bits)
    with torch.no_grad():
        models[0].embedding_bags["t1"].weight[5] += 1
    with its.restoring():
        for table, other in zip(mine.tables, its.tables, strict=True):
            for name in ("momentum1", "exp_avg_sq"):
                other.make_array(name, table.weight.shape, torch.float32)
    mine.tables[2].state()["momentum1"] = torch.ones(200, 4)  # as optimizers load it
    assert copy_changed(mine, its)[1:] == [70, 200]
    assert are_same(mine, its)
    mine.mark_all()
    assert copy_changed(mine, its) == SIZES
    assert mine.tracked_bytes == 8 * sum(-(-size // 64) for size in SIZES)


def test_one_object_records_changes(tmp_path):
    model = collection({}, tmp_path)
    first, second = SavedTables(model), SavedTables(model)
    first.track()
    second.track()
    first.stop_tracking()
    second.take_changed()
    second.stop_tracking()
    for saved in (first, second):
        with pytest.raises(ConfigError, match="track"):
            saved.take_changed()


def test_the_whole_model_is_saved():
    bags = [HotColdEmbeddingBag(7, 4) for _ in range(2)]
    tables = [bag.tables()[0]._replace(key=name) for bag, name in zip(bags, "ab", strict=True)]
    Attachment(bags, tables, Adam(lr=0.1))
    assert len(SavedTables(nn.ModuleList(bags)).tables) == 2
    with pytest.raises(ConfigError, match="whole model"):
        SavedTables(bags[0])


@pytest.mark.parametrize("tiers", TIERS)
def test_what_does_not_fit_is_refused(tiers, tmp_path):
    table = SavedTables(collection(TIERS[tiers], tmp_path)).tables[0]
    rows = torch.zeros(2, 4)
    for call in (
        lambda: table.write("weight", 299, rows),
        lambda: table.write("weight", 0, rows.double()),
        lambda: table.write("weight", 0, rows[:, :3]),
        lambda: table.scatter("weight", np.array([-1, 3]), rows),
        lambda: table.make_array("momentum1", (300, 3), torch.float32),
        lambda: table.make_array("momentum1", (300, 4), torch.float64),
        lambda: table.make_array("sum", (300, 4), torch.float32),
    ):
        with pytest.raises(WeightsError, match="t0"):
            call()
    assert table.state() == {}


def mapped_bytes():
    found = re.findall(r"Rss(?:File|Shmem):\s*(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, found)) * 1024


def test_reading_a_file_takes_no_memory(tmp_path):
    bag = HotColdEmbeddingBag(
        2**19, 32, optimizer=SGD(lr=0.1), budget="4MiB", cold_tier="file", cold_path=tmp_path
    )
    [table], weight = SavedTables(bag).tables, bag.weight.detach()
    sums = [float(part.sum()) for part in weight.split(2**16)]
    advise(weight.data_ptr(), weight.nbytes, mmap.MADV_DONTNEED)
    before = mapped_bytes()
    for part, begin in enumerate(range(0, 2**19, 2**16)):
        assert float(table.read("weight", begin, begin + 2**16).sum()) == sums[part]
    assert mapped_bytes() - before < 2**20
    weight.sum()
    assert mapped_bytes() - before > weight.nbytes / 2
    os.ftruncate(bag.groups()[0].files._arrays["weight"][1], 100)
    with pytest.raises(ColdTierError, match="cut off"):
        table.read("weight", 0, 9)
