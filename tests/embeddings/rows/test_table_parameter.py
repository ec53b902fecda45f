"""What is done to tables between steps counts: `grad`, `requires_grad`, memory, a copy."""

import pytest
import torch

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.rows.table_parameter import LedgerParameter
from recsys.embeddings.table import TableConfig
from recsys.errors import BudgetTooSmall

TABLES = [
    TableConfig(name="users", num_embeddings=8, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=40, embedding_dim=4),
]
IDS = JaggedIds.from_one_hot(["users", "goods"], torch.tensor([[0, 4, 3], [4, 4, 0]]))


# All rows take 768 bytes; tiered, there are fewer slots than goods, and more than users.
@pytest.fixture(params=[None, 600], ids=["resident", "tiered"])
def module(request):
    return build(request.param)


def build(budget):
    torch.manual_seed(0)
    module = HotColdEmbeddingBagCollection(
        TABLES, optimizer=SGD(lr=0.5), auto_apply=False, budget=budget
    )
    for _ in range(2):
        step(module)
    return module


def step(module):
    module.row_optimizer.zero_grad()
    module(IDS).values().sum().backward()
    module.row_optimizer.step()


def rows_of(module):
    return [weight.detach().clone() for weight in module.table_weights()]


def set_attribute(weight, is_asked):
    weight.requires_grad = is_asked


def call_method(weight, is_asked):
    assert weight.requires_grad_(is_asked) is weight


def detach(weight, is_asked):
    if is_asked:
        weight.requires_grad_()
    else:
        assert weight.detach_() is weight


@pytest.mark.parametrize("freeze", [set_attribute, call_method, detach])
def test_a_table_that_is_frozen_between_steps_rests_until_it_is_thawed(module, freeze):
    users, _ = module.table_weights()
    before = rows_of(module)

    freeze(users, False)
    assert not users.requires_grad
    step(module)
    frozen = rows_of(module)
    freeze(users, True)
    assert users.requires_grad
    step(module)

    assert torch.equal(frozen[0], before[0])
    assert not torch.equal(frozen[1], before[1])
    assert not torch.equal(users, before[0])


def test_a_gradient_of_another_use_is_added_behind_steps_without_one(module):
    users, _ = module.table_weights()
    before = rows_of(module)

    (module(IDS).values().sum() + 2 * users.sum()).backward()
    module.row_optimizer.step()

    expected = before[0] - 0.5 * 2
    expected[[0, 4, 3]] -= 0.5
    assert torch.allclose(users, expected, rtol=1e-6, atol=1e-6)


def test_a_table_that_was_frozen_when_its_module_was_built_gets_gradients_too():
    torch.manual_seed(0)
    bags = {
        table.name: torch.nn.EmbeddingBag(table.num_embeddings, 4, mode="sum") for table in TABLES
    }
    bags["users"].weight.requires_grad = False
    module = HotColdEmbeddingBagCollection(
        TABLES, optimizer=SGD(lr=0.5), auto_apply=False, _bags=torch.nn.ModuleDict(bags)
    )
    users, _ = module.table_weights()
    users.requires_grad = True
    step(module)
    before = rows_of(module)

    users.sum().backward()
    module.row_optimizer.step()

    assert torch.allclose(users, before[0] - 0.5)


def test_a_gradient_that_a_user_leaves_is_used_and_forgotten(module):
    users, goods = module.table_weights()
    before = rows_of(module)

    users.grad = torch.ones_like(users)
    module.row_optimizer.step()
    assert torch.allclose(users, before[0] - 0.5)
    assert torch.equal(goods, before[1])

    users.grad = torch.ones_like(users)
    module.row_optimizer.zero_grad()
    module.row_optimizer.step()
    assert torch.allclose(users, before[0] - 0.5)


@pytest.mark.parametrize("budget", [None, 250])
def test_a_table_that_nothing_updates_any_more_is_a_plain_parameter(budget):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = model[0].weight
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    assert isinstance(weight, LedgerParameter)

    recsys.restore(model)

    assert type(weight) is torch.nn.Parameter


