"""Tiered tables compute what resident ones do, to the last bit."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.kernels.cpu.slot_arrays import DIRTY
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tiers import residency
from recsys.errors import BudgetTooSmall, IdOutOfRange, ProfileError

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
TABLES = [
    TableConfig(name="users", num_embeddings=300, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=260, embedding_dim=4, feature_names=("goods", "seen")),
    TableConfig(name="pages", num_embeddings=270, embedding_dim=8, feature_names=("seen",)),
    TableConfig(name="likes", num_embeddings=250, embedding_dim=4, feature_names=("seen",)),
]
FEATURES = ["users", "goods", "seen"]
BUDGET = 12_000  # of 21 KiB of rows, without state


def build(optimizer, budget=None, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer, budget=budget, **options)


def pair(optimizer, budget=BUDGET, **options):
    """The same module twice: resident, and tiered."""
    state = {Adagrad: 8000, Adam: 16_000, PartialRowWiseAdam: 10_000}.get(type(optimizer), 2000)
    return build(optimizer, **options), build(optimizer, budget + state, **options)


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


def require_equal(resident, tiered):
    for expected, found in zip(resident.table_weights(), tiered.table_weights(), strict=True):
        assert torch.equal(found, expected)
    states = [module.row_optimizer.state_dict()["state"] for module in (resident, tiered)]
    for table, expected in states[0].items():
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(states[1][table][name]), torch.as_tensor(value))


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


def test_rows_of_16_bits_are_rounded_by_their_row_not_by_their_slot():
    tables = [
        TableConfig(name="users", num_embeddings=200, embedding_dim=4, data_type="bf16"),
    ]
    modules = []
    for budget in (None, 2000):
        torch.manual_seed(0)
        modules.append(
            HotColdEmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(lr=0.1), budget=budget)
        )
    generator = torch.Generator().manual_seed(0)

    for _ in range(60):
        ids = JaggedIds.from_one_hot(["users"], torch.randint(0, 200, (1, 16), generator=generator))
        for module in modules:
            module(ids).values().square().sum().backward()

    require_equal(*modules)


@settings(max_examples=min(100, 2 * settings().max_examples))
@given(st.data(), st.sampled_from(OPTIMIZERS))
def test_whatever_is_done_between_two_steps_the_two_stay_equal(data, optimizer):
    resident, tiered = pair(optimizer, auto_apply=False)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))

    def both(act):
        for module in (resident, tiered):
            act(module)

    num_steps, num_kept = data.draw(st.integers(1, 12)), 0
    for _ in range(num_steps):
        what = data.draw(st.sampled_from(WHAT))
        if what == "accumulate" and num_kept == 3:  # more would not fit the slots
            what = "train"
        num_kept = {"accumulate": num_kept + 1, "train": 0, "zero": 0}.get(what, num_kept)
        ids = batch(generator)
        if what == "train":
            both(lambda module, ids=ids: backward(module, ids))
        elif what == "accumulate":
            both(lambda module, ids=ids: module(ids).values().square().sum().backward())
        elif what == "evaluate":
            with torch.no_grad():
                assert torch.equal(resident(ids).values(), tiered(ids).values())
        elif what == "drop":
            both(lambda module, ids=ids: module(ids))
        elif what == "write":
            with torch.no_grad():
                both(lambda module: module.table_weights()[0].mul_(0.5))
        elif what == "write unseen":
            both(lambda module: module.table_weights()[1].detach().numpy().__imul__(0.5))
        elif what == "look":
            assert torch.equal(resident.table_weights()[2][7], tiered.table_weights()[2][7])
        elif what == "clip":
            both(clip)
        elif what == "zero":
            both(lambda module: module.row_optimizer.zero_grad())
        elif what == "fail":
            both(fail)
        elif what == "reload":
            both(lambda module: module.load_state_dict(copy.deepcopy(module.state_dict())))
        elif what == "reload state":
            both(reload_state)
    both(lambda module: module.row_optimizer.step())
    require_equal(resident, tiered)


WHAT = [
    "train",
    "accumulate",
    "evaluate",
    "drop",
    "write",
    "write unseen",
    "look",
    "clip",
    "zero",
    "fail",
    "reload",
    "reload state",
]


def backward(module, ids):
    module(ids).values().square().sum().backward()
    module.row_optimizer.step()


def clip(module):
    for table in module.table_weights():
        if table.grad is not None:
            table.grad = table.grad.coalesce() * 0.5


def fail(module):
    outside = JaggedIds.from_one_hot(FEATURES, torch.full((3, 2), 10_000))
    with pytest.raises(IdOutOfRange, match="feature 'users', sample 0: id 10000"):
        module(outside)


def reload_state(module):
    state = copy.deepcopy(module.row_optimizer.state_dict())
    module.row_optimizer.load_state_dict(state)


@each_optimizer
def test_a_state_loaded_in_place_is_taken_into_slots_anew(optimizer):
    modules = pair(optimizer)
    train(modules, 5)
    states = [copy.deepcopy(module.row_optimizer.state_dict()) for module in modules]
    train(modules, 20, seed=1)
    generator = torch.Generator().manual_seed(2)
    ids = batch(generator)

    losses = [module(ids).values().square().sum() for module in modules]  # holds rows in slots
    for module, state in zip(modules, states, strict=True):
        module.row_optimizer.load_state_dict(state)
    for loss in losses:
        loss.backward()
    train(modules, 20, seed=3)

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

    with off():
        for _ in range(5):
            ids = batch(generator)
            assert torch.equal(tiered(ids).values(), resident(ids).values())

    assert [(tiers.residency.counts, num_dirty(tiers)) for tiers in tiers_of(tiered)] == before
    assert all(dirty > 0 for _, dirty in before)
    train([resident, tiered], 5, seed=1)
    require_equal(resident, tiered)


def test_evaluation_heeds_what_others_have_written_to_rows_in_slots():
    modules = pair(SGD(lr=0.5))
    generator = torch.Generator().manual_seed(0)
    ids = batch(generator)
    for module in modules:
        backward(module, ids)
        for table in module.table_weights():
            table.detach().numpy()[:] *= 0.5

    with torch.no_grad():
        assert torch.equal(*(module(ids).values() for module in modules))


def test_evaluation_may_need_more_rows_than_there_are_slots():
    resident, tiered = pair(SGD(lr=0.5))
    train([resident, tiered], 5)
    ids = JaggedIds.from_one_hot(FEATURES, torch.arange(250).repeat(3, 1))

    with torch.no_grad():
        assert torch.equal(tiered(ids).values(), resident(ids).values())


def test_evaluation_between_forward_and_backward_changes_nothing():
    modules = pair(Adagrad(lr=0.1))
    train(modules, 5)
    generator = torch.Generator().manual_seed(9)
    ids, others = batch(generator), batch(generator)
    losses = [module(ids).values().square().sum() for module in modules]

    with torch.no_grad():
        assert torch.equal(*(module(others).values() for module in modules))
    for loss in losses:
        loss.backward()

    with torch.no_grad():
        assert torch.equal(*(module(ids).values() for module in modules))
    require_equal(*modules)


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


def test_a_mini_batch_larger_than_the_budget_is_refused_with_the_floor_named():
    tables = [TableConfig(name="users", num_embeddings=1000, embedding_dim=4)]
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget=4000 + 10 * 24)
    ids = JaggedIds.from_one_hot(["users"], torch.arange(11).unsqueeze(0))

    with pytest.raises(BudgetTooSmall, match="take 4264 bytes, and the budget is 4240"):
        module(ids)

    module(JaggedIds.from_one_hot(["users"], torch.arange(10).unsqueeze(0)))


def test_a_budget_without_an_optimizer_is_refused():
    with pytest.raises(ValueError, match="give optimizer=, too"):
        HotColdEmbeddingBagCollection(TABLES, budget="1KiB")


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


def test_rows_of_a_plan_stay_in_their_slots():
    tables = [TableConfig(name="users", num_embeddings=400, embedding_dim=4)]
    popular = torch.tensor([7, 3, 390])
    profile = PopularityProfile({"users": 400})
    profile.add(JaggedIds.from_one_hot(["users"], popular.repeat(50).unsqueeze(0)))
    plan = plan_hot_rows(profile, tables, 4 * 400 + 24 * 11, SGD(lr=0.1), window_lookups=8)
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), plan=plan)

    for start in range(0, 320, 8):
        others = torch.arange(start, start + 8)
        module(JaggedIds.from_one_hot(["users"], others.unsqueeze(0))).values().sum().backward()
    before = tiers_of(module)[0].residency.counts
    module(JaggedIds.from_one_hot(["users"], popular[:2].unsqueeze(0)))
    after = tiers_of(module)[0].residency.counts

    assert plan.num_pinned == 3
    assert after.num_hits - before.num_hits == 2


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
    ("make", "state_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5), 0),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), 16),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), 32),
    ],
    ids=["SGD", "Adagrad", "SparseAdam"],
)
def test_a_model_accelerated_with_a_budget_is_that_without(make, state_bytes):
    runs = []
    for budget in (None, 4 * 900 + 160 * (24 + state_bytes)):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum", sparse=True) for _ in range(3)])
        optimizer = make(list(model.parameters()))
        recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
        runs.append((model, optimizer))
    generator = torch.Generator().manual_seed(0)

    for step in range(20):
        ids = torch.randint(0, 300, (3, 8, 2), generator=generator)
        for number, (model, optimizer) in enumerate(runs):
            sum(bag(each).square().sum() for bag, each in zip(model, ids, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10 and number:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert runs[1][0][0].tiers()[0].residency.counts.num_written_back > 0
    for expected, found in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(found, expected)
    states = [optimizer.state_dict()["state"] for _, optimizer in runs]
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(states[1][number][name]), torch.as_tensor(value))
    recsys.restore(runs[1][0])
    assert type(next(runs[1][0].parameters())) is nn.Parameter
    assert torch.equal(*(next(model.parameters()) for model, _ in runs))


def test_what_cannot_be_kept_in_the_budget_leaves_the_model_as_it_was():
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(BudgetTooSmall, match="1224"):
        recsys.accelerate(model, optimizer=optimizer, budget=1000)

    assert type(model[0]) is nn.EmbeddingBag


def test_an_optimizer_that_moves_other_rows_too_is_refused_with_the_way_out():
    model = nn.ModuleList([nn.EmbeddingBag(300, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with pytest.raises(ValueError, match="momentum"):
        recsys.accelerate(model, optimizer=optimizer, budget="4KiB")

    assert type(model[0]) is nn.EmbeddingBag
