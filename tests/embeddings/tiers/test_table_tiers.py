"""Tiered tables compute what resident ones do, to the last bit."""

import copy

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.kernels.cpu.slot_arrays import DIRTY
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers import residency
from recsys.errors import BudgetTooSmall, IdOutOfRange, ProfileError
from tests.embeddings.tiers.twins import (
    BUDGET,
    FEATURES,
    OPTIMIZERS,
    build,
    pair,
    require_equal,
)

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)


def tiers_of(module):
    return [group.group.tiers for group in module.row_optimizer.updater._groups]


def batch(generator, is_one_hot=False):
    """Two or three values a bag, or exactly one."""
    lengths = torch.randint(0, 4, (len(FEATURES) * 4,), generator=generator)
    if is_one_hot:
        lengths = torch.ones_like(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 250, (int(lengths.sum()),), generator=generator)
    return JaggedIds(FEATURES, values, offsets)


def train(modules, num_steps, seed=0, is_one_hot=False):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        ids = batch(generator, is_one_hot)
        losses = [module(ids).values().square().sum() for module in modules]
        assert len({loss.item() for loss in losses}) == 1
        for loss in losses:
            loss.backward()


@each_optimizer
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_a_run_is_that_of_the_resident_module_to_the_last_bit(optimizer, is_one_hot):
    modules = pair(optimizer)

    train(modules, 40, is_one_hot=is_one_hot)

    assert all(tiers.residency.counts.num_written_back > 0 for tiers in tiers_of(modules[1]))
    require_equal(*modules)


@pytest.mark.parametrize("kind", [RowWiseAdagrad, Adam])
def test_state_of_another_formula_changes_nothing_where_rows_are_in_slots(kind):
    source, (_, tiered) = build(kind(lr=0.1)), pair(Adagrad(lr=0.1))
    train([source], 3)
    train([tiered], 3)
    before = copy.deepcopy(tiered.row_optimizer.state_dict())
    state = source.row_optimizer.state_dict()
    if kind is Adam:  # rows and columns of users fit, those of pages do not
        for table, known in state["state"].items():
            del known[f"{table.split('.')[1]}.exp_avg_sq"]
        momentum = state["state"]["embedding_bags.pages.weight"]
        momentum["pages.momentum1"] = momentum["pages.momentum1"][:, :4]

    with pytest.raises(ValueError, match=r"'momentum1' .* must be"):
        tiered.row_optimizer.load_state_dict(state)

    for table, known in before["state"].items():
        for name, value in known.items():
            assert torch.equal(tiered.row_optimizer.state_dict()["state"][table][name], value)


