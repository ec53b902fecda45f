"""Rows in files: the same numbers as in memory, and errors that lose no row."""

import copy
import gc
import os
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import recsys
from recsys._support.sizes import format_bytes
from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers.cold import cold_files
from recsys.embeddings.tiers.transfers import TransferQueue
from recsys.embeddings.update import fused_optimizer
from recsys.errors import BudgetTooSmall, ColdTierError, TiersFailed
from recsys.train.parts.build import describe_tiers
from tests.embeddings.tiers.twins import require_equal
from tests.scratch_files import scratch_bytes, scratch_files

TABLES = [
    TableConfig(name="users/all", num_embeddings=300, embedding_dim=4, feature_names=("users",)),
    TableConfig(name="goods", num_embeddings=260, embedding_dim=4),
    TableConfig(name="pages", num_embeddings=270, embedding_dim=8, feature_names=("goods",)),
]
BUDGET = 12_000
NUM_ROWS, DIM = 400, 8


def build(optimizer, tables=TABLES, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **options)


def in_files(optimizer, path, budget=BUDGET, tables=TABLES, **options):
    return build(
        optimizer, tables, budget=budget, cold_tier="file", cold_path=path / "rows", **options
    )


def bag_in_files(path, **options):
    return HotColdEmbeddingBag(
        NUM_ROWS, DIM, budget=8000, cold_tier="file", cold_path=path / "rows", **options
    )


def train(modules, num_steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        values = torch.randint(0, 260, (2, 12), generator=generator)
        ids = JaggedIds.from_one_hot(["users", "goods"], values)
        losses = [module(ids).values().square().sum() for module in modules]
        assert len({loss.item() for loss in losses}) == 1
        for loss in losses:
            loss.backward()


def test_a_run_is_that_in_memory(optimizer, tmp_path):
    resident, tiered = build(optimizer), in_files(optimizer, tmp_path)

    train([resident, tiered], 24)

    require_equal(resident, tiered)
    tiers = describe_tiers(tiered)
    assert tiers["cold_tier"] == "file"
    assert tiers["hot_bytes"] <= BUDGET
    assert tiers["fetched_bytes"] > 0 < tiers["written_back_bytes"]


@pytest.mark.parametrize("data_type", ["BF16"])
def test_rows_of_16_bits_are_in_files_as_they_are(data_type, tmp_path):
    tables = [
        TableConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=table.feature_names,
            data_type=data_type,
        )
        for table in TABLES
    ]
    resident = build(Adagrad(lr=0.1), tables)
    tiered = in_files(Adagrad(lr=0.1), tmp_path, tables=tables)

    train([resident, tiered], 10)

    require_equal(resident, tiered)
    row_bytes = sum(table.num_embeddings * table.embedding_dim * 2 for table in TABLES)
    state_bytes = sum(table.num_embeddings * table.embedding_dim * 4 for table in TABLES)
    assert scratch_bytes(tmp_path / "rows") == row_bytes + state_bytes


def test_a_budget_for_everything_keeps_rows_in_memory_and_files_the_same(tmp_path):
    resident, tiered = build(SGD(lr=0.5)), in_files(SGD(lr=0.5), tmp_path, budget="1GiB")

    train([resident, tiered], 5)

    require_equal(resident, tiered)
    tiers = describe_tiers(tiered)
    assert tiers["num_slots"] == tiers["num_rows"]


def test_whoever_looks_at_a_table_or_loads_one_finds_it_heeded(tmp_path):
    resident, tiered = build(Adagrad(lr=0.1)), in_files(Adagrad(lr=0.1), tmp_path)
    train([resident, tiered], 4)
    states = [copy.deepcopy(module.state_dict()) for module in (resident, tiered)]
    optimizers = [copy.deepcopy(module.row_optimizer.state_dict()) for module in (resident, tiered)]
    train([resident, tiered], 4, seed=1)

    for module, state, known in zip((resident, tiered), states, optimizers, strict=True):
        module.load_state_dict(state)
        module.row_optimizer.load_state_dict(known)
        with torch.no_grad():
            module.table_weights()[1][7] = 3.0
    train([resident, tiered], 4, seed=2)

    require_equal(resident, tiered)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_state_is_loaded_with_one_tables_clones_in_memory_at_a_time(
    tmp_path, monkeypatch, is_new
):
    source = build(Adagrad(lr=0.1))
    tiered = in_files(Adagrad(lr=0.1), tmp_path)
    train([source], 6)
    if not is_new:
        train([tiered], 3)
    tiered.load_state_dict(source.state_dict())
    state = copy.deepcopy(source.row_optimizer.state_dict())
    copy_state, clones, most = fused_optimizer._copy_state, [], [0]

    def watched(value, known):
        copied = copy_state(value, known)
        if copied is not known:
            clones.append(weakref.ref(copied))
            most[0] = max(most[0], sum(each() is not None for each in clones))
        return copied

    monkeypatch.setattr(fused_optimizer, "_copy_state", watched)

    tiered.row_optimizer.load_state_dict(state)

    assert most[0] == (1 if is_new else 0)
    require_equal(source, tiered)
    train([source, tiered], 4, seed=2)
    require_equal(source, tiered)


