"""Slots on a device, rows waiting in the host's memory: a run is that of the resident module there.

The CPU stands in for a device, whose kernels are operations of torch; with one, it is a real one.
Rows pass through staging, or the device reaches the host's memory and copies them by itself.
"""

import copy
import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import recsys
from recsys._support.cuda.own_pages import pages_of
from recsys._support.cuda.replays import replaying
from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.kernels.torch.slots import DeviceSlotMap
from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.embeddings.tiers.cold.staging import Staging
from recsys.errors import BudgetTooSmall, IdOutOfRange
from tests.embeddings.tiers import twins
from tests.embeddings.tiers.twins import BUDGET, FEATURES, TABLES, state_bytes
from tests.fake_replays import record_on_cpu
from tests.host_copies import HOST_COPIES, reach_host, use_triton


@pytest.fixture(autouse=True, params=[False, True], ids=["staged", "reached"])
def is_reached(request, monkeypatch, device):
    """Whether the device copies rows of the host by itself."""
    reach_host(monkeypatch, HOST_COPIES if request.param else None)
    return request.param


def pair(device, optimizer, tables=TABLES, budget=BUDGET, **options):
    """The same module on the device, resident and tiered."""
    budget += state_bytes(optimizer)
    modules = [
        HotColdEmbeddingBagCollection(
            tables, device=device, optimizer=optimizer, budget=each, **options
        )
        for each in (None, budget)
    ]
    modules[1].load_state_dict(modules[0].state_dict())
    assert all(isinstance(tiers.hot.map, DeviceSlotMap) for tiers in modules[1].tiers())
    assert all(table.device.type == "cpu" for table in modules[1].table_weights())
    assert {module.device for module in modules} == {device}
    return modules


def make_ids(generator, device, *, is_one_hot=False, high=250, has_weights=False):
    lengths = torch.randint(0, 4, (len(FEATURES) * 4,), generator=generator)
    if is_one_hot:
        values = torch.randint(0, high, (len(FEATURES), 4), generator=generator)
        return JaggedIds.from_one_hot(FEATURES, values.to(device))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, high, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if has_weights else None
    return JaggedIds(FEATURES, values, offsets, weights).to(device)


