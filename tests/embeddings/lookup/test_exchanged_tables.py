"""Tables that get other memory, or less of the same; Parameters that replace them are refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    TableConfig,
)
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.rows.table_parameter import LedgerParameter
from recsys.errors import IdOutOfRange

ROWS = torch.arange(20.0).reshape(5, 4)
OFFSETS = torch.tensor([0])


def bag(optimizer=None):
    return HotColdEmbeddingBag(5, 4, mode="sum", _weight=ROWS.clone(), optimizer=optimizer)


def stepped_bag():
    """A bag whose rows move in `step`, and their memory."""
    own, memory = bag(SGD(lr=0.5)), ROWS.clone()
    own.row_optimizer.updater.auto_apply = False
    own.weight.data = memory
    return own, memory


def collection(optimizer=None):
    tables = [
        TableConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=("f",))
        for name in "ab"
    ]
    module = HotColdEmbeddingBagCollection(tables, optimizer=optimizer)
    for weight in module.table_weights():
        weight.data.copy_(ROWS)
    return module


def set_data(holder, rows):
    holder.weight.data = rows


@torch.no_grad()
def set_in_place(holder, rows):
    holder.weight.set_(rows)


def set_parameter(holder, rows):
    holder.weight = nn.Parameter(rows)


KEEPING = {"data": set_data, "set_": set_in_place}
each_way = pytest.mark.parametrize("exchange", KEEPING.values(), ids=KEEPING)
replaced = pytest.mark.parametrize("way", ["attribute", "load_state_dict", "functional_call"])
REFUSED = r"its Parameter was replaced.* call recsys\.restore\(model\) first"


def use_replaced(module, way, *ids):
    """Replace all Parameters, and look up."""
    rows = {name: rows.clone() for name, rows in module.state_dict().items()}
    if way == "functional_call":
        return functional_call(module, rows, ids)
    if way == "load_state_dict":
        module.load_state_dict(rows, assign=True)
    else:
        for holder in module.modules():
            if "weight" in holder._parameters:
                holder.weight = nn.Parameter(holder.weight.detach().clone())
    return module(*ids)


def put_back(module, before):
    for name, table in before.items():
        holder, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(holder), attribute, table)


@replaced
@pytest.mark.parametrize("budget", [None, 3000], ids=["resident", "tiered"])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_replaced_parameter_is_refused_by_name_until_it_is_put_back(way, budget, with_gradient):
    bag = HotColdEmbeddingBag(500, 4, mode="sum", optimizer=SGD(lr=0.5), budget=budget)
    tables = [
        TableConfig(name=name, num_embeddings=500, embedding_dim=4, feature_names=("f",))
        for name in "ab"
    ]
    whole = HotColdEmbeddingBagCollection(
        tables, optimizer=SGD(lr=0.5), budget=budget and 2 * budget
    )
    features = JaggedIds.from_one_hot(["f"], torch.tensor([[4]]))
    for module, name, ids in (
        (bag, "weight", (torch.tensor([4]), OFFSETS)),
        (whole, "a", (features,)),
    ):
        module(*ids)
        before = dict(module.named_parameters())
        rows = {key: table.detach().clone() for key, table in before.items()}

        for _ in range(2):
            with pytest.raises(ValueError, match=f"table '{name}': {REFUSED}"):  # noqa: SIM117
                with torch.set_grad_enabled(with_gradient):
                    use_replaced(module, way, *ids)
        put_back(module, before)
        pooled = module(*ids)
        (pooled if module is bag else pooled.values()).sum().backward()

        for key, table in module.named_parameters():
            assert torch.equal(table[4], rows[key][4] - 0.5)
            assert torch.equal(table[:4], rows[key][:4])


@pytest.mark.parametrize("budget", [None, 5000], ids=["resident", "tiered"])
def test_a_gradient_that_waits_updates_the_parameter_that_was_looked_up(budget):
    """As in plain PyTorch, whose optimizer has that one."""
    model = nn.ModuleList([nn.EmbeddingBag(500, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    old = model[0].weight
    before = old.detach().clone()
    model[0](torch.tensor([4]), OFFSETS).sum().backward()

    model[0].weight = nn.Parameter(before.clone())
    optimizer.step()

    assert torch.equal(model[0].weight, before)
    assert torch.equal(old[4], before[4] - 0.5)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("budget", [None, 5000], ids=["resident", "tiered"])
def test_restore_then_exchange_then_accelerate_is_the_way(budget):
    model = nn.ModuleList([nn.EmbeddingBag(500, 4, mode="sum", sparse=True)])
    recsys.accelerate(model, optimizer=SGD(lr=0.5), budget=budget)
    old = model[0].weight
    before = old.detach().clone()
    model[0](torch.tensor([4]), OFFSETS).sum().backward()
    model[0].weight = nn.Parameter(torch.ones(500, 4))
    with pytest.raises(ValueError, match=REFUSED):
        model[0](torch.tensor([4]), OFFSETS)

    recsys.restore(model)
    recsys.accelerate(model, optimizer=SGD(lr=0.25), budget=budget)
    model[0](torch.tensor([4]), OFFSETS).sum().backward()

    assert torch.equal(old[4], before[4] - 0.5)
    assert type(old) is nn.Parameter
    assert model[0].weight[4].tolist() == [0.75] * 4


def test_without_an_optimizer_of_recsys_a_parameter_may_be_replaced():
    own = collection()
    features = JaggedIds.from_one_hot(["f"], torch.tensor([[4]]))
    own(features)

    for rows in (ROWS + 1, torch.cat([ROWS, ROWS]), ROWS.double()):
        for holder in own.embedding_bags.values():
            set_parameter(holder, rows.clone())
        pooled = own(features).values()
        pooled.sum().backward()

        assert torch.equal(pooled.detach(), rows[4].repeat(2).unsqueeze(0))
        for weight in own.table_weights():
            assert weight.grad.to_dense()[4].tolist() == [1.0] * 4


def test_a_parameter_of_a_class_of_its_own_is_refused_with_an_optimizer():
    class OfTheUser(nn.Parameter):
        pass

    bag = nn.EmbeddingBag(5, 4, mode="sum")
    bag.weight = OfTheUser(ROWS.clone())
    table = TableConfig(name="a", num_embeddings=5, embedding_dim=4)

    with pytest.raises(ValueError, match=r"table 'a': weight must be a plain Parameter .* got Of"):
        HotColdEmbeddingBagCollection(
            [table], optimizer=SGD(lr=0.5), _bags=nn.ModuleDict({"a": bag})
        )


@each_way
def test_a_bags_shorter_table_at_the_same_address_has_fewer_rows(exchange):
    own = bag(SGD(lr=0.5))
    own(torch.tensor([4]), OFFSETS)

    exchange(own, own.weight.detach()[:3])

    with pytest.raises(IdOutOfRange, match=r"id 4 is not in \[0, 3\)"):
        own(torch.tensor([1, 4]), OFFSETS)
    own(torch.tensor([1, 2]), OFFSETS).sum().backward()
    assert torch.equal(own.weight.detach(), ROWS[:3] - torch.tensor([[0.0], [0.5], [0.5]]))


@each_way
@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.5)], ids=["torch's", "ours"])
def test_a_collections_shorter_table_at_the_same_address_has_fewer_rows(exchange, optimizer):
    own = collection(optimizer)
    own(JaggedIds.from_one_hot(["f"], torch.tensor([[4]])))
    holder = own.embedding_bags["b"]

    exchange(holder, holder.weight.detach()[:3])

    with pytest.raises(IdOutOfRange, match=r"id 4 is not in \[0, 3\)"):
        own(JaggedIds.from_one_hot(["f"], torch.tensor([[4]])))
    pooled = own(JaggedIds.from_one_hot(["f"], torch.tensor([[2]]))).values()
    assert torch.equal(pooled.detach(), ROWS[2].repeat(2).unsqueeze(0))


@each_way
def test_a_longer_table_at_the_same_address_has_more_rows(exchange):
    whole = ROWS.clone()
    own = bag(SGD(lr=0.5))
    exchange(own, whole[:3])
    own(torch.tensor([2]), OFFSETS)

    exchange(own, whole)

    assert own(torch.tensor([4]), OFFSETS).tolist() == [ROWS[4].tolist()]


@pytest.mark.parametrize("exchange", [set_data, set_in_place])
@pytest.mark.parametrize("when", ["before backward", "before the step"])
@pytest.mark.parametrize(
    "forget",
    [lambda own: own.row_optimizer.zero_grad(), lambda own: setattr(own.weight, "grad", None)],
    ids=["zero_grad", "set to None"],
)
def test_rows_that_a_shorter_table_lacks_are_not_moved(exchange, when, forget):
    own, memory = stepped_bag()
    pooled = own(torch.tensor([4]), OFFSETS)

    if when == "before backward":
        exchange(own, memory[:3])
    pooled.sum().backward()
    if when == "before the step":
        exchange(own, memory[:3])

    for _ in range(2):  # the gradient is there still
        with pytest.raises(ValueError, match=r"\(5, 4\) was replaced by one of shape \(3, 4\)"):
            own.row_optimizer.step()
        with pytest.raises(ValueError, match="set its grad to None"):
            own.weight.grad  # noqa: B018  # it is the ledger's
    forget(own)
    own.row_optimizer.step()
    assert torch.equal(memory, ROWS)

    own(torch.tensor([4]) - 2, OFFSETS).sum().backward()
    own.row_optimizer.step()
    assert torch.equal(memory[2], ROWS[2] - 0.5)


def test_rows_that_a_shorter_table_lacks_are_not_moved_by_a_step_that_was_refused_before():
    own, memory = stepped_bag()
    own(torch.tensor([4]), OFFSETS).sum().backward()
    assert own.weight.grad is not None  # it is a sparse tensor from now on
    [settings] = own.row_optimizer.param_groups
    settings["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr must be finite"):
        own.row_optimizer.step()
    settings["lr"] = 0.5

    own.weight.data = memory[:3]

    with pytest.raises(ValueError, match=r"\(5, 4\) was replaced by one of shape \(3, 4\)"):
        own.row_optimizer.step()
    assert torch.equal(memory, ROWS)


def accelerated(*bags, optimizer=None, **settings):
    model = nn.ModuleList(bags)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, **settings, always=True)
    return model, optimizer


def plain_bag():
    return nn.EmbeddingBag(5, 4, mode="sum", sparse=True, _weight=ROWS.clone())


def test_under_an_optimizer_of_torchs_a_shorter_tables_gradient_is_forgotten_and_no_others():
    bags = plain_bag(), plain_bag()
    optimizer = torch.optim.SGD([{"params": each.parameters(), "lr": 0.5} for each in bags])
    model, _ = accelerated(*bags, optimizer=optimizer)
    for each in model:
        each(torch.tensor([4]), OFFSETS).sum().backward()
    other, short = (each.weight for each in model)
    short.data = short.data[:3]

    for refused in (optimizer.step, lambda: recsys.restore(model), optimizer.zero_grad):
        with pytest.raises(ValueError, match=r"\(5, 4\) was replaced by one of shape \(3, 4\)"):
            refused()
        assert type(other) is LedgerParameter  # nothing was restored
        assert torch.equal(other, ROWS)  # and of the other param group no row was updated
    model[0](torch.tensor([4]), OFFSETS).sum().backward()  # zero_grad has forgotten the first
    short.grad = None
    optimizer.step()

    assert torch.equal(short, ROWS[:3])
    assert torch.equal(other[4], ROWS[4] - 0.5)
    recsys.restore(model)
    assert short.grad is None


def test_a_gradient_of_rows_that_a_table_had_is_refused():
    own, memory = stepped_bag()
    own.weight.grad = torch.ones(5, 4)

    own.weight.data = memory[:3]

    with pytest.raises(ValueError, match=r"grad of a table of shape \(3, 4\) has shape \(5, 4"):
        own.row_optimizer.step()
    own(torch.tensor([2]), OFFSETS).sum().backward()
    for _ in range(2):  # what the lookup has left is there still
        with pytest.raises(ValueError, match=r"table of shape \(3, 4\) has shape \(5, 4"):
            own.weight.grad  # noqa: B018  # it is the sum of both
    own.weight.grad = None
    own.row_optimizer.step()
    assert torch.equal(memory, ROWS)


@each_way
@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.5)], ids=["torch's", "ours"])
@pytest.mark.parametrize("dim", [3, 64])
def test_rows_of_another_dim_are_refused(exchange, optimizer, dim):
    own = collection(optimizer)
    for holder in own.embedding_bags.values():
        exchange(holder, torch.zeros(5, dim))

    with pytest.raises(
        ValueError, match=f"embedding_dim 4 were replaced by tables of embedding_dim {dim}"
    ):
        own(JaggedIds.from_one_hot(["f"], torch.tensor([[4]])))


@pytest.mark.parametrize("exchange", [set_data], ids=["data"])
@pytest.mark.parametrize("rows", [ROWS[:3], torch.zeros(7, 4), ROWS.double()])
def test_a_tiered_table_is_exchanged_for_its_equal_alone(exchange, rows):
    own = HotColdEmbeddingBag(500, 4, optimizer=SGD(lr=0.5), budget=4096)
    own(torch.tensor([499]), OFFSETS).sum().backward()

    exchange(own, rows.clone())

    with pytest.raises(ValueError, match=r"of 500 rows of torch.float32 in two tiers was repl"):
        own(torch.tensor([2]), OFFSETS)
    exchange(own, torch.zeros(500, 4))
    assert own(torch.tensor([499]), OFFSETS).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("exchange", [set_data, set_in_place, set_parameter])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_without_an_optimizer_a_gradient_is_that_of_the_rows_that_were_looked_up(
    exchange, is_sparse
):
    bags = {name: nn.EmbeddingBag(5, 4, mode="sum", sparse=is_sparse) for name in "ab"}
    tables = [
        TableConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=("f",))
        for name in "ab"
    ]
    own = HotColdEmbeddingBagCollection(tables, _bags=nn.ModuleDict(bags))
    before = own.embedding_bags["b"].weight
    pooled = own(JaggedIds.from_one_hot(["f"], torch.tensor([[4]]))).values()

    exchange(own.embedding_bags["b"], ROWS[:3].clone())
    pooled.sum().backward()

    assert before.grad.to_dense().tolist() == [[0.0] * 4] * 4 + [[1.0] * 4]


@pytest.mark.parametrize(
    ("shorten", "shapes"),
    [
        (
            lambda _, state: state.update(momentum1=state["momentum1"][:3]),
            r"\(5, 4\), got \(3, 4",
        ),
        (
            lambda weight, _: setattr(weight, "data", weight.data[:3]),
            r"\(3, 4\), got \(5, 4",
        ),
    ],
    ids=["state", "table"],
)
def test_a_state_of_another_length_at_the_same_address_is_refused(shorten, shapes):
    own = bag(Adagrad(lr=0.1))
    own(torch.tensor([4]), OFFSETS).sum().backward()

    shorten(own.weight, own.row_optimizer.state[own.weight])

    with pytest.raises(ValueError, match=f"'momentum1' of a table .* must be {shapes}"):
        own(torch.tensor([2]), OFFSETS).sum().backward()


def test_a_row_space_that_nothing_has_happened_to_is_kept():
    tables = [torch.rand(3, 4) for _ in range(3)]
    space = RowSpace(tables)

    assert space.holds(tables)
    assert space.holds([table.detach() for table in tables])  # other objects on the same rows
    assert space.are_alike(tables)
    assert not space.are_alike([tables[0], tables[1][:2], tables[2]])
    assert not space.are_alike([tables[0], tables[1].view(4, 3), tables[2]])
    assert not space.are_alike([tables[0], tables[1].view(torch.int32), tables[2]])
    assert not space.holds([tables[0], tables[1].clone(), tables[2]])


def misaligned(dtype=torch.float32):
    itemsize = dtype.itemsize
    return torch.frombuffer(bytearray(21 * itemsize), dtype=dtype, offset=1, count=20).view(5, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_that_begin_between_two_numbers_are_refused(dtype):
    rows = misaligned(dtype)

    with pytest.raises(ValueError, match=f"must begin at a multiple of {dtype.itemsize} bytes"):
        HotColdEmbeddingBag(5, 4, _weight=rows, optimizer=SGD(lr=0.1))


def test_accelerate_names_the_table_whose_rows_begin_between_two_numbers():
    model = nn.ModuleDict(
        {"a": nn.EmbeddingBag(5, 4), "b": nn.EmbeddingBag(5, 4, _weight=misaligned())}
    )

    with pytest.warns(UserWarning, match="table 'b': rows must begin at a multiple of 4 bytes"):
        recsys.accelerate(model)

    assert type(model["b"]) is nn.EmbeddingBag


def test_from_torchrec_names_the_table_whose_rows_begin_between_two_numbers():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    config = torchrec.EmbeddingBagConfig(
        name="a", num_embeddings=5, embedding_dim=4, feature_names=["f"]
    )
    theirs = torchrec.EmbeddingBagCollection([config])
    theirs.embedding_bags["a"].weight = nn.Parameter(misaligned())

    with pytest.raises(ValueError, match="table 'a': rows must begin at a multiple of 4 bytes"):
        HotColdEmbeddingBagCollection.from_torchrec(theirs)


def test_state_that_begins_between_two_numbers_is_refused():
    own = bag(Adagrad(lr=0.1))
    own.row_optimizer.state[own.weight]["momentum1"] = misaligned()

    with pytest.raises(ValueError, match="must begin at a multiple of 4 bytes"):
        own(torch.tensor([4]), OFFSETS).sum().backward()


def test_a_grad_is_deleted_as_of_any_parameter():
    model, optimizer = accelerated(plain_bag())
    weight = model[0].weight
    model[0](torch.tensor([4]), OFFSETS).sum().backward()

    del weight.grad
    assert weight.grad is None
    optimizer.step()

    assert torch.equal(weight, ROWS)


def test_a_gradient_that_was_overwritten_is_said_once():
    model, optimizer = accelerated(plain_bag())
    ids, gradient = torch.tensor([4, 2]), torch.ones(2, 4)
    model[0](ids, torch.tensor([0, 1])).backward(gradient)

    gradient.fill_(7)
    ids = torch.tensor([1])

    with pytest.raises(RuntimeError, match="was overwritten after its backward"):
        optimizer.step()
    model[0](ids, OFFSETS).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight[[1, 4]], ROWS[[1, 4]] - torch.tensor([[0.5], [0.0]]))


def test_a_table_frozen_between_its_lookup_and_its_backward_gets_no_gradient():
    plain = nn.ModuleList([plain_bag(), plain_bag()])
    model, _ = accelerated(plain_bag(), plain_bag())

    for each in (plain, model):
        pooled = [bag(torch.tensor([4]), OFFSETS) for bag in each]
        weights = [bag.weight for bag in each]
        weights[0].requires_grad = False
        sum(pooled).sum().backward()
        assert weights[0].grad is None
        assert weights[1].grad.to_dense()[4].tolist() == [1.0] * 4