def test_a_dropped_graph_gives_its_slots_back():
    _, tiered = pair(SGD(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        tiered(batch(generator))

    assert all(tiers.hot.map.num_claims.max() <= 1 for tiers in tiers_of(tiered))


def test_a_loss_that_is_kept_keeps_no_slots_after_backward():
    _, tiered = pair(SGD(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    kept = []
    for _ in range(100):
        loss = tiered(batch(generator)).values().sum()
        loss.backward()
        kept.append(loss)

    assert all(tiers.hot.map.num_claims.max() <= 1 for tiers in tiers_of(tiered))


def test_more_lookups_at_once_than_a_slot_can_count_are_refused_by_name(monkeypatch):
    assert torch.iinfo(torch.int16).max >= residency.MOST_HELD
    monkeypatch.setattr(residency, "MOST_HELD", 5)
    tiered = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=0.1), budget=2400)
    ids = torch.arange(8).view(2, 4)
    kept = [tiered(ids) for _ in range(5)]

    for use in (tiered, tiered.prefetch):
        with pytest.raises(RuntimeError, match="5 lookups hold rows in fast memory"):
            use(ids)

    [tiers] = tiered.tiers()
    assert tiers.hot.map.num_claims.max() == 5
    kept.clear()
    tiered(ids).sum().backward()
    assert tiers.residency.num_claimed == 0


def num_dirty(tiers):
    return int(((tiers.hot.map.flags & DIRTY) > 0).sum())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_evaluation_claims_no_slots_and_writes_nothing_back(off):
    resident, tiered = pair(SGD(lr=0.5))
    train([resident, tiered], 20)
    before = [(tiers.residency.counts, num_dirty(tiers)) for tiers in tiers_of(tiered)]
    generator = torch.Generator().manual_seed(9)
    more_than_slots = JaggedIds.from_one_hot(FEATURES, torch.arange(250).repeat(3, 1))

    with off():
        for ids in (batch(generator), more_than_slots, batch(generator)):
            assert torch.equal(tiered(ids).values(), resident(ids).values())

    assert [(tiers.residency.counts, num_dirty(tiers)) for tiers in tiers_of(tiered)] == before
    assert all(dirty > 0 for _, dirty in before)
    train([resident, tiered], 5, seed=1)
    require_equal(resident, tiered)


def test_frozen_tables_take_part_in_training_and_are_read_in_evaluation():
    modules = pair(Adagrad(lr=0.1))
    for module in modules:
        for table in (0, 2):  # of one dim some, of the other all
            module.table_weights()[table].requires_grad_(False)

    train(modules, 20)

    require_equal(*modules)
    for module in modules:
        for table in (1, 3):
            module.table_weights()[table].requires_grad_(False)
    ids = batch(torch.Generator().manual_seed(9))
    counts = [tiers.residency.counts for tiers in tiers_of(modules[1])]
    pooled = [module(ids).values() for module in modules]
    assert not pooled[1].requires_grad
    assert torch.equal(*pooled)
    assert [tiers.residency.counts for tiers in tiers_of(modules[1])] == counts


def test_weights_of_lookups_in_frozen_tables_get_their_gradient():
    modules = pair(SGD(lr=0.5), is_weighted=True)
    generator = torch.Generator().manual_seed(0)
    ids, others = batch(generator), batch(generator)
    found = []
    for module in modules:
        weights = torch.linspace(-1, 2, len(ids.values()), requires_grad=True)
        weighted = JaggedIds(FEATURES, ids.values(), ids.offsets(), weights)
        elsewhere = JaggedIds(FEATURES, others.values(), others.offsets(), others.values() / 100)
        module(weighted).values().sum().backward()
        weights.grad = None
        for table in module.table_weights():
            table.requires_grad_(False)
        pooled = module(weighted).values()
        with torch.no_grad():
            module(elsewhere)

        pooled.square().sum().backward()

        found.append((pooled, weights.grad))

    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    require_equal(*modules)


def test_a_module_with_a_budget_shows_it_its_optimizer_and_its_hit_rates():
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=0.5), budget="2KiB")
    resident = build(SGD(lr=0.5))

    assert repr(bag).endswith(", mode='sum', budget='2 KiB', optimizer=SGD(lr=0.5))")
    assert ", budget='11.7 KiB', optimizer=SGD(lr=0.5)" in repr(build(SGD(lr=0.5), BUDGET))
    assert "budget" not in repr(resident)
    assert resident.hit_rates is None
    assert bag.hit_rates == (0, 0)
    for _ in range(2):
        bag(torch.tensor([[1, 1, 2]])).sum().backward()
    assert bag.hit_rates.lookups == 0.5
    assert bag.hit_rates.distinct_rows == 0.5


def test_accelerated_modules_show_budget_and_optimizer():
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum"), nn.Embedding(200, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    recsys.accelerate(model, optimizer=optimizer, budget="4KiB")

    assert "budget='4 KiB' for all tables, optimizer=SGD)" in repr(model[0])
    assert (
        repr(model[1]) == "HotColdEmbedding(200, 4, budget='4 KiB' for all tables, optimizer=SGD)"
    )
    assert model[0].hit_rates == model[1].hit_rates == (0, 0)


def test_a_budget_of_accelerate_is_told_in_a_unit_where_everything_fits():
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="budget='2 MiB': all 4.69 KiB of rows and state fit"):
        recsys.accelerate(model, optimizer=optimizer, budget="2MiB")


def test_a_budget_for_everything_changes_nothing_and_says_so():
    with pytest.warns(UserWarning, match="no cold tier is needed"):
        module = build(SGD(lr=0.1), "1MiB")

    assert tiers_of(module) == [None, None]


def one_sample(small, large):
    """A sample with these ids of two features."""
    offsets = torch.tensor([0, len(small), len(small) + len(large)])
    return JaggedIds(["small", "large"], torch.cat([small, large]), offsets)


