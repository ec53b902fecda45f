import copy
import gc
import weakref

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.table import TableConfig

TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=5, embedding_dim=8),
]
IDS = JaggedIds.from_one_hot(["users", "goods"], torch.tensor([[0, 8, 3, 3], [4, 4, 0, 2]]))


def build(optimizer, auto_apply=False):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer, auto_apply=auto_apply)


def step(module):
    module(IDS).values().square().sum().backward()
    module.row_optimizer.step()


def states_of(module):
    states = module.row_optimizer.state_dict()["state"].values()
    return {name: value for known in states for name, value in known.items()}


def test_a_run_goes_on_from_its_weights_and_its_optimizers_state(optimizer):
    module, other = build(optimizer), build(optimizer)
    for _ in range(3):
        step(module)
    other.load_state_dict(module.state_dict())
    other.row_optimizer.load_state_dict(copy.deepcopy(module.row_optimizer.state_dict()))

    for each in (module, other):
        step(each)

    for expected, found in zip(module.table_weights(), other.table_weights(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("optimizer", "shapes"),
    [
        (SGD(lr=0.5), {}),
        (Adagrad(lr=0.1), {"momentum1": (9, 4)}),
        (RowWiseAdagrad(lr=0.1), {"momentum1": (9,)}),
        (Adam(lr=0.1), {"step": (), "momentum1": (9, 4), "exp_avg_sq": (9, 4)}),
        (PartialRowWiseAdam(lr=0.1), {"step": (), "momentum1": (9, 4), "exp_avg_sq": (9,)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_has_torchrecs_names(optimizer, shapes):
    module = build(optimizer)
    step(module)

    state = module.row_optimizer.state_dict()

    tables = ["embedding_bags.users.weight", "embedding_bags.goods.weight"]
    assert state["param_groups"][0]["params"] == tables
    assert list(state["state"]) == tables
    found = {name: tuple(getattr(v, "shape", ())) for name, v in state["state"][tables[0]].items()}
    assert found == {f"users.{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda known: known.update(strangers=known.pop("embedding_bags.users.weight")),
            r"\['embedding_bags.users.weight'\] are missing",
        ),
        (
            lambda known: known["embedding_bags.users.weight"].update(
                {"users.momentum1": torch.zeros(8, 4)}
            ),
            "users.momentum1: must have 9 rows, got 8",
        ),
    ],
    ids=["tables", "rows"],
)
def test_state_of_other_tables_or_of_another_size_is_refused(change, message):
    module, other = build(Adagrad(lr=0.1)), build(Adagrad(lr=0.1))
    step(module)
    state = module.row_optimizer.state_dict()
    change(state["state"])

    with pytest.raises(ValueError, match=message):
        other.row_optimizer.load_state_dict(state)


def test_a_loaded_state_is_copied_into_the_arrays_that_are_there():
    source, module = build(Adagrad(lr=0.1)), build(Adagrad(lr=0.1))
    for _ in range(2):
        step(source)
    step(module)
    state = source.row_optimizer.state_dict()
    before = copy.deepcopy(state)
    arrays = states_of(module)

    module.row_optimizer.load_state_dict(state)

    for name, value in states_of(module).items():
        assert value is arrays[name]
        assert torch.equal(value, states_of(source)[name])
    step(module)
    for table, known in before["state"].items():
        for name, value in known.items():
            assert torch.equal(state["state"][table][name], value)


def test_a_loaded_state_is_not_kept_where_there_was_none():
    source, module = build(Adagrad(lr=0.1)), build(Adagrad(lr=0.1))
    step(source)
    before = copy.deepcopy(states_of(source))

    module.row_optimizer.load_state_dict(source.row_optimizer.state_dict())
    step(module)

    for name, value in states_of(source).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("wrong", ["rows", "tables"])
def test_a_state_that_is_refused_changes_nothing(wrong):
    module = build(Adagrad(lr=0.1))
    step(module)
    before = copy.deepcopy(module.row_optimizer.state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][0]["lr"] = 7.0
    state["state"]["embedding_bags.users.weight"]["users.momentum1"] += 1
    if wrong == "rows":
        state["state"]["embedding_bags.goods.weight"]["goods.momentum1"] = torch.zeros(4, 8)
    else:
        del state["state"]["embedding_bags.goods.weight"]

    with pytest.raises(ValueError, match=r"must have 5 rows, got 4|are missing"):
        module.row_optimizer.load_state_dict(state)

    assert module.row_optimizer.param_groups[0]["lr"] == 0.1
    for table, known in before["state"].items():
        for name, value in known.items():
            assert torch.equal(module.row_optimizer.state_dict()["state"][table][name], value)


def test_two_tables_can_swap_their_own_states():
    tables = [
        TableConfig(name=name, num_embeddings=9, embedding_dim=4) for name in ("users", "goods")
    ]
    module = HotColdEmbeddingBagCollection(tables, optimizer=Adagrad(lr=0.1), auto_apply=False)
    step(module)
    before = copy.deepcopy(states_of(module))
    users, goods = (f"embedding_bags.{name}.weight" for name in ("users", "goods"))
    state = module.row_optimizer.state_dict()
    swapped = {
        users: {"users.momentum1": state["state"][goods]["goods.momentum1"]},
        goods: {"goods.momentum1": state["state"][users]["users.momentum1"]},
    }

    module.row_optimizer.load_state_dict(state | {"state": swapped})

    assert torch.equal(states_of(module)["users.momentum1"], before["goods.momentum1"])
    assert torch.equal(states_of(module)["goods.momentum1"], before["users.momentum1"])


def test_a_scheduler_rules_the_learning_rate():
    module = build(SGD(lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(module.row_optimizer, step_size=1, gamma=0.25)
    goods = module.table_weights()[1]
    moved = []

    for _ in range(2):
        before = goods.detach().clone()
        module(IDS)["goods"][2].sum().backward()
        module.row_optimizer.step()
        schedule.step()
        moved.append((before - goods)[0, 0].item())

    assert moved == pytest.approx([1.0, 0.25])


def test_settings_are_those_of_param_groups():
    module, expected = build(Adam(lr=0.1)), build(Adam(lr=0.1, betas=(0.5, 0.6), eps=0.3))
    module.row_optimizer.param_groups[0].update(betas=(0.5, 0.6), eps=0.3)

    for each in (module, expected):
        step(each)

    for one, other in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(one, other)


def test_a_closure_is_called_before_rows_move():
    module, expected = build(SGD(lr=0.5)), build(SGD(lr=0.5))
    step(expected)

    def closure():
        loss = module(IDS).values().square().sum()
        loss.backward()
        return loss

    loss = module.row_optimizer.step(closure)

    assert loss.item() > 0
    assert torch.equal(module.table_weights()[0], expected.table_weights()[0])


def test_what_is_done_to_a_shown_gradient_counts(optimizer):
    module, expected = build(optimizer), build(optimizer)
    (0.5 * expected(IDS).values().square().sum()).backward()
    expected.row_optimizer.step()

    module(IDS).values().square().sum().backward()
    for weight in module.table_weights():
        weight.grad.mul_(0.5)
    module.row_optimizer.step()

    for one, other in zip(module.table_weights(), expected.table_weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_gradient_of_another_use_of_the_table_is_added():
    module = build(SGD(lr=1.0))
    users = module.table_weights()[0]
    before = users.detach().clone()

    (module(IDS)["users"].sum() + 3 * users.sum()).backward()
    module.row_optimizer.step()

    expected = torch.full((9,), 3.0)
    expected[[0, 8]] = 4.0
    expected[3] = 5.0
    torch.testing.assert_close((before - users)[:, 0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda gradient: torch.cat([gradient, torch.full((4, 5), torch.nan)], 1)[:, :12],
        lambda gradient: torch.cat([gradient, torch.full((4, 12), torch.nan)])[:4],
        lambda gradient: gradient.T.contiguous().T,
        lambda gradient: gradient[:1].expand(4, 12),
    ],
    ids=["room between rows", "room behind", "columns first", "one row for all"],
)
def test_gradients_are_what_they_are_however_they_lie_in_memory(lay_out):
    module, expected = build(SGD(lr=1.0)), build(SGD(lr=1.0))
    gradient = lay_out(torch.arange(48.0).view(4, 12).sin())

    for _ in range(2):
        module(IDS).values().backward(gradient)
        expected(IDS).values().backward(gradient.clone(memory_format=torch.contiguous_format))
    for each in (module, expected):
        each.row_optimizer.step()

    for one, other in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(one, other)


def test_tables_stay_the_objects_that_they_were():
    module = build(SGD(lr=1.0))

    assert all(isinstance(weight, torch.nn.Parameter) for weight in module.table_weights())
    assert type(module.state_dict()["embedding_bags.users.weight"]) is torch.Tensor


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RowWiseAdagrad(lr=0.5), r"'momentum1' .* must be \(9, 4\), got \(9,\)"),
        (
            Adam(lr=0.5),
            r"users.weight' has the arrays .*'exp_avg_sq', .*\], and those of Adagrad are",
        ),
    ],
)
def test_state_of_another_formula_is_refused_and_changes_nothing(other, message):
    source, module = build(other), build(Adagrad(lr=0.1))
    step(source)
    step(module)
    before = copy.deepcopy(module.row_optimizer.state_dict())

    with pytest.raises(ValueError, match=message):
        module.row_optimizer.load_state_dict(source.row_optimizer.state_dict())

    after = module.row_optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        (
            lambda state, users: state[users].update(momentum1=torch.zeros(9)),
            r"\(9, 4\), got \(9,\)",
        ),
        (
            lambda _, users: setattr(users, "data", torch.zeros(20, 4)),
            r"\(20, 4\), got \(9, 4\)",
        ),
    ],
    ids=["rows of one number", "a table that grew"],
)
def test_state_of_another_shape_is_refused_before_it_is_written_to(change, shapes):
    module = build(Adagrad(lr=0.1))
    step(module)
    change(module.row_optimizer.state, module.table_weights()[0])
    module(IDS).values().sum().backward()

    with pytest.raises(ValueError, match=rf"'momentum1' .*must be {shapes}"):
        module.row_optimizer.step()


@pytest.mark.parametrize("shape", [(4, 12), (4, 3, 4)])
def test_a_gradient_that_is_overwritten_before_the_step_is_noticed(shape):
    module = build(SGD(lr=1.0))
    gradient = torch.ones(shape)
    module(IDS).values().view(shape).backward(gradient)
    gradient.zero_()

    with pytest.raises(RuntimeError, match="the gradient of a lookup was overwritten"):
        module.row_optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")  # says what it costs
def test_backward_may_make_a_graph():
    module, expected = build(SGD(lr=1.0)), build(SGD(lr=1.0))
    for each, create_graph in ((module, True), (expected, False)):
        factor = torch.tensor(2.0, requires_grad=True)
        (each(IDS).values() * factor).sum().backward(create_graph=create_graph)
        factor.grad = None
        each.row_optimizer.step()

    for found, wanted in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_backward_in_a_gradient_hook_adds_to_the_pass_around_it(optimizer, fails_first):
    others = JaggedIds.from_one_hot(["users", "goods"], torch.tensor([[3, 5], [0, 1]]))

    def backward(module, *, fails=False):
        inner = module(others).values().square().sum()
        early = module(IDS).values() * 1.0

        def hook(_):
            inner.backward()
            if fails:
                raise RuntimeError("the hook fails")

        early.register_hook(hook)
        late = module(IDS).values()  # its backward runs first, the one of `early` after the hook
        (early.sum() + late.square().sum()).backward()

    module, expected = build(optimizer, auto_apply=True), build(optimizer)
    if fails_first:
        with pytest.raises(RuntimeError, match="the hook fails"):
            backward(module, fails=True)
    backward(module)
    backward(expected)
    expected.row_optimizer.step()

    for found, wanted in zip(module.table_weights(), expected.table_weights(), strict=True):
        assert torch.equal(found, wanted)


def test_hooks_of_step_run_around_it():
    module = build(SGD(lr=0.5))
    before = module.table_weights()[0].clone()
    seen = []
    module.row_optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.equal(module.table_weights()[0], before))
    )
    module.row_optimizer.register_step_post_hook(
        lambda *_: seen.append(torch.equal(module.table_weights()[0], before))
    )

    step(module)

    assert seen == [True, False]


