"""The exception of `nn.EmbeddingBag` for the same mistake; where it has none, one all the same."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.errors import IdOutOfRange, MalformedBags


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# Settings and arguments.
MISTAKES = {
    "three dimensions": ({}, (torch.zeros(1, 1, 1, dtype=torch.int64),)),
    "no dimension": ({}, (ints(1)[0],)),
    "no offsets": ({}, (ints(1, 2),)),
    "offsets of rows": ({}, (ints(1, 2).view(1, 2), ints(0))),
    "offsets in rows": ({}, (ints(1, 2), ints(0).view(1, 1))),
    "rows of nothing": ({}, (torch.zeros(2, 0, dtype=torch.int64),)),
    "late start": ({}, (ints(1, 2), ints(1))),
    "offsets beyond": ({}, (ints(1, 2), ints(0, 3))),
    "last offset beyond": ({"include_last_offset": True}, (ints(1, 2), ints(0, 1, 3))),
    "no last offset": ({"include_last_offset": True}, (ints(1), ints())),
    "float ids": ({}, (torch.ones(2), ints(0))),
    "float offsets": ({}, (ints(1), torch.zeros(1))),
    "short ids": ({}, (ints(1, dtype=torch.int16), ints(0, dtype=torch.int16))),
    "weights of another shape": ({}, (ints(1, 2), ints(0), torch.ones(3))),
    "weights in rows": ({}, (ints(1, 2), ints(0), torch.ones(1, 2))),
    "weights of another dtype": ({}, (ints(1), ints(0), torch.ones(1, dtype=torch.float64))),
    "weights and a mean": ({"mode": "mean"}, (ints(1), ints(0), torch.ones(1))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_what_torchs_module_raises(mistake):
    settings, arguments = MISTAKES[mistake]
    settings = {"mode": "sum"} | settings
    with pytest.raises(Exception) as expected:  # noqa: PT011  # whatever it is
        nn.EmbeddingBag(5, 3, **settings)(*arguments)
    module = HotColdEmbeddingBag(5, 3, **settings, optimizer=SGD(lr=1.0))

    with pytest.raises(expected.type):
        module(*arguments)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("settings", [{}, {"padding_idx": 1}])
@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1])
def test_an_id_out_of_range_names_sample_and_id(bad, settings, dtype, mode):
    arguments = ints(1, 4, 0, 1, bad, 1, dtype=dtype), ints(0, 2, 2, 4, dtype=dtype)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        nn.EmbeddingBag(5, 3, mode=mode, **settings)(*arguments)
    module = HotColdEmbeddingBag(5, 3, mode=mode, **settings, optimizer=SGD(lr=1.0))
    before = module.weight.detach().clone()

    with pytest.raises(expected.type, match=rf"sample 3: id {bad}\b") as found:
        module(*arguments)

    assert type(found.value) is IdOutOfRange
    assert torch.equal(module.weight, before)


def test_an_id_out_of_range_names_the_table_in_its_model():
    model = nn.ModuleDict({"users": nn.EmbeddingBag(5, 3, mode="sum"), "goods": nn.Embedding(5, 3)})
    recsys.accelerate(model, optimizer=SGD(lr=1.0))

    with pytest.raises(IdOutOfRange, match="'users', sample 1: id 7"):
        model["users"](ints(0, 7).view(2, 1))
    with pytest.raises(IdOutOfRange, match="'goods', sample 0: id -1"):
        model["goods"](ints(-1))


@pytest.mark.parametrize(
    ("ids", "offsets", "shape"), [((1, 4, 0), ints(0, 0, 1), (3,)), ((1, 2, 4, 0), None, (2, 2))]
)
def test_a_weight_that_is_no_number_is_named(ids, offsets, shape):
    module = HotColdEmbeddingBag(5, 3, mode="sum", optimizer=SGD(lr=1.0))
    weights = torch.ones(len(ids))
    weights[-2] = torch.nan
    sample = 2 if offsets is not None else 1

    with pytest.raises(ValueError, match=rf"sample {sample}: .*id 4 is nan"):
        module(ints(*ids).view(shape), offsets, weights.view(shape))


@pytest.mark.parametrize("budget", [None, 200])
def test_memory_refilled_after_backward_changes_no_row(budget):
    module = HotColdEmbeddingBag(
        20, 3, mode="sum", optimizer=SGD(lr=1.0), auto_apply=False, budget=budget
    )
    ids, offsets, weights = ints(1, 2, 2), ints(0, 1), torch.tensor([1.0, 2.0, 3.0])
    expected = module.weight.detach().clone()
    expected[1] -= 1
    expected[2] -= 5

    module(ids, offsets, weights).sum().backward()
    ids.numpy()[:] = 10**9
    offsets.numpy()[:] = 10**9
    weights.numpy()[:] = -1

    module.row_optimizer.step()
    assert torch.equal(module.weight, expected)


def test_a_gradient_of_weights_from_rows_that_moved_meanwhile_is_refused():
    module = HotColdEmbeddingBag(5, 3, mode="sum", optimizer=SGD(lr=1.0))
    weights = torch.ones(1, requires_grad=True)
    early = module(ints(1), ints(0), weights).sum()

    module(ints(1), ints(0)).sum().backward()

    with pytest.raises(RuntimeError, match="rows were updated"):
        early.backward()


@pytest.mark.parametrize("offsets", [[0, 100], [-5, 2], [1, 2], [2, 1]])
def test_offsets_that_lie_are_refused_with_padding_too(offsets):
    module = HotColdEmbeddingBag(7, 4, padding_idx=1, optimizer=SGD(lr=1.0))
    with pytest.raises(MalformedBags):
        module(ints(1, 2, 1), torch.tensor(offsets))
