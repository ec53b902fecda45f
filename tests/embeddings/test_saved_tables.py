"""Tables read and written in blocks, as checkpoints do it, in every tier."""

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.table import TableConfig
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import ColdTierError, ConfigError, ConflictingWrite, WeightsError
from tests.scratch_files import scratch_files

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
        [updater] = self.saved._updaters
        return updater.optimizer


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
    states = [each.optimizer().state_dict()["state"] for each in (trained, other)]
    assert [
        {name: float(value) for name, value in each.items() if "step" in name}
        for each in states[0].values()
    ] == [
        {name: float(value) for name, value in each.items() if "step" in name}
        for each in states[1].values()
    ]


@pytest.mark.parametrize("budget", [None, 3500])
def test_tables_on_a_device(budget, device):
    """Torch operations on the device; the CPU stands in where there is none."""
    formula = Adagrad(lr=0.1)
    modules = []
    for seed in (0, 9):
        torch.manual_seed(seed)
        module = HotColdEmbeddingBag(
            SIZES[0], DIM, mode="sum", optimizer=formula, budget=budget, device=device
        )
        modules.append((module, SavedTables(module)))
    (module, saved), (_, other) = modules
    saved.track()
    ids = torch.tensor([[3, 4], [3, 70]], device=device)
    module(ids).square().sum().backward()
    assert rows_of(taken(saved)[0]).tolist() == [3, 4, 70]
    [table], [target] = saved.tables, other.tables
    rows = np.array([3, 4, 70])
    assert table.gather("weight", rows).equal(table.read("weight", 0, SIZES[0])[rows])
    with other.restoring():
        for name, array in arrays_of(table).items():
            if name != "weight":
                target.make_array(name, array.shape, array.dtype)
            target.write(name, 0, table.read(name, 0, SIZES[0]))
            target.scatter(name, rows, table.gather(name, rows))
    assert are_equal(read_all(saved), read_all(other))
    for each, _ in modules:
        each(ids).square().sum().backward()
    assert are_equal(read_all(saved), read_all(other))