def train(modules, device, num_steps=20, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        ids = make_ids(generator, device, **options)
        losses = [module(ids).values().square().sum() for module in modules]
        assert len({loss.item() for loss in losses}) == 1
        for loss in losses:
            loss.backward()


def require_own_pages(module):
    """A device that copies rows by itself reaches whole pages, which nothing else may be in."""
    for tiers in module.tiers():
        if tiers.are_reached:
            arrays = [array for space in tiers.cold() for array in space.tables]
            assert all(pages_of(array) for array in arrays if array.nbytes)


def require_equal(resident, tiered):
    require_own_pages(tiered)
    twins.require_equal(resident, tiered)


@pytest.mark.in_ci(
    "cuda",
    "staged-cpu-SGD-True",
    "reached-cpu-Adagrad-False",
    "staged-cpu-RowWiseAdagrad-False",
    "reached-cpu-Adam-True",
    "staged-cpu-PartialRowWiseAdam-True",
)
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_a_run_is_that_of_the_resident_module_to_the_last_bit(device, optimizer, is_one_hot):
    modules = pair(device, optimizer)

    train(modules, device, num_steps=40, is_one_hot=is_one_hot)

    assert all(each.residency.counts.num_written_back > 0 for each in modules[1].tiers())
    require_equal(*modules)


def test_a_budget_does_not_change_initial_rows(device):
    found = []
    for budget in (None, BUDGET):
        torch.manual_seed(0)
        module = HotColdEmbeddingBagCollection(
            TABLES, device=device, optimizer=SGD(lr=0.1), budget=budget
        )
        found.append([table.detach().cpu() for table in module.table_weights()])

    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_triton_kernels_alone_train_as_the_resident_module(device, monkeypatch):
    triton_slots = pytest.importorskip("recsys.embeddings.kernels.triton.slots")
    use_triton(monkeypatch)
    modules = pair(device, RowWiseAdagrad(lr=0.1), budget=6000)

    train(modules, device, num_steps=5)

    kinds = {type(each.hot.map) for each in modules[1].tiers()}
    assert torch.cuda.is_available() or kinds == {triton_slots.TritonSlotMap}
    assert all(each.residency.counts.num_written_back > 0 for each in modules[1].tiers())
    require_equal(*modules)


@pytest.mark.parametrize("is_reached", [True], indirect=True)
def test_claims_are_replayed_while_tickets_of_earlier_ones_are_held(device, monkeypatch):
    pytest.importorskip("triton")
    if device.type == "cpu":
        record_on_cpu(monkeypatch)
    use_triton(monkeypatch)
    modules = pair(device, RowWiseAdagrad(lr=0.1), budget=7000)
    generator = torch.Generator().manual_seed(0)
    batches = [make_ids(generator, device, is_one_hot=True) for _ in range(6)]

    with replaying():
        modules[1].prefetch(batches[0])
        for ids, following in itertools.pairwise(batches):
            modules[1].prefetch(following)
            losses = [module(ids).values().square().sum() for module in modules]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()

    for tiers in modules[1].tiers():
        assert tiers.hot.map.numbers.replays._recorded
    require_equal(*modules)


@pytest.mark.in_ci("cuda", "staged-cpu-False", "reached-cpu-True")
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_rows_claimed_ahead_are_those_of_the_lookup_and_the_newest(device, is_one_hot):
    modules = pair(device, Adagrad(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    batches = [make_ids(generator, device, is_one_hot=is_one_hot) for _ in range(30)]

    for ids, following in itertools.pairwise(batches):
        coming = modules[1].prefetch(ids), modules[1].prefetch(following)
        assert all(each.is_held for each in coming)
        losses = [module(ids).values().square().sum() for module in modules]
        assert [each.is_held for each in coming] == [False, True]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        coming[1].cancel()

    require_equal(*modules)


def test_rows_of_16_bits_are_rounded_by_their_row_not_by_their_slot(device):
    tables = [dataclasses.replace(table, data_type="bf16") for table in TABLES]
    modules = pair(device, RowWiseAdagrad(lr=0.1), tables, budget=6000)

    train(modules, device, num_steps=30)

    require_equal(*modules)


def test_rows_of_a_plan_stay_in_their_slots_until_a_mini_batch_needs_them_all(device):
    tables = [TableConfig(name="users", num_embeddings=400, embedding_dim=4)]
    popular = torch.tensor([7, 3, 390])
    profile = PopularityProfile({"users": 400})
    profile.add(JaggedIds.from_one_hot(["users"], popular.repeat(50).unsqueeze(0)))
    plan = plan_hot_rows(profile, tables, 4 * 400 + 24 * 11, SGD(lr=0.1), window_lookups=8)
    module = HotColdEmbeddingBagCollection(tables, device=device, optimizer=SGD(lr=0.1), plan=plan)
    [tiers] = module.tiers()

    def look_up(rows):
        before = tiers.residency.counts
        ids = JaggedIds.from_one_hot(["users"], rows.unsqueeze(0).to(device))
        module(ids).values().sum().backward()
        return tiers.residency.counts.num_hits - before.num_hits

    for start in range(0, 320, 8):
        look_up(torch.arange(start, start + 8))

    assert plan.num_pinned == 3
    assert look_up(popular[:2]) == 2
    with pytest.warns(UserWarning, match="2 of the plan's rows were unpinned"):
        look_up(torch.tensor([popular[0], *range(100, 110)]))
    assert look_up(popular) < 3


def test_evaluation_claims_no_slots_and_writes_nothing_back(device):
    modules = pair(device, SGD(lr=0.5))
    train(modules, device)
    before = [each.residency.counts for each in modules[1].tiers()]
    dirty = [each.hot.dirty()[0].tolist() for each in modules[1].tiers()]
    ids = JaggedIds.from_one_hot(FEATURES, torch.arange(250).repeat(3, 1).to(device))

    with torch.no_grad():  # of more rows than there are slots
        assert torch.equal(*(module(ids).values() for module in modules))

    assert [each.residency.counts for each in modules[1].tiers()] == before
    assert [each.hot.dirty()[0].tolist() for each in modules[1].tiers()] == dirty
    assert any(dirty)
    train(modules, device, seed=1)
    require_equal(*modules)


def test_a_device_that_reaches_the_host_reads_missing_rows_by_itself(
    device, is_reached, monkeypatch
):
    resident, tiered = pair(device, SGD(lr=0.1))
    train([resident, tiered], device)
    for tiers in tiered.tiers():
        tiers.flush()
        tiers.residency.hot.drop_unclaimed()  # so every row is missing
    monkeypatch.setattr(Staging, "read", None)

    ids = make_ids(torch.Generator().manual_seed(1), device)
    with torch.no_grad(), nullcontext() if is_reached else pytest.raises(TypeError):
        assert torch.equal(tiered(ids).values(), resident(ids).values())


def test_what_others_write_to_the_tables_is_heeded(device):
    modules = pair(device, Adagrad(lr=0.1))
    train(modules, device)
    with torch.no_grad():
        for module in modules:
            module.table_weights()[0].mul_(0.5)
            module.load_state_dict(copy.deepcopy(module.state_dict()))
            state = copy.deepcopy(module.row_optimizer.state_dict())
            module.row_optimizer.load_state_dict(state)

    train(modules, device, seed=1)

    require_equal(*modules)


def test_gradients_that_are_looked_at_are_the_host_s_and_count(device):
    modules = pair(device, SGD(lr=0.5), auto_apply=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = make_ids(generator, device)
        for module in modules:
            module(ids).values().square().sum().backward()
    for module in modules:
        for table in module.table_weights():
            assert table.grad.device == table.device
            table.grad = table.grad.coalesce() * 0.5
        module.row_optimizer.step()

    for expected, found in zip(*(module.table_weights() for module in modules), strict=True):
        # `coalesce` sums in an order of its own on a GPU.
        torch.testing.assert_close(found, expected.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.in_ci("cuda", "torch", "reached-cpu-triton")
@pytest.mark.usefixtures("each_way")
def test_weights_of_lookups_get_their_gradient(device):
    modules = pair(device, SGD(lr=0.5), is_weighted=True)
    ids = make_ids(torch.Generator().manual_seed(0), device, has_weights=True)
    found = []
    for module in modules:
        weights = ids.weights_or_none().clone().requires_grad_()
        weighted = JaggedIds(FEATURES, ids.values(), ids.offsets(), weights)
        module(weighted).values().square().sum().backward()
        found.append(weights.grad)

    assert torch.equal(*found)
    require_equal(*modules)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_bag_with_a_budget_is_that_without(device, mode, padding_idx):
    bags = [
        HotColdEmbeddingBag(
            300,
            4,
            mode=mode,
            padding_idx=padding_idx,
            device=device,
            optimizer=RowWiseAdagrad(lr=0.1),
            budget=budget,
        )
        for budget in (None, 4 * 300 + 60 * 28)
    ]
    bags[1].load_state_dict(bags[0].state_dict())
    generator = torch.Generator().manual_seed(0)

    for step in range(20):
        ids = torch.randint(0, 300, (24,), generator=generator).to(device)
        ids[5:7] = 3
        with torch.set_grad_enabled(step % 4 != 3):
            outputs = [bag(ids, torch.tensor([0, 5, 5, 20], device=device)) for bag in bags]
        assert torch.equal(*outputs)
        if outputs[0].requires_grad:
            for output in outputs:
                output.square().sum().backward()

    assert bags[1].tiers()[0].residency.counts.num_written_back > 0
    assert torch.equal(bags[1].weight, bags[0].weight.cpu())


def test_an_id_that_is_no_row_is_named_and_nothing_is_claimed(device, is_reached):
    _, tiered = pair(device, SGD(lr=0.5))
    outside = JaggedIds.from_one_hot(FEATURES, torch.full((3, 2), 10_000).to(device))

    def look_up():
        tiered(outside)
        assert is_reached  # else it is named at once
        tiered.check_input()

    with pytest.raises(IdOutOfRange, match="feature 'users', sample 0: id 10000"):
        look_up()

    assert [each.residency.num_claimed for each in tiered.tiers()] == [0, 0]


def test_a_mini_batch_without_lookups_needs_no_slots(device):
    modules = pair(device, SGD(lr=0.5))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    ids = JaggedIds(FEATURES, none, torch.zeros(7, dtype=torch.int64, device=device))

    for module in modules:
        module(ids).values().square().sum().backward()
    train(modules, device)

    require_equal(*modules)


def test_a_mini_batch_that_does_not_fit_is_too_small_a_budget(device):
    _, tiered = pair(device, SGD(lr=0.5))
    ids = JaggedIds.from_one_hot(FEATURES, torch.arange(250).repeat(3, 1).to(device))

    with pytest.raises(BudgetTooSmall, match="the budget is 14000"):
        tiered(ids)


def test_slots_are_shared_out_anew_where_one_dim_has_too_few(device):
    modules = pair(device, SGD(lr=0.5))
    values = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(100)])
    ids = JaggedIds(FEATURES, values, torch.tensor([0, 1, 2, 102])).to(device)
    before = [each.hot.num_slots for each in modules[1].tiers()]

    for module in modules:
        module(ids).values().square().sum().backward()

    assert [each.hot.num_slots for each in modules[1].tiers()] != before
    require_equal(*modules)


def test_where_all_rows_fit_they_are_on_the_device(device):
    with pytest.warns(UserWarning, match="no cold tier is needed"):
        module = HotColdEmbeddingBagCollection(
            TABLES, device=device, optimizer=SGD(lr=0.5), budget="1MiB"
        )

    assert {table.device for table in module.table_weights()} == {device}
    ids = make_ids(torch.Generator().manual_seed(0), device)
    module(ids).values().sum().backward()


def test_rows_may_wait_in_files(device, is_reached, tmp_path):
    modules = pair(device, Adagrad(lr=0.1), cold_tier="host")
    said = pytest.warns(UserWarning, match="cold_tier='file': .* cannot read files by itself")
    with said if is_reached else nullcontext():
        in_files = HotColdEmbeddingBagCollection(
            TABLES,
            device=device,
            optimizer=Adagrad(lr=0.1),
            budget=BUDGET + 8000,
            cold_tier="file",
            cold_path=tmp_path / "rows",
        )
    in_files.load_state_dict(modules[0].state_dict())

    train([modules[0], in_files], device)

    require_equal(modules[0], in_files)


class TwoTowers(nn.Module):
    """Bags as an existing model has them, and something dense."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, 4, mode="sum", sparse=True) for size in (300, 260)
        )
        self.dense = nn.Linear(8, 1)

    def forward(self, ids):
        return self.dense(torch.cat([bag(ids) for bag in self.bags], 1)).square().sum()


def test_an_accelerated_model_is_that_with_all_rows_on_the_device(device):
    torch.manual_seed(0)
    models = [TwoTowers().to(device)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    tables = [bag.weight for bag in models[1].bags]
    recsys.accelerate(models[0], optimizer=optimizers[0], always=True)
    recsys.accelerate(models[1], optimizer=optimizers[1], budget=6000)
    generator = torch.Generator().manual_seed(0)

    for _ in range(20):
        ids = torch.randint(0, 250, (6, 3), generator=generator).to(device)
        losses = [model(ids) for model in models]
        assert losses[0].item() == losses[1].item()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert models[1].bags[0].tiers()[0].residency.counts.num_written_back > 0
    for bag in models[1].bags:
        require_own_pages(bag)
    assert all(bag.weight is table for bag, table in zip(models[1].bags, tables, strict=True))
    for model in models:
        recsys.restore(model)
    for bag, other in zip(*(model.bags for model in models), strict=True):
        assert torch.equal(other.weight, bag.weight.cpu())


@pytest.mark.gpu
def test_slots_move_to_the_device_and_back_and_tables_stay():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    tiered = HotColdEmbeddingBagCollection(TABLES, optimizer=Adagrad(lr=0.1), budget=BUDGET + 8000)
    resident = HotColdEmbeddingBagCollection(TABLES, optimizer=Adagrad(lr=0.1))
    resident.load_state_dict(tiered.state_dict())

    for step, device in enumerate(["cpu", "cuda", "cuda", "cpu"]):
        for module in (tiered, resident):
            module.to(device)
        train([tiered, resident], torch.device(device), num_steps=5, seed=step)
        require_own_pages(tiered)
        assert {table.device.type for table in tiered.table_weights()} == {"cpu"}
        assert tiered.device.type == device

    require_equal(resident, tiered)


def test_a_dtype_cannot_be_changed_of_rows_in_two_tiers(device):
    _, tiered = pair(device, SGD(lr=0.5))

    with pytest.raises(
        ValueError,
        match=r"rows in two tiers .* cannot become torch\.float64.* call recsys\.restore",
    ):
        tiered.double()


def test_slots_in_use_stay_where_they_are(device):
    _, tiered = pair(device, SGD(lr=0.5))
    loss = tiered(make_ids(torch.Generator().manual_seed(0), device)).values().sum()

    with pytest.raises(ValueError, match="are in use; delete the loss and outputs"):
        tiered.row_optimizer.updater.move_slots(torch.device("meta"))

    loss.backward()


def test_slots_of_a_frozen_table_are_not_written_back(device):
    _, tiered = pair(device, SGD(lr=0.1))
    tiered.table_weights()[1].requires_grad_(False)
    ids = make_ids(torch.Generator().manual_seed(0), device)

    tiered(ids).values().sum().backward()

    tiers, _ = tiered.tiers()  # of users, goods and likes
    rows, _ = tiers.hot.dirty()
    first, end = tiers.hot.first_rows[1:3].tolist()
    assert len(rows)
    assert not ((rows >= first) & (rows < end)).any()
