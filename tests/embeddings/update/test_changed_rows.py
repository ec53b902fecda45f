"""The record of changed rows: every change is marked, whoever makes it."""

import copy
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import Adagrad, RowWiseAdagrad
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.table import TableConfig
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
    found = taken(saved)
    # The caller may write to a view of a tiered table until the next lookup.
    assert found == [[6]] or (budget and is_taken_at_once)
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


def test_padding_is_not_missing_from_the_rows():
    module = bag(padding_idx=0)
    saved = tracked(module)
    look_up(module, [0, 5, 8])
    assert {5, 8} <= set(listed(saved.take_changed())[0])


@pytest.mark.filterwarnings("ignore:table .* gradient has all rows")
def test_a_gradient_that_the_caller_sets_marks_its_rows():
    module = bag(auto_apply=False)
    saved = tracked(module)
    gradient = torch.zeros(200, 4)
    gradient[[2, 150]] = 1
    module.weight.grad = gradient
    module.row_optimizer.step()
    assert listed(saved.take_changed()) == [[2, 150]]


# Sizes of tables, and what a budget needs to be so that some rows do not fit.
COLLECTION, BUDGET = [150, 40, 1, 90], 5000
KINDS = ["resident", "host", "file"]


def collection(kind, folder, optimizer):
    options = {} if kind.startswith("resident") else {"budget": BUDGET}
    if kind == "file":
        options |= {"cold_tier": "file", "cold_path": folder}
    torch.manual_seed(0)
    tables = [
        TableConfig(name=f"t{n}", num_embeddings=size, embedding_dim=4, feature_names=[f"f{n}"])
        for n, size in enumerate(COLLECTION)
    ]
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **options)


def features(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(COLLECTION), 3), generator=generator)
    values = [
        torch.randint(0, size, (int(count.sum()),), generator=generator)
        for size, count in zip(COLLECTION, lengths, strict=True)
    ]
    offsets = nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    keys = [f"f{number}" for number in range(len(COLLECTION))]
    return JaggedIds(keys, torch.cat(values), offsets=offsets)


def train(module, seed):
    module(features(seed)).values().square().sum().backward()


def evaluate(module, seed):
    with torch.no_grad():
        module(features(seed))


def fetch_ahead(module, seed):
    module.prefetch(features(seed))


def write_rows(module, seed):
    table = module.table_weights()[seed % len(COLLECTION)]
    with torch.no_grad():
        table[: seed % 7].add_(1)


def write_data(module, seed):
    module.table_weights()[seed % len(COLLECTION)].data[seed % 5 :].mul_(2)


def load_rows(module, seed):
    state = {key: value.clone() for key, value in module.state_dict().items()}
    state[list(state)[seed % len(state)]][0] += 1
    module.load_state_dict(state)


def write_state(module, seed):
    states = list(module.row_optimizer.state_dict()["state"].values())
    for array in states[seed % len(states)].values() if states else ():
        array[: seed % 7] += 1


def load_state(module, seed):
    state = module.row_optimizer.state_dict()
    states = {
        key: {name: array + seed % 2 for name, array in each.items()}
        for key, each in state["state"].items()
    }
    module.row_optimizer.load_state_dict({**state, "state": states})


ACTIONS = [train, evaluate, fetch_ahead, write_rows, write_data, load_rows, write_state, load_state]


def rows_and_state(saved):
    """A copy of each table: its rows beside their state."""
    saved.flush()
    copies = []
    for table in saved.tables:
        arrays = [table.read("weight", 0, table.num_rows)]
        arrays += [table.read(name, 0, table.num_rows) for name in table.state()]
        columns = [array.reshape(table.num_rows, -1) for array in arrays]
        if len(columns) == 1:  # state of a table that was never updated is zeros
            columns.append(torch.zeros(table.num_rows, 4))
        copies.append(torch.cat([each[:, :4] for each in columns], 1))
    return copies


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=min(40, settings().max_examples))
@given(
    st.lists(
        st.tuples(st.sampled_from([*ACTIONS, train, train, None]), st.integers(0, 10**6)),
        min_size=1,
        max_size=12,
    )
)
def test_every_row_that_differs_is_marked(kind, actions):
    with tempfile.TemporaryDirectory() as folder:
        module = collection(kind, folder, Adagrad(lr=0.1))
        saved = tracked(module)
        before = rows_and_state(saved)
        marked = [set() for _ in before]
        for action, seed in [*actions, (None, 0)]:
            if action is not None:
                action(module, seed)
                continue
            now = rows_and_state(saved)
            bits = saved.take_changed()
            for table, (old, new, rows) in enumerate(zip(before, now, bits, strict=True)):
                marked[table] = set(rows_of(rows).tolist())
                differing = (old != new).any(1).nonzero().flatten().tolist()
                assert set(differing) <= marked[table]
            before = now
        del module, saved


@pytest.mark.parametrize("kind", KINDS)
def test_updates_mark_no_other_rows(kind, tmp_path):
    module = collection(kind, tmp_path / "cold", RowWiseAdagrad(lr=0.1))
    train(module, 0)
    saved = tracked(module)
    for seed in (1, 2, 3):
        train(module, seed)
    found = taken(saved)
    for table in range(len(COLLECTION)):
        looked_up = set()
        for seed in (1, 2, 3):
            inputs = features(seed)
            begin, end = inputs.offsets()[[3 * table, 3 * table + 3]].tolist()
            looked_up |= set(inputs.values()[begin:end].tolist())
        assert found[table] == sorted(looked_up)


def test_a_copy_of_a_module_has_no_record():
    module = bag()
    saved = tracked(module)
    look_up(copy.deepcopy(module), [4])
    assert listed(saved.take_changed()) == [[]]
