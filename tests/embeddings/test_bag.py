import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsys.embeddings import SGD, HotColdEmbeddingBag

NUM_ROWS = 7
ID_TYPES = st.sampled_from([torch.int32, torch.int64])
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    # torch sums gradients of these, and averages rows, in the dtype itself; ours in float32.
    torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
}
# What each gradient is multiplied by when the loss is made, so that no two are alike.
WAVE = torch.arange(1.0, 101, dtype=torch.float64).sin()


@st.composite
def lookups(draw):
    """Arguments of forward, all forms of them, and whether the last offset is among them."""
    form = draw(st.sampled_from(["offsets", "last offset", "rows"]))
    if form == "rows":
        shape = (draw(st.integers(0, 4)), draw(st.integers(1, 4)))
        lengths = [shape[1]] * shape[0]
    else:
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    total = sum(lengths)
    ids = draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=total, max_size=total))
    flat = torch.tensor(ids, dtype=draw(ID_TYPES))
    if form == "rows":
        return flat.view(shape), None, False
    bounds = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(draw(ID_TYPES))
    return (flat, bounds, True) if form == "last offset" else (flat, bounds[:-1], False)


@st.composite
def settings_of_modules(draw):
    return {
        "mode": draw(st.sampled_from(["sum", "mean"])),
        "padding_idx": draw(st.sampled_from([None, 0, 3, -1, -NUM_ROWS])),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
    }


def both(settings, **ours):
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(NUM_ROWS, 3, **settings)
    own = HotColdEmbeddingBag(NUM_ROWS, 3, **settings, **ours)
    own.load_state_dict(plain.state_dict())
    return plain, own


def backward(module, *inputs):
    """The result, after its gradients have gone where they go."""
    result = module(*inputs)
    (result * WAVE[: result.numel()].view_as(result)).sum().backward()
    return result.detach()


@given(lookups(), settings_of_modules(), st.booleans(), st.booleans())
def test_result_and_gradient_are_those_of_torchs_module(lookup, settings, has_optimizer, is_sparse):
    ids, offsets, include_last_offset = lookup
    settings = settings | {"include_last_offset": include_last_offset, "sparse": is_sparse}
    optimizer = {"optimizer": SGD(lr=1.0), "auto_apply": False} if has_optimizer else {}
    plain, own = both(settings, **optimizer)

    expected, found = (backward(module, ids, offsets, None) for module in (plain, own))

    tolerance = TOLERANCES[settings["dtype"]]
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(own.weight.detach(), plain.weight.detach(), **tolerance)
    assert own.weight.grad.is_sparse == is_sparse
    gradients = [module.weight.grad.to_dense() for module in (own, plain)]
    torch.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize("has_optimizer", [False, True])
@given(
    lookups(),
    st.sampled_from([None, 2, -1]),
    st.sampled_from(list(TOLERANCES)),
)
def test_weights_and_their_gradient_are_those_of_torchs_module(
    has_optimizer, lookup, padding_idx, dtype
):
    ids, offsets, include_last_offset = lookup
    settings = {
        "mode": "sum",
        "padding_idx": padding_idx,
        "include_last_offset": include_last_offset,
        "dtype": dtype,
    }
    optimizer = {"optimizer": SGD(lr=1.0), "auto_apply": False} if has_optimizer else {}
    results = []

    for module in both(settings, **optimizer):
        weights = torch.linspace(-1, 2, ids.numel(), dtype=dtype).view(ids.shape).requires_grad_()
        result = backward(module, ids, offsets, weights)
        results.append((result, weights.grad, module.weight.grad.to_dense()))

    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


def test_only_offsets_of_several_bags_are_needed_where_bags_are_empty():
    module = HotColdEmbeddingBag(NUM_ROWS, 3, mode="mean", optimizer=SGD(lr=1.0))

    nothing = module(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    empty_bags = module(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]))

    assert nothing.shape == (0, 3)
    assert empty_bags.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_behind_the_last_offset_belong_to_no_bag(mode):
    module = HotColdEmbeddingBag(
        NUM_ROWS, 3, mode=mode, include_last_offset=True, optimizer=SGD(lr=1.0)
    )
    before = module.weight.detach().clone()

    found = module(torch.tensor([1, 5]), torch.tensor([0, 1]))
    none = module(torch.tensor([1, 5]), torch.tensor([0]))

    torch.testing.assert_close(found, before[1:2])
    assert none.shape == (0, 3)


def test_arguments_need_not_be_contiguous():
    plain, own = both({"mode": "sum"}, optimizer=SGD(lr=1.0), auto_apply=False)
    ids = torch.tensor([[1, 5, 2], [0, 0, 6]]).t()
    weights = torch.linspace(0, 1, 12).view(6, 2)[:, 1].reshape(2, 3).t()

    for arguments in ((ids, None, weights), (ids[:, 1], torch.tensor([0, 9, 2])[::2])):
        torch.testing.assert_close(own(*arguments), plain(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_torchs_without_an_optimizer(dtype):
    plain, own = both({"mode": "sum", "dtype": dtype})
    ids = torch.tensor([[1, 5, 2], [0, 0, 6]])
    weights = torch.linspace(0, 1, 6, dtype=dtype).view(2, 3)

    assert torch.equal(own(ids), plain(ids))
    assert torch.equal(own(ids, None, weights), plain(ids, None, weights))
