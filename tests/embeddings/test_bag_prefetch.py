"""`prefetch` of a bag takes what its forward takes, and refuses what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.optimizer import SGD
from tests.torch_kernels import BY_TORCH

NUM_ROWS = 300


def tiered(dtype=torch.float32, **options):
    slot_bytes = 4 * dtype.itemsize + 8
    return HotColdEmbeddingBag(
        NUM_ROWS,
        4,
        dtype=dtype,
        optimizer=SGD(lr=0.5),
        budget=4 * NUM_ROWS + 60 * slot_bytes,
        **options,
    )


@pytest.mark.parametrize("asks_gradient", [False, True])
def test_rows_of_16_bits_looked_up_with_weights_are_fetched_ahead(asks_gradient):
    bag = tiered(torch.bfloat16, mode="sum")
    ids, offsets = torch.arange(10), torch.tensor([0, 4, 4])
    weights = torch.rand(10).bfloat16().requires_grad_(asks_gradient)

    claim = bag.prefetch(ids, offsets, weights)

    assert claim.is_held
    bag(ids, offsets, weights).sum().backward()
    assert not claim.is_held
    assert not claim.is_given_up
    assert bag.tiers()[0].residency.counts.num_fetched == 10


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_fetched_ahead_in_every_mode(dtype, mode, padding_idx):
    bag = tiered(dtype, mode=mode, padding_idx=padding_idx)
    ids, offsets = torch.arange(10), torch.tensor([0, 4, 4])

    claim = bag.prefetch(ids, offsets)

    assert claim.is_held
    bag(ids, offsets).sum().backward()
    assert not claim.is_held
    assert not claim.is_given_up


@st.composite
def bags_and_arguments(draw):
    """Settings of a bag, and what is given to its forward; some of it wrong."""
    settings = {
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "mode": draw(st.sampled_from(["sum", "sum", "mean"])),
        "padding_idx": draw(st.sampled_from([None, 3])),
        "include_last_offset": draw(st.booleans()),
        "sparse": draw(st.booleans()),
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.int16]))
    num_rows = draw(st.sampled_from([8, NUM_ROWS, NUM_ROWS, NUM_ROWS + 5]))
    first_row = draw(st.sampled_from([0, 0, 0, -1]))
    num_values = draw(st.integers(0, 12))
    values = torch.randint(first_row, num_rows, (num_values,), generator=generator).to(dtype)
    values = values[:: draw(st.sampled_from([1, 2]))]
    bounds = draw(st.lists(st.integers(0, len(values)), max_size=4))
    if draw(st.booleans()):
        bounds = sorted([0, *bounds])
    offsets = torch.tensor(bounds, dtype=draw(st.sampled_from([torch.int64, torch.int32])))
    weights = None
    if draw(st.booleans()):
        weights = torch.rand(len(values), generator=generator)
        if draw(st.booleans()):
            weights = weights.to(settings["dtype"])
        if len(weights) and draw(st.integers(0, 5)) == 0:
            weights[-1] = np.nan
        weights = weights[draw(st.sampled_from([0, 0, 0, 1])) :]
        weights.requires_grad_(draw(st.booleans()))
    form = draw(st.sampled_from(["offsets", "rows", "rows and offsets", "no offsets"]))
    if form == "no offsets":
        offsets = None
    if form.startswith("rows"):
        width = draw(st.integers(1, 3))
        values = values[: len(values) // width * width].view(-1, width)
        if weights is not None and len(weights) >= values.numel():
            weights = weights[: values.numel()].view(-1, width)
        if form == "rows":
            offsets = None
    return settings, (values, offsets, weights)


def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error)
    return None


@given(bags_and_arguments(), st.booleans())
def test_prefetch_refuses_what_forward_refuses_and_takes_what_it_takes(drawn, is_on_device):
    settings, arguments = drawn
    with pytest.MonkeyPatch.context() as patch:
        if is_on_device:  # the CPU stands in for one
            patch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
        bags = [tiered(**settings), tiered(**settings)]

        found = error_of(bags[0].prefetch, *arguments)

        expected = error_of(bags[1], *arguments)
        errors_on(torch.device("cpu")).forget()
    assert found is expected
    if found is not None:
        assert bags[0].tiers()[0].residency.num_claimed == 0


def test_prefetch_on_a_device_leaves_wrong_offsets_to_the_lookup(device):
    bag = tiered(mode="sum", device=device)
    ids, offsets = torch.arange(4, device=device), torch.tensor([0, 9], device=device)

    bag.prefetch(ids, offsets)

    bag(ids, offsets)
    with pytest.raises(ValueError, match="offsets"):
        bag.check_input()


def test_prefetch_reads_no_offsets_from_a_device(device, no_round_trips, monkeypatch):
    bag = tiered(mode="sum", device=device)
    ids, offsets = torch.arange(4, device=device), torch.tensor([0, 2], device=device)
    monkeypatch.setattr(torch.Tensor, "numpy", None)  # what a tensor on CUDA refuses

    with no_round_trips:
        bags = bag._read(ids, offsets, None)

    assert not bags.is_one_hot


def test_a_padding_id_that_was_fetched_ahead_adds_nothing(device):
    bags = [
        HotColdEmbeddingBag(
            NUM_ROWS,
            4,
            mode="sum",
            padding_idx=3,
            device=device,
            optimizer=SGD(lr=0.5),
            budget=budget,
        )
        for budget in (None, 4 * NUM_ROWS + 60 * 24)
    ]
    with torch.no_grad():
        bags[0].weight[3] = 7.0
    bags[1].load_state_dict(bags[0].state_dict())
    ids = torch.tensor([[1, 3, 5], [3, 3, 2]], device=device)

    claim = bags[1].prefetch(ids)
    expected, found = (bag(ids) for bag in bags)

    assert not claim.is_held
    assert torch.equal(found, expected)