def test_the_budget_is_shared_anew_when_a_mini_batch_needs_more_rows_of_one_dim():
    tables = [
        TableConfig(name="small", num_embeddings=100, embedding_dim=4),
        TableConfig(name="large", num_embeddings=3000, embedding_dim=8),
    ]
    budget = 4 * 3100 + 60 * 24 + 40 * 40
    modules = []
    for each in (None, budget):
        torch.manual_seed(0)
        modules.append(HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget=each))
    generator = torch.Generator().manual_seed(0)
    assert tiers_of(modules[1])[0].hot.num_slots < 70

    for counts in ((4, 4), (70, 20), (70, 20)):
        rows = [
            torch.randperm(size, generator=generator)[:count]
            for size, count in zip((100, 3000), counts, strict=True)
        ]
        ids = one_sample(*rows)
        for module in modules:
            module(ids).values().square().sum().backward()

    assert tiers_of(modules[1])[0].hot.num_slots >= 70
    assert sum(tiers.hot.num_bytes for tiers in tiers_of(modules[1])) <= budget
    require_equal(*modules)


def test_slots_that_a_kept_graph_needs_are_not_taken_from_it():
    tables = [
        TableConfig(name="small", num_embeddings=100, embedding_dim=4),
        TableConfig(name="large", num_embeddings=3000, embedding_dim=8),
    ]
    module = HotColdEmbeddingBagCollection(
        tables, optimizer=SGD(lr=0.1), budget=4 * 3100 + 60 * 24 + 40 * 40
    )
    wide = one_sample(torch.arange(70), torch.arange(20))
    kept = module(one_sample(torch.tensor([0]), torch.tensor([0]))).values()

    with pytest.raises(BudgetTooSmall, match="delete the loss and outputs"):
        module(wide)

    kept.sum().backward()
    del kept
    module(wide)


def test_rows_of_a_plan_keep_their_slots_when_the_budget_is_shared_anew():
    tables = [
        TableConfig(name="small", num_embeddings=100, embedding_dim=4),
        TableConfig(name="large", num_embeddings=3000, embedding_dim=8),
    ]
    profile = PopularityProfile({"small": 100, "large": 3000})
    profile.add(one_sample(torch.arange(60).repeat(50), torch.arange(0)))
    budget = 4 * 3100 + 60 * 24 + 40 * 40
    plan = plan_hot_rows(profile, tables, budget, SGD(lr=0.1), window_lookups=20)
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), plan=plan)
    planned = len(tiers_of(module)[0].pinned)
    before = [tiers.hot.num_slots for tiers in tiers_of(module)]

    module(one_sample(torch.arange(2), torch.arange(before[1] + 1))).values().sum().backward()

    assert [tiers.hot.num_slots for tiers in tiers_of(module)] != before
    assert len(tiers_of(module)[0].pinned) == planned == 60


def test_a_plan_of_other_tables_is_refused_by_name():
    profile = PopularityProfile({"users": 400})
    others = [TableConfig(name="users", num_embeddings=400, embedding_dim=4)]
    plan = plan_hot_rows(profile, others, "1MiB")

    with pytest.raises(ProfileError, match=r"of 'users' are \(400, 4\) in the plan"):
        HotColdEmbeddingBagCollection(
            [TableConfig(name="users", num_embeddings=400, embedding_dim=8)],
            optimizer=SGD(lr=0.1),
            plan=plan,
        )


@pytest.mark.parametrize(
    ("budget", "momentum", "error", "name"),
    [(1000, 0, BudgetTooSmall, "1224"), ("4KiB", 0.9, ValueError, "momentum")],
)
def test_what_a_budget_cannot_hold_leaves_the_model_as_it_was(budget, momentum, error, name):
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    with pytest.raises(error, match=name):
        recsys.accelerate(model, optimizer=optimizer, budget=budget)

    assert type(model[0]) is nn.EmbeddingBag


def test_an_error_that_is_kept_holds_no_slots():
    tables = [
        TableConfig(name=name, num_embeddings=1000, embedding_dim=dim)
        for name, dim in (("a", 4), ("b", 8))
    ]
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget=9400)
    features = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 1000]]))

    with pytest.raises(IdOutOfRange) as kept:  # after the rows of the first table got slots
        module(features)

    assert kept.value.__context__ is None
    assert [tiers.residency.num_claimed for tiers in module.tiers()] == [0, 0]
