"""`HotColdEmbedding` beside `nn.Embedding`."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsys.embeddings import SGD, HotColdEmbedding, HotColdEmbeddingBag
from recsys.errors import IdOutOfRange
from tests.embeddings.test_bag import TOLERANCES, backward

pytestmark = pytest.mark.filterwarnings("ignore:tables .* used in the cold tier", "ignore:budget=")
NUM_ROWS, NUM_USED = 30, 7
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
        num_slots, slot_bytes = 3, 3 * settings["dtype"].itemsize + 11
        ours = ours | {"budget": 4 * NUM_ROWS + num_slots * slot_bytes}
    torch.manual_seed(0)
    plain = nn.Embedding(NUM_ROWS, 3, **settings)
    own = HotColdEmbedding(NUM_ROWS, 3, **settings, **ours)
    own.load_state_dict(plain.state_dict())

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


def test_a_module_of_torchs_is_taken_over_with_its_settings_and_parameter():
    plain = nn.Embedding(5, 3, padding_idx=2, sparse=True)

    own = HotColdEmbedding.from_torch(plain, optimizer=SGD(lr=1.0))

    assert own.weight is plain.weight
    assert repr(own) == "HotCold" + repr(plain)
    with pytest.raises(ValueError, match="already updated by another recsys optimizer"):
        HotColdEmbedding.from_torch(plain, optimizer=SGD(lr=1.0))