def test_a_profiler_is_told_of_each_step():
    module = build(SGD(lr=0.5))

    with torch.profiler.profile() as profile:
        step(module)

    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#FusedOptimizer.step" in names


@pytest.mark.parametrize("is_whole", [False, True])
def test_state_that_has_taken_the_place_of_another_is_used(is_whole):
    module = build(RowWiseAdagrad(lr=0.1))
    step(module)
    users = module.table_weights()[0]
    large = {"momentum1": torch.full((9,), 1e6)}
    if is_whole:
        module.row_optimizer.state[users] = large
    else:
        module.row_optimizer.state[users] |= large

    before = users.detach().clone()
    step(module)

    assert torch.allclose(users, before, atol=1e-3)
    assert (module.row_optimizer.state[users]["momentum1"] > 1e6).any()


def test_a_rate_that_a_tensor_holds_may_be_changed_in_place():
    module = build(SGD(lr=0.5))
    [settings] = module.row_optimizer.param_groups
    settings["lr"] = torch.tensor(0.5)
    before = [weight.detach().clone() for weight in module.table_weights()]
    step(module)
    moved = [weight.detach().clone() for weight in module.table_weights()]
    settings["lr"].fill_(0.0)

    step(module)

    for weight, then, first in zip(module.table_weights(), moved, before, strict=True):
        assert torch.equal(weight, then)
        assert not torch.equal(then, first)


