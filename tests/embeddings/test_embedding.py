"""`HotColdEmbedding` beside `nn.Embedding`."""

import copy
import inspect
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recsys
from recsys.embeddings import SGD, Adagrad, Adam, HotColdEmbedding, HotColdEmbeddingBag
from recsys.errors import IdOutOfRange
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline
from tests.embeddings.test_bag import backward

pytestmark = pytest.mark.filterwarnings("ignore:tables .* were used in cold memory")
NUM_ROWS, NUM_USED = 30, 7
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
}
SHAPES = st.sampled_from([(), (0,), (3,), (1, 1), (2, 3), (0, 2), (4, 0), (2, 2, 2)])
OPTIMIZED = {"optimizer": SGD(lr=1.0), "auto_apply": False}


@st.composite
def inputs(draw):
    shape = draw(SHAPES)
    total = torch.Size(shape).numel()
    ids = draw(st.lists(st.integers(0, NUM_USED - 1), min_size=total, max_size=total))
    flat = torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    found = flat.view(shape)
    return found.t() if len(shape) == 2 and draw(st.booleans()) else found


@st.composite
def settings_of_modules(draw):
    return {
        "padding_idx": draw(st.sampled_from([None, 0, 3, -1, -NUM_ROWS])),
        "sparse": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
    }


def both(settings, **ours):
    torch.manual_seed(0)
    plain = nn.Embedding(NUM_ROWS, 3, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "budget=")
        own = HotColdEmbedding(NUM_ROWS, 3, **settings, **ours)
    own.load_state_dict(plain.state_dict())
    return plain, own


def room_for(num_slots, row_bytes):
    """A budget: for so many slots and the row map."""
    return 4 * NUM_ROWS + num_slots * (row_bytes + 11)


each_kind = pytest.mark.parametrize(
    ("theirs", "ours"),
    [(nn.Embedding, HotColdEmbedding), (nn.EmbeddingBag, HotColdEmbeddingBag)],
    ids=["embedding", "bag"],
)


@each_kind
@pytest.mark.parametrize("name", ["__init__", "forward", "from_pretrained"])
def test_arguments_are_torchs_in_its_order_and_ours_behind_them_by_name(theirs, ours, name):
    theirs, ours = (
        list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (theirs, ours)
    )

    shared, own = ours[: len(theirs)], ours[len(theirs) :]

    assert [(p.name, p.default, p.kind) for p in shared] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own)


@each_kind
@pytest.mark.parametrize("optimizer", [None, SGD(lr=1.0)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_same_rows_are_drawn_from_the_same_seed(theirs, ours, dtype, optimizer):
    torch.manual_seed(0)
    plain = theirs(NUM_ROWS, 3, padding_idx=2, dtype=dtype)
    torch.manual_seed(0)
    own = ours(NUM_ROWS, 3, padding_idx=2, dtype=dtype, optimizer=optimizer)

    assert torch.equal(own.weight, plain.weight)
    assert own.weight.dtype == plain.weight.dtype
    assert own.weight[2].tolist() == [0, 0, 0]


@each_kind
def test_it_is_a_module_of_torchs_kind_that_says_so(theirs, ours):
    settings = {"padding_idx": -1, "sparse": True}

    module = ours(5, 3, **settings, optimizer=SGD(lr=0.1))

    assert isinstance(module, theirs)
    assert repr(module) == "HotCold" + repr(theirs(5, 3, **settings))
    assert list(module.state_dict()) == ["weight"]


@pytest.mark.parametrize("kind", ["torch's", "resident", "tiered"])
@given(inputs(), settings_of_modules())
def test_result_and_gradient_are_those_of_torchs_module(kind, ids, settings):
    if not ids.dim():
        settings = settings | {"sparse": False}  # torch's backward fails
    ours = {} if kind == "torch's" else OPTIMIZED
    if kind == "tiered":
        ours = ours | {"budget": room_for(3, 3 * settings["dtype"].itemsize)}
    plain, own = both(settings, **ours)

    expected, found = (backward(module, ids) for module in (plain, own))

    tolerance = TOLERANCES[settings["dtype"]]
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(own.weight.detach(), plain.weight.detach(), **tolerance)
    gradient = own.weight.grad
    if gradient is None:  # torch leaves zeros where nothing asks for a gradient
        gradient = torch.zeros_like(plain.weight)
    else:
        assert gradient.is_sparse == settings["sparse"]
    torch.testing.assert_close(gradient.to_dense(), plain.weight.grad.to_dense(), **tolerance)


@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)])
def test_steps_are_those_of_torchs_module_and_optimizer(optimizer, padding_idx, is_tiered):
    kinds = {SGD: torch.optim.SGD, Adagrad: torch.optim.Adagrad, Adam: torch.optim.SparseAdam}
    row_bytes = 12 * (1 + len(optimizer.state_sizes(3)))
    budget = room_for(3, row_bytes) if is_tiered else None
    settings = {"padding_idx": padding_idx, "sparse": True}
    plain, own = both(settings, optimizer=optimizer, budget=budget)
    theirs = kinds[type(optimizer)](plain.parameters(), lr=0.1)

    for ids in torch.tensor(
        [[[1, 2], [2, 1]], [[5, 6], [6, 6]], [[2, 2], [2, 2]], [[1, 0], [2, 0]]]
    ):
        theirs.zero_grad()
        for module in (plain, own):
            module(ids).square().sum().backward()
        theirs.step()
        torch.testing.assert_close(own.weight.detach(), plain.weight.detach())