def test_evaluation_in_between_reads_rows_where_they_are_and_nothing_ahead(tmp_path, monkeypatch):
    resident, tiered = build(Adagrad(lr=0.1)), in_files(Adagrad(lr=0.1), tmp_path)
    told = []
    monkeypatch.setattr(
        cold_files, "advise_random", lambda tensor, is_random: told.append(is_random)
    )
    ids = JaggedIds.from_one_hot(["users", "goods"], torch.arange(520).reshape(2, 260) % 260)
    train([resident, tiered], 8)
    assert not told
    num_arrays = 2 * len(TABLES)

    for _ in range(2):
        with torch.no_grad():
            pooled = [module(ids).values() for module in (resident, tiered)]
        assert torch.equal(*pooled)
        assert told == [True] * num_arrays
    train([resident, tiered], 8, seed=1)
    require_equal(resident, tiered)

    assert told == [True] * num_arrays + [False] * num_arrays


def test_rows_given_to_a_bag_are_what_its_file_begins_with(tmp_path):
    rows = torch.randn(NUM_ROWS, DIM)

    bag = bag_in_files(tmp_path, _weight=rows, optimizer=SGD(lr=1.0))

    assert torch.equal(bag.weight, rows)
    bag(torch.tensor([[3, 4]])).sum().backward()
    assert not torch.equal(bag.weight, rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in (NUM_ROWS, 90)
        )

    def forward(self, ids):
        return sum(bag(ids % bag.num_embeddings) for bag in self.bags)


def train_model(model, optimizer, num_steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        ids = torch.randint(0, NUM_ROWS, (6, 3), generator=generator)
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_accelerated_model_moves_into_files_and_stays_what_it_was(make, tmp_path):
    plain, model = Model(), Model()
    optimizers = [make(each.parameters(), lr=0.1) for each in (plain, model)]
    weights = [bag.weight for bag in model.bags]
    train_model(plain, optimizers[0], 3)
    train_model(model, optimizers[1], 3)

    recsys.accelerate(
        model, optimizer=optimizers[1], budget=9000, cold_tier="file", cold_path=tmp_path / "rows"
    )
    train_model(plain, optimizers[0], 6)
    train_model(model, optimizers[1], 6)

    assert all(bag.weight is weight for bag, weight in zip(model.bags, weights, strict=True))
    assert scratch_bytes(tmp_path / "rows") >= (NUM_ROWS + 90) * DIM * 4
    for own, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, own)
    recsys.restore(model)
    train_model(plain, optimizers[0], 2)
    train_model(model, optimizers[1], 2)
    for own, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, own)


