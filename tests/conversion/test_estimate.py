"""What `estimate` says beforehand is what the tables take afterwards."""

import os
from contextlib import nullcontext

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
    PartialRowWiseAdam,
    PopularityProfile,
    RowWiseAdagrad,
    TableConfig,
    plan_hot_rows,
)
from recsys.embeddings.tables_module import groups_of
from recsys.errors import BudgetTooSmall, ColdTierError
from tests.scratch_files import scratch_bytes

SIZES = {"users": (700, 8), "goods": (400, 8), "pages": (150, 4)}
OPTIMIZERS = [
    SGD(lr=0.1),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
each_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__
)


class Bags(nn.Module):
    def __init__(self, sizes=SIZES, **options):
        super().__init__()
        for name, (num_rows, dim) in sizes.items():
            options = {"mode": "sum", "sparse": True} | options
            setattr(self, name, nn.EmbeddingBag(num_rows, dim, **options))
        self.top = nn.Linear(8, 1)


def bags_on(device, **options):
    with torch.device(device):
        return Bags(**options)


def look_up(model, num_rows=3):
    """Every table is looked up once, by bags of rows that no other bag has, before any is back."""
    modules = [each for each in model.modules() if isinstance(each, nn.EmbeddingBag)]
    ids = [torch.arange(min(num_rows, each.num_embeddings)).reshape(-1, 1) for each in modules]
    return sum(module(each).square().sum() for module, each in zip(modules, ids, strict=True))


def groups_with_slots(model):
    return [group for group in groups_of(model) if group.fetcher is not None]


def slots_of(model):
    return sum(group.num_slots for group in groups_with_slots(model))


def fast_memory_of(model):
    """Bytes of the arrays: rows, state, marks of slots, row map."""
    found = 0
    for group in groups_with_slots(model):
        of_slots = [group._slots, *(memory._slots for memory, _ in group._states)]
        marks = [mark for mark in group.fetcher.marks if mark.size > 1]
        found += sum(each.nbytes for each in (*of_slots, *marks))
    return found