def test_a_padding_row_is_looked_up_and_never_moves():
    own = HotColdEmbedding(5, 2, padding_idx=1, optimizer=SGD(lr=1.0))
    with torch.no_grad():
        own.weight[1] = torch.tensor([3.0, 4.0])

    found = own(torch.tensor([1, 0, 1]))
    found.sum().backward()

    assert found[0].tolist() == found[2].tolist() == [3.0, 4.0]
    assert own.weight[1].tolist() == [3.0, 4.0]


class Tied(nn.Module):
    """Two embeddings of one table; in the first, a row of it is padding."""

    def __init__(self):
        super().__init__()
        self.history = nn.Embedding(40, 3, padding_idx=1, sparse=True)
        self.item = nn.Embedding(40, 3, sparse=True)
        self.item.weight = self.history.weight

    def forward(self, ids):
        return (self.history(ids).sum(1) * self.item(ids[:, 0])).sum()


@pytest.mark.parametrize("budget", [None, 40 * 4 + 14 * 32])
def test_a_row_that_is_padding_in_one_of_two_embeddings_is_trained_by_the_other(budget):
    torch.manual_seed(0)
    plain = Tied()
    own = copy.deepcopy(plain)
    theirs, ours = (torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (plain, own))
    recsys.accelerate(own, optimizer=ours, budget=budget, always=True)
    generator = torch.Generator().manual_seed(0)

    for _ in range(12):
        ids = (torch.rand(4, 3, generator=generator) ** 3 * 40).long()
        for model, optimizer in ((plain, theirs), (own, ours)):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
        assert torch.equal(own.history(ids), own.item(ids))

    torch.testing.assert_close(own.item.weight.detach(), plain.item.weight.detach())


@pytest.mark.parametrize("budget", [None, 400 * 4 + 10 * 32])
def test_a_padding_row_gets_no_gradient(budget):
    own = HotColdEmbedding(
        400, 4, padding_idx=3, optimizer=SGD(lr=1.0), auto_apply=False, budget=budget
    )

    def look_up():
        own(torch.tensor([[3, 1], [2, 3]])).sum().backward()

    look_up()
    gradient = own.weight.grad.to_dense()
    assert gradient.sum(1).nonzero().flatten().tolist() == [1, 2]
    own.weight.grad = None
    before = own.weight.detach().clone()
    look_up()
    own.row_optimizer.step()

    changed = (own.weight.detach() != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        (torch.tensor([0, 39]), r"sample 1: id 39"),
        (torch.tensor([[0, 1], [-1, 39]]), r"input\[1, 0\]: id -1"),
        (torch.tensor([[[0], [1]], [[2], [39]]]), r"input\[1, 1, 0\]: id 39"),
        (torch.tensor(38), r"input: id 38"),
    ],
)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_an_id_that_is_no_row_is_named_with_its_place(ids, place, padding_idx):
    module = HotColdEmbedding(NUM_ROWS, 3, padding_idx=padding_idx, optimizer=SGD(lr=1.0))

    with pytest.raises(IdOutOfRange, match=place):
        module(ids)