def test_gradients_that_wait_update_tables_that_are_of_another_dtype_by_then():
    module = build(None)
    before = rows_of(module)
    module(IDS).values().sum().backward()

    for weight in module.table_weights():
        weight.data = weight.data.double()
    module.row_optimizer.step()

    users, goods = module.table_weights()
    assert torch.allclose(users[3], before[0][3].double() - 0.5)
    assert torch.allclose(goods[4], before[1][4].double() - 1)


def test_a_gradient_that_is_the_negative_of_its_memory_is_taken_for_what_it_is():
    module = build(None)
    before = rows_of(module)

    module(IDS).values().backward(torch._neg_view(torch.full((3, 8), -1.0)))
    module.row_optimizer.step()

    assert torch.allclose(module.table_weights()[0][3], before[0][3] - 0.5)


def test_bags_that_are_looked_up_one_by_one_follow_what_becomes_of_their_tables():
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.EmbeddingBag(5, 4, sparse=True) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    ids = torch.tensor([[0, 4], [4, 3]])

    def step():
        optimizer.zero_grad()
        sum(bag(ids).sum() for bag in model).backward()
        optimizer.step()

    for _ in range(2):
        step()
    before = [bag.weight.detach().clone() for bag in model]
    model[0].weight.requires_grad_(False)
    model[1].weight.data = model[1].weight.data.clone()
    step()

    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[1].weight, before[1])
    assert not torch.equal(model[2].weight, before[2])


def test_freezing_tables_on_a_budget_leaves_their_slots_alone():
    module = build(600)
    [tiers] = module.tiers()
    assert not tiers.is_exposed

    for weight in module.table_weights():
        weight.requires_grad_(False)
        weight.requires_grad = True

    assert not tiers.is_exposed


def test_a_state_dict_that_fails_leaves_the_slots_alone():
    module = build(600)
    [tiers] = module.tiers()
    module(IDS).values().sum().backward()
    module.row_optimizer.step()

    def fail(*_):
        raise RuntimeError("no room")

    module.register_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="no room"):
        module.state_dict()

    assert not tiers.is_exposed


WITHOUT_PROTOCOL = {
    "tensor": torch.tensor,
    "asarray": lambda rows: torch.asarray(rows, copy=True),
    "new_tensor": lambda rows: rows.new_tensor(rows),
    "as_subclass": lambda rows: rows.as_subclass(torch.Tensor).clone(),
    "vmap": torch.vmap(lambda row: 1 * row),
    "grad": torch.func.grad(lambda rows: rows.square().sum() / 2),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", WITHOUT_PROTOCOL)
def test_functions_that_do_not_ask_for_newer_rows_get_them_from_detach(name):
    # As the docstring of `accelerate` says; without `detach` they would get older rows.
    users, _ = build(600).table_weights()

    read = WITHOUT_PROTOCOL[name](users.detach())

    assert torch.equal(read, rows_of(build(None))[0])


def test_too_few_slots_for_a_gradient_of_another_use_lose_nothing():
    module = build(600)
    users, goods = module.table_weights()
    before = rows_of(module)
    module(IDS).values().sum().backward()
    goods.grad = torch.ones_like(goods)

    for _ in range(2):
        with pytest.raises(BudgetTooSmall, match="larger budget, or to be sparse"):
            module.row_optimizer.step()
    goods.grad = None
    module.row_optimizer.step()

    expected = before[0].clone()
    expected[[0, 4, 3]] -= 0.5
    assert torch.allclose(users, expected)
    assert torch.equal(goods, before[1])


def test_a_grad_is_read_while_the_other_table_is_of_another_dtype_already():
    module = build(None)
    users, goods = module.table_weights()
    module(IDS).values().sum().backward()

    users.data = users.data.double()

    assert goods.grad.to_dense()[[4, 0, 1]].tolist() == [[2.0] * 4, [1.0] * 4, [0.0] * 4]
    assert users.grad.dtype == torch.float64