@pytest.mark.parametrize("is_frozen_first", [True, False])
def test_a_table_frozen_at_lookup_or_at_backward_stays_as_it_is(is_frozen_first):
    module = build(SGD(lr=0.5))
    users, goods = module.table_weights()
    before = users.detach().clone(), goods.detach().clone()
    users.requires_grad_(not is_frozen_first)
    pooled = module(IDS).values()
    users.requires_grad_(is_frozen_first)

    pooled.sum().backward()
    module.row_optimizer.step()

    assert torch.equal(users, before[0])
    assert torch.equal(goods[2], before[1][2] - 0.5)


@pytest.mark.parametrize("options", [{}, {"budget": 4000}], ids=["resident", "budget"])
def test_memory_is_free_as_soon_as_a_module_is_deleted(options):
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports much
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=1.0), **options)
    bag(torch.tensor([[1, 2]])).sum().backward()
    bag.prefetch(torch.tensor([[3, 4]]))  # for a lookup that does not come
    for residency in [each.residency for each in bag.tiers()]:
        residency.queue.settle()  # a transfer under way has the slots
        del residency
    gc.collect()
    gone = [weakref.ref(each) for each in (bag, bag.weight, bag.row_updater, bag.row_optimizer)]
    gone += [weakref.ref(each.hot) for each in bag.tiers()]
    gc.disable()
    try:
        del bag

        assert not any(each() is not None for each in gone)
    finally:
        gc.enable()


def test_an_optimizer_without_its_module_is_refused():
    optimizer = HotColdEmbeddingBag(5, 4, mode="sum", optimizer=SGD(lr=1.0)).row_optimizer

    for use in (optimizer.step, optimizer.state_dict, optimizer.zero_grad):
        with pytest.raises(RuntimeError, match="its module was deleted"):
            use()
