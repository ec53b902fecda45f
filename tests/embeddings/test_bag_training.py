"""What may happen to a bag between its lookup, its backward and its step."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from recsys.embeddings import SGD, Adagrad, HotColdEmbedding, HotColdEmbeddingBag

pytestmark = pytest.mark.filterwarnings("ignore:tables .* were used in the cold tier")
IDS, OFFSETS = torch.tensor([1, 2, 1, 0, 3, 3, 6, 1]), torch.tensor([0, 2, 4, 4, 7])


def bag(optimizer=SGD(lr=1.0), **options):  # noqa: B008
    torch.manual_seed(0)
    return HotColdEmbeddingBag(7, 4, mode="sum", optimizer=optimizer, **options)


def backward(module, weights=None):
    result = module(IDS, OFFSETS, weights)
    (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_converted_before_an_update_goes_on_with_gradients_and_state(dtype, has_weights):
    found = []
    for is_converted in (False, True):
        found.append(bag(Adagrad(lr=0.1), auto_apply=False))
        for number in range(3):
            weights = torch.linspace(0, 1, 8, dtype=found[-1].weight.dtype)
            backward(found[-1], weights if has_weights else None)
            if is_converted and number == 1:
                found[-1].to(dtype)
            found[-1].row_optimizer.step()
    is_wider = dtype == torch.float64
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if is_wider else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(found[0].weight.double(), found[1].weight.double(), **tolerance)
    states = [module.row_optimizer.state[module.weight]["momentum1"] for module in found]
    assert states[1].dtype == (torch.float64 if is_wider else torch.float32)
    torch.testing.assert_close(states[0].double(), states[1].double(), **tolerance)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_plain_tables_with_the_newest_rows(make):
    ours = bag(Adagrad(lr=0.1), budget=7 * 4 + 2 * (16 * 2 + 11))
    backward(ours)
    found = make(ours)
    assert type(found.weight) is nn.Parameter
    assert found.row_optimizer is None
    assert torch.equal(found.weight.detach(), ours.weight.detach().clone())
    backward(found)
    assert found.weight.grad is not None


def test_a_gradient_of_weights_alone_updates_no_row():
    module, weights = bag(auto_apply=False), torch.ones(8, requires_grad=True)
    before = module.weight.detach().clone()
    torch.autograd.grad(module(IDS, OFFSETS, weights).sum(), [weights])
    module.row_optimizer.step()
    assert torch.equal(module.weight.detach(), before)


def test_frozen_rows_stay_and_weights_have_a_gradient_all_the_same():
    module, weights = bag().requires_grad_(False), torch.ones(8, requires_grad=True)
    before = module.weight.clone()
    assert not module(IDS, OFFSETS).requires_grad
    backward(module, weights)
    assert torch.equal(module.weight, before)
    assert weights.grad.abs().min() > 0


def test_a_closure_computes_the_gradients_that_its_step_uses():
    module = bag(auto_apply=False)
    before = module.weight.detach().clone()

    def closure():
        module.row_optimizer.zero_grad()
        loss = module(IDS[:1], OFFSETS[:1]).sum()
        loss.backward()
        return loss

    assert module.row_optimizer.step(closure) == before[1].sum()
    assert torch.equal(module.weight[1], before[1] - 1)


def test_a_deleted_resident_module_frees_its_memory_at_once():
    ours = bag(Adagrad(lr=0.1))
    backward(ours)
    table = weakref.ref(ours.weight)
    gc.collect()
    gc.disable()
    try:
        del ours
        assert table() is None
    finally:
        gc.enable()


def test_rows_shared_out_by_ddp_are_refused_with_an_optimizer_alone(process_group):
    shared, refused = map(nn.parallel.DistributedDataParallel, (bag(None), bag()))
    backward(shared)
    with pytest.raises(RuntimeError, match="does not share its row updates between processes"):
        refused(IDS, OFFSETS)
    assert shared.module.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", [HotColdEmbeddingBag, HotColdEmbedding])
def test_pretrained_rows_are_shared_and_frozen_unless_asked_otherwise(kind):
    rows = torch.ones(4, 3)
    with pytest.warns(UserWarning, match="freezes the rows by default: .*; pass freeze=False"):
        frozen = kind.from_pretrained(rows, optimizer=SGD(lr=1.0))
    own = kind.from_pretrained(rows, freeze=False, padding_idx=2, optimizer=SGD(lr=1.0))
    own(torch.tensor([[0, 2]])).sum().backward()
    assert not frozen.weight.requires_grad
    assert own.padding_idx == 2
    assert rows[1:].eq(1).all()
    assert not rows[0].eq(1).any()