@each_tier
@pytest.mark.parametrize("formula", [Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1)], ids=str)
def test_gathered_rows_are_those_of_the_table(tier, formula, tmp_path):
    trained = Trained("pooled", tier, tmp_path / "cold", formula=formula)
    trained.train(*range(5))
    content = read_all(trained.saved)
    rng = np.random.default_rng(0)
    for table in trained.saved.tables:
        for name in arrays_of(table):
            for count in (0, 1, table.num_rows // 2, table.num_rows):
                rows = np.sort(rng.choice(table.num_rows, count, replace=False))
                expected = content[table.key, name][rows]
                assert torch.equal(table.gather(name, rows), expected)


@each_tier
def test_read_rows_are_copies(tier, tmp_path):
    trained = Trained("pooled", tier, tmp_path / "cold")
    trained.train(0)
    [table, *_] = trained.saved.tables
    trained.saved.flush()
    before = table.read("weight", 0, 5)
    for copied in (table.read("weight", 0, 5), table.gather("weight", np.arange(5))):
        copied.zero_()
    assert torch.equal(table.read("weight", 0, 5), before)


@each_tier
def test_a_module_restored_in_inference_mode_trains_on(tier, tmp_path):
    trained, other = Trained("bag", "resident", tmp_path), Trained("bag", tier, tmp_path, seed=1)
    trained.train(0, 1)

    with torch.inference_mode():
        copy_to(trained, other)
    for each in (trained, other):
        each.train(2, 3)

    assert are_equal(read_all(other.saved), read_all(trained.saved))


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


@pytest.mark.parametrize("tier", ["host", "file"])
def test_a_flush_leaves_every_row_in_its_slot(tier, tmp_path):
    found = []
    for is_saved in (False, True):
        trained = Trained("pooled", tier, tmp_path / str(is_saved))
        trained.train(*range(4))
        [tiers] = trained.model.tiers()
        if is_saved:
            trained.saved.track()
        counts = []
        for seed in range(4, 30):
            ahead = trained.model.prefetch(trained.inputs(seed))
            if is_saved and seed % 3 == 0:
                before = tiers.residency.counts
                trained.saved.flush()
                for table, bits in zip(
                    trained.saved.tables, trained.saved.take_changed(), strict=True
                ):
                    table.gather("weight", rows_of(bits))
                assert tiers.residency.counts[:-1] == before[:-1]  # all but rows written back
            assert ahead.is_held
            trained.train(seed)
            counts.append(tiers.residency.counts[:-1])
        assert counts[-1] != counts[-2]
        found.append((counts, read_all(trained.saved)))
    (counts, rows), (counts_saved, rows_saved) = found
    assert counts == counts_saved
    assert are_equal(rows, rows_saved)


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


def drop_from_map(tensor):
    """Unmap the pages of a file that have been read through its memory map."""
    memory, num_bytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert not ctypes.CDLL(None).madvise(memory, num_bytes, mmap.MADV_DONTNEED)


def resident_kilobytes(path):
    """The memory of this process that maps files in a folder, in KiB."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [number for number, line in enumerate(lines) if str(path) in line]
    sizes = [next(line for line in lines[begin:] if line.startswith("Rss:")) for begin in begins]
    return sum(int(line.split()[1]) for line in sizes)


def test_files_are_read_and_written_without_their_memory_map(tmp_path):
    num_rows = 4000
    module = HotColdEmbeddingBag(
        num_rows,
        64,
        mode="sum",
        optimizer=Adagrad(lr=0.1),
        budget="100KiB",
        cold_tier="file",
        cold_path=tmp_path,
    )
    module(torch.arange(30).unsqueeze(1)).square().sum().backward()
    [tiers] = module.tiers()
    drop_from_map(module.weight)  # its rows were drawn through it
    assert resident_kilobytes(tmp_path) == 0
    saved = SavedTables(module)
    [table] = saved.tables
    saved.flush()
    with saved.restoring():
        for name in ("weight", "momentum1"):
            rows = table.read(name, 0, num_rows)
            table.write(name, 0, rows)
            table.scatter(name, np.arange(0, num_rows, 3), rows[::3])
            table.gather(name, np.arange(0, num_rows, 2))
        table.make_array("momentum1", (num_rows, 64), torch.float32)
    assert resident_kilobytes(tmp_path) == 0
    assert tiers.files.find(table.weight.detach()[:1]).tensor.sum()  # this reads through it
    assert resident_kilobytes(tmp_path) * 1024 >= mmap.PAGESIZE


def test_an_optimizer_that_loads_its_own_arrays_does_not_write_to_them():
    trained = Trained("pooled", "resident", None)
    trained.train(0)
    arrays = [array for table in trained.saved.tables for array in table.state().values()]
    versions = [array._version for array in arrays]
    trained.optimizer().load_state_dict(trained.optimizer().state_dict())
    assert [array._version for array in arrays] == versions


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


def test_the_record_ends(tmp_path):
    trained = Trained("pooled", "host", tmp_path)
    saved = trained.saved
    saved.track()
    assert saved.tracked_bytes == 8 * sum(-(-size // 64) for size in SIZES)
    saved.stop_tracking()
    trained.train(0)
    assert saved.tracked_bytes == 0
    with pytest.raises(ConfigError, match="not recorded; call track"):
        saved.take_changed()


def test_two_records_of_the_same_tables():
    trained = Trained("pooled", "resident", None)
    other = SavedTables(trained.model)
    trained.saved.track()
    other.track()
    with pytest.raises(ConfigError, match="another object records their changes"):
        trained.saved.take_changed()
    trained.saved.stop_tracking()
    trained.train(0)
    assert any(bits.any() for bits in other.take_changed())


def test_a_table_with_another_number_of_rows_is_refused():
    module = HotColdEmbeddingBag(8, 2, mode="sum", optimizer=SGD(lr=0.1))
    saved = SavedTables(module)
    saved.track()
    module.weight.data = torch.zeros(9, 2)
    with pytest.raises(ConfigError, match="has 9 rows, and had 8"):
        saved.take_changed()


def test_rows_in_use_cannot_be_overwritten(tmp_path):
    trained = Trained("bag", "host", tmp_path)
    pooled = trained.model(torch.tensor([[1, 2]]))
    with pytest.raises(ConflictingWrite, match="2 of them are in use"), trained.saved.restoring():
        pass
    del pooled
    with trained.saved.restoring():
        pass


@each_tier
def test_restoring_drops_gradients_and_tickets(tier, tmp_path):
    trained = Trained("bag", tier, tmp_path / "cold")
    trained.train(0)
    trained.model.prefetch(torch.tensor([[1, 2]]))
    trained.model.row_optimizer.updater.auto_apply = False
    trained.model(torch.tensor([[1, 2]])).sum().backward()
    with trained.saved.restoring():
        trained.saved.tables[0].write("weight", 0, torch.ones(SIZES[0], DIM))
    trained.model.row_optimizer.step()
    assert (trained.model.weight == 1).all()
    with torch.no_grad():
        assert (trained.model(torch.tensor([[1, 2]])) == 2).all()


@each_tier
def test_a_restore_that_fails_leaves_a_usable_table(tier, tmp_path):
    trained = Trained("bag", tier, tmp_path / "cold")
    trained.train(0)

    def fail():
        with trained.saved.restoring():
            trained.saved.tables[0].write("weight", 0, torch.full((70, DIM), 3.0))
            raise OSError("a block cannot be read")

    with pytest.raises(OSError, match="a block"):
        fail()
    with torch.no_grad():
        assert (trained.model(torch.arange(70).unsqueeze(1)) == 3).all()
    trained.train(1)


@each_tier
def test_updated_rows_in_slots_are_dropped_by_a_restore(tier, tmp_path):
    trained = Trained("bag", tier, tmp_path / "cold")
    trained.saved.track()
    trained.train(0, 1)
    with trained.saved.restoring():
        trained.saved.tables[0].write("weight", 0, torch.full((SIZES[0], DIM), 3.0))
    with torch.no_grad():
        assert (trained.model(torch.arange(SIZES[0]).unsqueeze(1)) == 3).all()
    assert len(rows_of(taken(trained.saved)[0])) == SIZES[0]


@each_tier
def test_rows_that_do_not_fit_are_refused(tier, tmp_path):
    trained = Trained("bag", tier, tmp_path / "cold")
    trained.train(0)
    [table] = trained.saved.tables
    before = read_all(trained.saved)
    rows = torch.zeros(3, DIM)
    refused = [
        (
            lambda: table.write("weight", SIZES[0] - 2, rows),
            "has rows 0 to 149, got rows 148 to 150",
        ),
        (lambda: table.write("weight", -1, rows), "got rows -1 to 1"),
        (lambda: table.scatter("weight", np.array([0, 1, 150]), rows), "got rows 0 to 150"),
        (lambda: table.scatter("weight", np.array([-1, 1, 2]), rows), "got rows -1 to 2"),
        (lambda: table.write("weight", 0, rows.double()), "in torch.float64"),
        (lambda: table.write("weight", 0, torch.zeros(3, DIM + 1)), r"got \(5,\)"),
        (lambda: table.scatter("weight", np.array([1, 2]), rows), "2 row numbers, got 3 rows"),
        (lambda: table.make_array("sum", (150, DIM), torch.float32), "got 'sum'"),
        (lambda: table.make_array("momentum1", (151, DIM), torch.float32), "shape"),
        (lambda: table.make_array("momentum1", (150,), torch.float32), "shape"),
        (lambda: table.make_array("momentum1", (150, DIM), torch.float16), "float16"),
    ]
    with trained.saved.restoring():
        for call, message in refused:
            with pytest.raises(WeightsError, match=message):
                call()
    assert are_equal(read_all(trained.saved), before)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    trained = Trained("bag", "file", tmp_path / "cold")
    trained.train(0)
    trained.saved.flush()
    [table] = trained.saved.tables
    for descriptor in scratch_files(tmp_path / "cold"):
        os.ftruncate(descriptor, 100)
    with pytest.raises(ColdTierError, match=r"'momentum1' of table.*it was cut off"):
        table.read("momentum1", 0, SIZES[0])
    with pytest.raises(ColdTierError, match=r"'momentum1' of table.*it was cut off"):
        table.gather("momentum1", np.array([1, 140]))