def refuse(**options):
    """Build a bag that cannot be, and let go of the error."""
    try:
        HotColdEmbeddingBag(NUM_ROWS, DIM, cold_tier="file", **{"optimizer": SGD(lr=1.0)} | options)
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_idx": NUM_ROWS}, "padding_idx must be within"),
        ({"_weight": torch.zeros(3, 3)}, "must have the shape"),
        ({"device": "meta"}, "is for device 'cpu' or 'cuda', got 'meta'"),
        ({"budget": 10}, "budget"),
        ({"optimizer": "sgd"}, "'sgd'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_module_that_is_refused_leaves_no_files(options, message, tmp_path):
    said = refuse(**{"budget": 8000, "cold_path": tmp_path / "rows"} | options)
    gc.collect()

    assert message in said
    assert not scratch_files(tmp_path / "rows")
    assert bag_in_files(tmp_path, optimizer=SGD(lr=1.0)).weight.abs().max() > 0


def test_a_model_that_does_not_fit_is_left_as_it_was_without_files(tmp_path):
    model = Model()
    before = [weight.clone() for weight in model.parameters()]
    addresses = [weight.data_ptr() for weight in model.parameters()]

    with pytest.raises(BudgetTooSmall, match="budget"):
        recsys.accelerate(
            model, optimizer=SGD(lr=1.0), budget=10, cold_tier="file", cold_path=tmp_path / "rows"
        )

    assert [type(bag) for bag in model.bags] == [nn.EmbeddingBag] * 2
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    assert all(map(torch.equal, model.parameters(), before))
    gc.collect()
    assert not scratch_files(tmp_path)


def test_tables_that_the_disk_has_no_room_for_are_refused_at_once(tmp_path, monkeypatch):
    kept = bag_in_files(tmp_path, optimizer=Adagrad(lr=1.0))
    before = kept.weight.detach().clone()
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: type(real)((*real[:4], 1, *real[5:])),  # a block is free
    )

    with pytest.raises(
        ColdTierError, match=r"take 17.2 KiB on disk, and \d.* are free .*cold_path"
    ):
        in_files(SGD(lr=1.0), tmp_path / "other")
    with pytest.raises(ColdTierError, match=r"take 12.5 KiB on disk"):
        kept(torch.tensor([[3, 4]])).sum().backward()  # has state from now on

    assert not (tmp_path / "other").exists()
    monkeypatch.undo()
    assert torch.equal(kept.weight, before)
    kept.row_optimizer.step()
    assert not torch.equal(kept.weight, before)


def test_a_disk_that_says_no_leaves_no_half_of_the_tables(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        if length > 5000:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ColdTierError, match="No space left on device"):
        in_files(SGD(lr=1.0), tmp_path)

    gc.collect()
    assert not scratch_files(tmp_path)


def test_no_room_is_needed_for_the_state_of_a_frozen_table(tmp_path, monkeypatch):
    model, real = Model(), os.statvfs(tmp_path)
    model.bags[0].weight.requires_grad_(False)
    free = (NUM_ROWS + 90 + 90) * DIM * 4
    monkeypatch.setattr(
        os, "statvfs", lambda _: type(real)((real[0], 1, *real[2:4], free, *real[5:]))
    )

    recsys.accelerate(
        model, optimizer=Adagrad(lr=1.0), budget=8000, cold_tier="file", cold_path=tmp_path / "rows"
    )

    assert scratch_bytes(tmp_path / "rows") == (NUM_ROWS + 90) * DIM * 4


def accelerated(optimizer, **options):
    model = Model()
    recsys.accelerate(model, optimizer=optimizer, **options, always=True)
    return model


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (partial(HotColdEmbeddingBag, NUM_ROWS, DIM), NUM_ROWS * DIM * 4),
        (partial(HotColdEmbeddingBagCollection, TABLES[:2]), 560 * 4 * 4),
        (partial(HotColdEmbeddingCollection, TABLES[:2]), 560 * 4 * 4),
        (accelerated, 490 * DIM * 4),
    ],
    ids=["bag", "pooled", "sequence", "accelerated"],
)
def test_a_disk_has_room_for_the_rows_and_their_state_or_is_refused(
    make, num_bytes, tmp_path, monkeypatch
):
    options = {"budget": 8000, "cold_tier": "file", "cold_path": tmp_path / "new" / "rows"}
    real = os.statvfs(tmp_path)

    def set_free(free):
        monkeypatch.setattr(
            os, "statvfs", lambda _: type(real)((real[0], 1, *real[2:4], free, *real[5:]))
        )

    set_free(2 * num_bytes - 1)
    with pytest.raises(ColdTierError, match=f"take {format_bytes(2 * num_bytes)} on disk"):
        make(optimizer=Adagrad(lr=1.0), **options)
    assert not list(tmp_path.iterdir())

    set_free(2 * num_bytes)
    make(optimizer=Adagrad(lr=1.0), **options)  # the same folder


@pytest.mark.parametrize("folder", ["/proc/rows", "{tmp}/file/rows"])
def test_a_folder_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").touch()
    path = folder.format(tmp=tmp_path)

    with pytest.raises(ColdTierError, match=rf"{path}: must be a writable folder"):
        HotColdEmbeddingBag(
            10, 4, optimizer=SGD(lr=1.0), budget=100, cold_tier="file", cold_path=path
        )


