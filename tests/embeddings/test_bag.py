"""`HotColdEmbeddingBag` beside `nn.EmbeddingBag`."""

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


def backward(module, *inputs):
    """The result, after its gradients have gone where they go."""
    result = module(*inputs)
    (result * WAVE[: result.numel()].view_as(result)).sum().backward()
    return result.detach()


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_optimizer", [False, True])
@given(
    lookups(),
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([None, 0, 3, -1, -NUM_ROWS]),
    st.sampled_from(list(TOLERANCES)),
    st.booleans(),
)
def test_result_and_gradients_are_those_of_torchs_module(
    has_optimizer, has_weights, lookup, mode, padding_idx, dtype, is_sparse
):
    ids, offsets, include_last_offset = lookup
    settings = {
        "mode": "sum" if has_weights else mode,
        "padding_idx": padding_idx,
        "dtype": dtype,
        "include_last_offset": include_last_offset,
        "sparse": is_sparse,
    }
    optimizer = {"optimizer": SGD(lr=1.0), "auto_apply": False} if has_optimizer else {}
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(NUM_ROWS, 3, **settings)
    own = HotColdEmbeddingBag(NUM_ROWS, 3, **settings, **optimizer)
    own.load_state_dict(plain.state_dict())
    results = []

    for module in (plain, own):
        weights = None
        if has_weights:  # with gaps between them
            weights = torch.linspace(-1, 2, 2 * ids.numel(), dtype=dtype)[::2].view(ids.shape)
            weights.requires_grad_()
        result = backward(module, ids, offsets, weights)
        results.append((result, module.weight.detach(), module.weight.grad.to_dense()))
        results[-1] += (weights.grad,) if has_weights else ()

    assert own.weight.grad.is_sparse == is_sparse
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_behind_the_last_offset_belong_to_no_bag(mode):
    module = HotColdEmbeddingBag(
        NUM_ROWS, 3, mode=mode, include_last_offset=True, optimizer=SGD(lr=1.0)
    )
    before = module.weight.detach().clone()

    torch.testing.assert_close(module(torch.tensor([1, 5]), torch.tensor([0, 1])), before[1:2])
    assert module(torch.tensor([1, 5]), torch.tensor([0])).shape == (0, 3)