def test_pretrained_rows_are_shared_and_frozen_unless_told_otherwise():
    rows = torch.arange(6.0).view(3, 2)

    frozen = HotColdEmbedding.from_pretrained(rows, padding_idx=1)
    with pytest.warns(UserWarning, match="freezes the rows by default: .*; pass freeze=False"):
        HotColdEmbedding.from_pretrained(rows, optimizer=SGD(lr=1.0))
    moved = HotColdEmbedding.from_pretrained(rows, freeze=False, optimizer=SGD(lr=1.0))
    moved(torch.tensor([[2]])).sum().backward()

    assert not frozen.weight.requires_grad
    assert frozen.padding_idx == 1
    assert rows.tolist() == [[0, 1], [2, 3], [3, 4]]


def test_frozen_rows_stay():
    module = HotColdEmbedding(3, 2, _freeze=True, optimizer=SGD(lr=1.0))
    before = module.weight.detach().clone()

    found = module(torch.tensor([[2]]))

    assert not found.requires_grad
    assert torch.equal(module.weight, before)


def test_a_module_of_torchs_is_taken_over_with_its_settings_and_parameter():
    plain = nn.Embedding(5, 3, padding_idx=2, sparse=True)

    own = HotColdEmbedding.from_torch(plain, optimizer=SGD(lr=1.0))

    assert own.weight is plain.weight
    assert repr(own) == "HotCold" + repr(plain)
    with pytest.raises(ValueError, match="already updated by another recsys optimizer"):
        HotColdEmbedding.from_torch(plain, optimizer=SGD(lr=1.0))


# torch.compile looks at `grad` of every tensor, and hides the warning that this gives.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.1)])
def test_a_compiled_model_computes_the_same(optimizer):
    module = HotColdEmbedding(5, 3, optimizer=optimizer)
    ids = torch.tensor([[1, 2], [0, 4]])

    found = torch.compile(lambda ids: module(ids) * 2, backend="eager")(ids)

    assert torch.equal(found, module(ids) * 2)


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.history = HotColdEmbedding(400, 4, padding_idx=0, **settings)
        self.top = nn.Linear(4, 1)

    def forward(self, batch):
        logits = self.top(self.history(batch).mean(1)).squeeze(1)
        return logits.square().mean(), logits


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(depth=2), Hotline(learning_steps=4)])
def test_schedules_fetch_sequences_of_ids_ahead_and_change_nothing(schedule):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.rand(8, 5, generator=generator) ** 6 * 400).long() for _ in range(30)]
    found = []
    for settings, its_schedule in (({}, Sequential()), ({"budget": "9KiB"}, schedule)):
        torch.manual_seed(0)
        model = Model(optimizer=Adagrad(lr=0.1), **settings)
        dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
        pipeline = TrainPipeline(
            model, dense, schedule=its_schedule, ids=lambda batch: {"history": batch}
        )
        losses = [loss.item() for loss, _ in pipeline.steps(batches)]
        if isinstance(its_schedule, Hotline):
            assert pipeline.popular_split.num_split > 0
        found.append((torch.tensor(losses), model.history.weight.detach().clone()))

    exact = not isinstance(schedule, Hotline)  # parts of a mini-batch are summed in another order
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if exact else {}))


def test_accelerate_exchanges_embeddings_and_restore_puts_them_back():
    model = nn.Sequential(nn.Embedding(50, 4, padding_idx=1), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    original = model[0]
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))

    result = recsys.accelerate(model, optimizer=ours, always=True)
    for each, optimizer in ((model, ours), (plain, theirs)):
        for seed in range(3):
            ids = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            each(ids).square().sum().backward()
            optimizer.step()

    assert type(model[0]) is HotColdEmbedding
    assert list(result.replacements.values()) == ["HotColdEmbedding"]
    torch.testing.assert_close(model[0].weight.detach(), plain[0].weight.detach())
    recsys.restore(model)
    assert model[0] is original