def tables_and_state(model, row_optimizer):
    """Bytes of the tables and of their state, the numbers of steps apart."""
    weights = [each.weight for each in model.modules() if isinstance(each, nn.EmbeddingBag)]
    state = [
        value
        for weight in weights
        for value in row_optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return sum(each.nbytes for each in (*weights, *state))


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cold_tier", ["host", "file"])
@pytest.mark.parametrize("budget", ["9KiB", "20KiB", "1MiB"])
def test_the_figures_are_those_of_the_accelerated_model(
    tmp_path, optimizer, dtype, cold_tier, budget
):
    model = Bags(dtype=dtype)
    options = {"optimizer": optimizer, "budget": budget, "cold_tier": cold_tier}
    told = recsys.estimate(model, **options)
    on_meta = recsys.estimate(bags_on("meta", dtype=dtype), **options)

    folder = tmp_path / "rows"
    if cold_tier == "file":
        options["cold_path"] = folder
    with (
        pytest.warns(UserWarning, match="no cold tier is needed")
        if told.all_fits
        else nullcontext()
    ):
        accelerated = recsys.accelerate(model, **options, always=True)
    look_up(model).backward()

    assert on_meta == told
    assert told.num_tables == 3
    assert told.num_rows == 1250
    files = scratch_bytes(folder)
    everything = tables_and_state(model, accelerated.row_optimizer)
    assert told.everything_bytes == everything
    assert told.all_fits == (budget == "1MiB" and cold_tier == "host") == (not slots_of(model))
    if told.num_slots:
        assert told.num_slots == slots_of(model)
        assert told.fast_bytes == fast_memory_of(model)
        assert told.fast_bytes <= told.budget_bytes
    else:
        assert told.fast_bytes == everything
    assert told.disk_bytes == files == (everything if cold_tier == "file" else 0)
    cold_bytes = everything if told.num_slots and cold_tier == "host" else 0
    assert told.dense_bytes == sum(each.nbytes for each in model.top.parameters())
    assert told.host_bytes == told.fast_bytes + cold_bytes + told.dense_bytes


def test_bfloat16_rows_and_their_state_in_float32_stay_in_the_budget():
    settings = {"optimizer": Adagrad(lr=0.1), "budget": "9KiB", "dtype": torch.bfloat16}
    bag = HotColdEmbeddingBag(400, 8, mode="sum", **settings)

    with pytest.warns(UserWarning, match="cold tier"):
        bag(torch.arange(300).reshape(-1, 1)).sum().backward()

    assert 0 < fast_memory_of(bag) <= 9 * 1024


def test_pinned_rows_are_those_that_get_slots():
    profile = PopularityProfile({name: size for name, (size, _) in SIZES.items()})
    ids = [torch.arange(90) % 30, torch.arange(20), torch.arange(5)]
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    profile.add(JaggedIds(list(SIZES), torch.cat(ids), offsets))
    tables = [
        TableConfig(name=name, num_embeddings=num_rows, embedding_dim=dim)
        for name, (num_rows, dim) in SIZES.items()
    ]
    plan = plan_hot_rows(profile, tables, "12KiB", SGD(lr=0.1), window_lookups=8)
    model = Bags()

    told = recsys.estimate(model, optimizer=SGD(lr=0.1), plan=plan)
    recsys.accelerate(model, optimizer=SGD(lr=0.1), plan=plan)

    assert told.num_slots == slots_of(model)
    assert sum(len(group.fetcher.planned) for group in groups_with_slots(model)) > 0
    assert told.fast_bytes == fast_memory_of(model)


def test_the_least_budget_is_enough_and_a_byte_less_is_not():
    optimizer = Adagrad(lr=0.1)
    model = Bags()
    least = recsys.estimate(model, optimizer=optimizer).floor_bytes

    for run in (recsys.estimate, recsys.accelerate):
        with pytest.raises(BudgetTooSmall, match=f"must be at least {least} bytes"):
            run(model, optimizer=optimizer, budget=least - 1)
    assert recsys.estimate(model, least, optimizer=optimizer).budget_bytes == least
    recsys.accelerate(model, optimizer=optimizer, budget=least)
    assert recsys.estimate(Bags({"users": (1, 8)}), optimizer=SGD(lr=0.1)).floor_bytes == 32


def test_a_terabyte_is_estimated_without_its_memory():
    model = bags_on("meta", sizes=dict.fromkeys(("users", "goods"), (10**9, 128)))
    options = {"optimizer": RowWiseAdagrad(lr=0.1), "cold_tier": "file", "device": "cuda"}

    told = recsys.estimate(model, "40GiB", **options)

    assert told.everything_bytes == 2 * 10**9 * (128 * 4 + 4) == told.disk_bytes
    assert 0 <= 40 * 2**30 - told.fast_bytes < 128 * 4 + 4 + 11
    assert all(parameter.is_meta for parameter in model.parameters())
    resident = recsys.estimate(model, optimizer=SGD(lr=0.1))
    assert resident.fast_bytes == 2 * 10**9 * 128 * 4


def test_without_an_optimizer_no_state_is_counted_and_that_is_said():
    plain, ours = Bags(), HotColdEmbeddingBag(700, 8)

    told = recsys.estimate(plain)

    assert told.fast_bytes == told.everything_bytes == 4 * (1100 * 8 + 150 * 4)
    assert not told.has_optimizer
    assert recsys.estimate(ours).everything_bytes == 4 * 700 * 8
    for model in (plain, ours):
        with pytest.raises(ValueError, match="give optimizer=, too"):
            recsys.estimate(model, "20KiB")


def test_a_disk_without_room_is_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there"
    options = {"optimizer": SGD(lr=0.1), "cold_tier": "file", "cold_path": folder}
    told = recsys.estimate(bags_on("meta"), "20KiB", **options)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: type(real)((*real[:1], told.disk_bytes - 1, *real[2:4], 1, *real[5:])),
    )

    with pytest.raises(ColdTierError, match=r"take 36.7 KiB on disk, and 36.7 KiB are free"):
        recsys.estimate(bags_on("meta"), "20KiB", **options)
    recsys.estimate(bags_on("meta"), "20KiB", optimizer=SGD(lr=0.1), cold_tier="file")
    assert not list(tmp_path.iterdir())