def look_at_everything(module):
    for first in range(0, 260, 4):
        ids = torch.arange(first, first + 4).expand(2, 4)
        module(JaggedIds.from_one_hot(["users", "goods"], ids))


@pytest.mark.parametrize("what", ["read", "written"])
def test_rows_that_the_system_refuses_to_move_are_named_by_this_use_and_every_later_one(
    what, tmp_path
):
    tiered = in_files(SGD(lr=0.5), tmp_path)
    descriptor = tiered.tiers()[0].files.find(tiered.table_weights()[1]).descriptor
    train([tiered], 6)
    good = os.dup(descriptor)
    mode = os.O_RDONLY if what == "written" else os.O_WRONLY
    bad = os.open(f"/proc/self/fd/{descriptor}", mode)
    os.dup2(bad, descriptor)

    with pytest.raises(TiersFailed, match=rf"of table 'goods': row \d+ cannot be {what}"):
        look_at_everything(tiered)

    os.dup2(good, descriptor)
    os.close(good)
    os.close(bad)
    for use in (lambda: train([tiered], 1), tiered.state_dict, tiered.sync):
        with pytest.raises(TiersFailed, match=rf"cannot be {what} .*load a checkpoint"):
            use()


def test_a_file_cut_off_in_use_is_an_error_that_names_it(tmp_path):
    bag = bag_in_files(tmp_path, optimizer=SGD(lr=1.0))
    bag(torch.tensor([[1]])).sum().backward()
    [descriptor] = scratch_files(tmp_path / "rows")
    os.ftruncate(descriptor, 4096)

    with pytest.raises(ColdTierError, match=r"of table 'weight': row 399 ends at byte 12800"):
        bag(torch.tensor([[399]]))

    os.ftruncate(descriptor, NUM_ROWS * DIM * 4)


def test_a_table_exchanged_for_one_in_memory_is_refused(tmp_path):
    bag = bag_in_files(tmp_path, optimizer=SGD(lr=1.0))
    in_file = bag.weight.data
    bag.weight.data = torch.zeros(NUM_ROWS, DIM)

    with pytest.raises(ColdTierError, match=r"shape \(400, 8\) is not in its file any more"):
        bag(torch.tensor([[1]]))

    bag.weight.data = in_file  # no transfer has failed
    bag(torch.tensor([[1]])).sum().backward()


def test_mini_batches_of_many_rows_are_moved_by_several_threads(tmp_path):
    rows = torch.randn(5000, 4)
    resident = HotColdEmbeddingBag(
        5000, 4, mode="sum", _weight=rows.clone(), optimizer=Adagrad(lr=0.1)
    )
    tiered = HotColdEmbeddingBag(
        5000,
        4,
        mode="sum",
        _weight=rows,
        optimizer=Adagrad(lr=0.1),
        budget=100_000,
        cold_tier="file",
        cold_path=tmp_path / "rows",
    )
    generator = torch.Generator().manual_seed(0)

    for _ in range(20):
        ids = torch.randint(0, 5000, (500, 3), generator=generator)
        for module in (resident, tiered):
            module(ids).square().sum().backward()

    assert torch.equal(tiered.weight, resident.weight)
    [tiers] = tiered.tiers()
    assert tiers.residency.counts.num_fetched > 20 * 256


def test_state_that_is_begun_anew_waits_for_transfers_under_way(tmp_path, monkeypatch):
    module = bag_in_files(tmp_path, mode="sum", optimizer=Adagrad(lr=0.1))
    ids = torch.arange(16).view(4, 4)
    module(ids).sum().backward()
    [tiers] = module.tiers()
    run, make, under_way = TransferQueue._run, cold_files.ColdFiles.make, []

    def run_late(self, transfer):
        time.sleep(0.05)
        run(self, transfer)

    def note_and_make(self, *arguments):
        under_way.append(tiers.residency.queue.last)
        return make(self, *arguments)

    monkeypatch.setattr(TransferQueue, "_run", run_late)
    monkeypatch.setattr(cold_files.ColdFiles, "make", note_and_make)
    pooled = module(ids)
    module.row_optimizer.state_dict()
    module.row_optimizer.state.pop(module.weight)
    module.prefetch(ids + 100)
    assert tiers.residency.queue.last
    pooled.sum().backward()

    assert under_way == [0]
