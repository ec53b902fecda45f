"""Plain PyTorch and accelerated models agree, whatever a program does; see `tests/programs.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recsys
from recsys.embeddings.kernels import choice
from tests.programs import run_program
from tests.torch_kernels import BY_TORCH, BY_TRITON

NUM_PROGRAMS = {"stress": 1500, "ci": 12}
num_programs = NUM_PROGRAMS.get(settings.get_current_profile_name(), 20)
seeds = given(seed=st.integers(0, 2**32))


@seeds
@settings(max_examples=num_programs)
def test_random_programs_agree(seed):
    run_program(seed)


@seeds
@settings(max_examples=num_programs)
def test_random_programs_agree_by_the_kernels_of_a_device(seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "DEVICE_KERNELS", BY_TORCH)
        run_program(seed)


def test_most_programs_run_to_their_end():
    found = [run_program(seed) for seed in range(12)]

    assert found.count("equal") >= 6


@pytest.mark.parametrize("kernels", [BY_TORCH, BY_TRITON], ids=["torch", "triton"])
def test_a_step_of_padding_alone_is_none_of_a_table_that_has_no_state_yet(
    monkeypatch, triton_device, kernels
):
    monkeypatch.setattr(choice, "DEVICE_KERNELS", kernels)
    bags = nn.ModuleList(
        nn.EmbeddingBag(5, 4, padding_idx=0, sparse=True, device=triton_device) for _ in range(3)
    )
    before = [bag.weight.detach().clone() for bag in bags]
    optimizer = torch.optim.SparseAdam(bags.parameters(), lr=0.5)
    recsys.accelerate(bags, optimizer=optimizer, always=True)

    bags[1](torch.zeros(4, 2, dtype=torch.int64, device=triton_device)).sum().backward()
    optimizer.step()

    assert all(torch.equal(bag.weight, old) for bag, old in zip(bags, before, strict=True))
