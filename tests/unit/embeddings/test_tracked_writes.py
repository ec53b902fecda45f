"""The record of changed rows: every change is marked, whoever makes it."""

import copy

import pytest
import torch

from recsys.embeddings import Adagrad, HotColdEmbeddingBag
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.update.changed_rows import rows_of


def listed(bits):
    return [rows_of(of_table).tolist() for of_table in bits]


def tracked(module):
    saved = SavedTables(module)
    saved.track()
    return saved


def taken(saved):
    saved.flush()
    return listed(saved.take_changed())


def bag(**options):
    torch.manual_seed(0)
    return HotColdEmbeddingBag(200, 4, mode="sum", optimizer=Adagrad(lr=0.1), **options)


def look_up(module, ids):
    module(torch.tensor([ids])).square().sum().backward()


WRITES = {
    "in place": lambda module: module.weight.detach().mul_(2),
    "to a view": lambda module: module.weight.detach()[5:7].zero_(),
    "load_state_dict": lambda module: module.load_state_dict({"weight": torch.ones(200, 4)}),
    "reset_parameters": lambda module: module.reset_parameters(),
    "data": lambda module: module.weight.data.mul_(2),
    "numpy of data": lambda module: module.weight.data.numpy().fill(3),
    "another data": lambda module: setattr(module.weight, "data", torch.ones(200, 4)),
    "state in place": lambda module: module.row_optimizer.state_dict()["state"]["weight"][
        "momentum1"
    ].add_(1),
    "another state": lambda module: module.row_optimizer.state[module.weight].update(
        momentum1=torch.ones(200, 4)
    ),
    "state by load_state_dict": lambda module: module.row_optimizer.load_state_dict(
        {
            "state": {"weight": {"momentum1": torch.ones(200, 4)}},
            "param_groups": module.row_optimizer.state_dict()["param_groups"],
        }
    ),
}


@pytest.mark.parametrize("budget", [None, 6000], ids=["resident", "tiered"])
@pytest.mark.parametrize("is_taken_at_once", [True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_is_no_update_marks_the_table(write, budget, is_taken_at_once):
    module = bag(budget=budget)
    look_up(module, [1, 2])
    saved = tracked(module)
    look_up(module, [3, 4])
    assert taken(saved) == [[3, 4]]
    with torch.no_grad():
        if budget and write is WRITES["another data"]:
            pytest.skip("the memory of a table with a budget is fixed")
        write(module)
    if not is_taken_at_once:
        look_up(module, [5])
    assert taken(saved) == [list(range(200))]
    look_up(module, [6])
    # The caller may write to a view of a tiered table until the next lookup.
    assert taken(saved) == [[6]] or (budget and is_taken_at_once)
    look_up(module, [7])
    assert taken(saved) == [[7]]


@pytest.mark.parametrize("budget", [None, 6000], ids=["resident", "tiered"])
def test_the_first_state_of_a_table_does_not_mark_it(budget):
    module = bag(budget=budget)
    saved = tracked(module)
    look_up(module, [3, 4])
    assert taken(saved) == [[3, 4]]


def test_state_that_is_loaded_into_a_new_table_marks_it():
    trained, module = bag(), bag()
    look_up(trained, [3, 4])
    saved = tracked(module)
    module.row_optimizer.load_state_dict(trained.row_optimizer.state_dict())
    assert listed(saved.take_changed()) == [list(range(200))]


@pytest.mark.filterwarnings("ignore:table .* gradient has all rows")
def test_a_gradient_that_the_caller_sets_marks_its_rows():
    module = bag(auto_apply=False)
    saved = tracked(module)
    gradient = torch.zeros(200, 4)
    gradient[[2, 150]] = 1
    module.weight.grad = gradient
    module.row_optimizer.step()
    assert listed(saved.take_changed()) == [[2, 150]]


def test_a_copy_of_a_module_has_no_record():
    module = bag()
    saved = tracked(module)
    look_up(copy.deepcopy(module), [4])
    assert listed(saved.take_changed()) == [[]]
