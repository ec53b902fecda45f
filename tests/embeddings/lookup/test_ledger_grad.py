"""`weight.grad` is the ledger: what is done to it counts, as it does in plain PyTorch."""

import gc

import pytest
import torch
from torch import nn

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import SGD, Adagrad, Adam

IDS = torch.tensor([[0, 3, 3], [4, 0, 2]])
ROWS = torch.arange(18.0).view(6, 3).sin()
# Of the sparse tensors that torch itself makes.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def build(optimizer, *, sparse=True):
    settings = {"freeze": False, "mode": "sum", "sparse": sparse}
    return HotColdEmbeddingBag.from_pretrained(
        ROWS.clone(), **settings, optimizer=optimizer, auto_apply=False
    )


def build_in_tiers(optimizer):
    return HotColdEmbeddingBag(
        6,
        3,
        mode="sum",
        sparse=True,
        _weight=ROWS.clone(),
        optimizer=optimizer,
        auto_apply=False,
        budget=70,  # the row map and two slots
    )


def plain(*, sparse=True):
    return nn.EmbeddingBag.from_pretrained(ROWS.clone(), freeze=False, mode="sum", sparse=sparse)


def backward(module, factor=1.0):
    (factor * module(IDS).square().sum()).backward()


@pytest.mark.parametrize("sparse", [True, False])
def test_grad_is_the_sum_of_all_lookups_sparse_or_dense_as_the_module_says(sparse):
    own, other = build(SGD(lr=1.0), sparse=sparse), plain(sparse=sparse)
    assert own.weight.grad is None

    for module in (own, other):
        for factor in (1.0, 2.0):
            backward(module, factor)
            assert module.weight.grad is not None  # looking does not change what comes

    assert own.weight.grad.is_sparse == sparse
    assert own.weight.grad.shape == ROWS.shape
    torch.testing.assert_close(own.weight.grad.to_dense(), other.weight.grad.to_dense())


def clip_values(module):
    backward(module)
    module.weight.grad = module.weight.grad.coalesce()
    module.weight.grad.values().clamp_(-0.5, 0.5)


def scale_by_the_norm(module):
    backward(module)
    module.weight.grad = module.weight.grad.coalesce()
    values = module.weight.grad.values()
    values.mul_(0.01 / values.norm())


def make_sparse_in_columns_too(module):
    module(IDS[:1]).square().sum().backward()
    module.weight.grad = module.weight.grad.to_dense().clamp(-0.5, 0.5).to_sparse()
    assert module.weight.grad.sparse_dim() == 2


def look_up_after_a_look(module):
    backward(module)
    module.weight.grad *= 0.5
    backward(module, 3.0)


def use_the_table_twice(module):
    (module(IDS) @ module.weight.t()).square().sum().backward()


@pytest.mark.parametrize(
    ("build", "act", "ours", "theirs"),
    [
        (build, clip_values, SGD(lr=1.0), torch.optim.SGD),
        (build, scale_by_the_norm, Adagrad(lr=0.1), torch.optim.Adagrad),
        (build, make_sparse_in_columns_too, SGD(lr=1.0), torch.optim.SGD),
        (build_in_tiers, make_sparse_in_columns_too, SGD(lr=1.0), torch.optim.SGD),
        (build, look_up_after_a_look, SGD(lr=1.0), torch.optim.SGD),
        (build, use_the_table_twice, SGD(lr=0.1), torch.optim.SGD),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_done_to_grad_counts_in_the_step(build, act, ours, theirs):
    own, other = build(ours), plain()
    optimizer = theirs(other.parameters(), lr=ours.lr)

    act(own)
    act(other)
    own.row_optimizer.step()
    optimizer.step()

    assert not torch.equal(own.weight, ROWS)
    torch.testing.assert_close(own.weight.detach(), other.weight.detach(), rtol=1e-5, atol=1e-7)


def test_a_dense_gradient_that_torch_clips_moves_rows_less():
    own, other = build(Adagrad(lr=0.1), sparse=False), plain(sparse=False)
    theirs = torch.optim.Adagrad(other.parameters(), lr=0.1)

    for _ in range(3):
        for module in (own, other):
            backward(module)
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        own.row_optimizer.step()
        theirs.step()
        theirs.zero_grad()

    torch.testing.assert_close(own.weight.detach(), other.weight.detach(), rtol=1e-5, atol=1e-7)


def test_lookups_are_added_to_a_gradient_that_is_sparse_in_its_columns_too():
    own, expected = build(SGD(lr=1.0)), build(SGD(lr=1.0))

    for module in (own, expected):
        backward(module)
    own.weight.grad = own.weight.grad.to_dense().to_sparse()
    for module in (own, expected):
        backward(module)
        assert module.weight.grad.sparse_dim() == 1
        module.row_optimizer.step()

    assert not torch.equal(own.weight, ROWS)
    torch.testing.assert_close(own.weight.detach(), expected.weight.detach())


@pytest.mark.parametrize("build", [build, build_in_tiers])
@pytest.mark.parametrize(
    ("indices", "values"),
    [([[6]], torch.ones(1, 3)), ([[-1]], torch.ones(1, 3)), ([[0], [3]], torch.ones(1))],
)
def test_a_sparse_gradient_with_an_index_outside_of_the_table_is_refused(build, indices, values):
    own = build(SGD(lr=1.0))
    own.weight.grad = torch.sparse_coo_tensor(
        torch.tensor(indices), values, (6, 3), check_invariants=False
    )

    with pytest.raises(
        ValueError, match=r"shape \(6, 3\) is sparse and has an index .*, which must"
    ):
        own.row_optimizer.step()

    assert own.weight.grad is not None
    assert torch.equal(own.weight, ROWS)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_look_at_grad_changes_no_row(sparse):
    own, other = (build(Adam(lr=0.1), sparse=sparse) for _ in range(2))

    for ids in (IDS, IDS[:1], IDS[1:]):
        for module in (own, other):
            # The gradient of some rows is zero: Adam moves them nevertheless, if looked up.
            (module(ids) * torch.tensor([[0.0], [1.0]])[: len(ids)]).square().sum().backward()
        assert own.weight.grad is not None
        for module in (own, other):
            module.row_optimizer.step()

    assert torch.equal(own.weight, other.weight)


def test_a_dense_gradient_of_nothing_moves_nothing():
    own = build(Adam(lr=0.1), sparse=False)

    own.weight.grad = torch.zeros_like(ROWS)
    own.row_optimizer.step()

    assert own.weight.grad is None
    assert torch.equal(own.weight, ROWS)


@pytest.mark.parametrize("forget", [lambda m: m.zero_grad(), lambda m: m.row_optimizer.zero_grad()])
def test_a_forgotten_gradient_moves_nothing(forget):
    own = build(SGD(lr=1.0))

    backward(own)
    forget(own)
    own.row_optimizer.step()

    assert own.weight.grad is None
    assert torch.equal(own.weight, ROWS)


def test_no_gradient_is_left_after_a_step():
    own = build(Adam(lr=0.1))

    backward(own)
    own.row_optimizer.step()

    assert own.weight.grad is None
    moved = own.weight.detach().clone()
    own.row_optimizer.step()
    assert torch.equal(own.weight, moved)


def test_a_scalers_step_is_that_of_the_unscaled_gradient():
    own, expected = build(Adagrad(lr=0.1)), build(Adagrad(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    backward(expected)
    expected.row_optimizer.step()
    scaler.scale(own(IDS).square().sum()).backward()
    scaler.unscale_(own.row_optimizer)
    unscaled = own.weight.grad.to_dense()
    scaler.step(own.row_optimizer)
    scaler.update()

    other = plain()
    backward(other)
    torch.testing.assert_close(unscaled, other.weight.grad.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(own.weight, expected.weight, rtol=1e-6, atol=1e-7)
    assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_a_scaler_skips_moves_nothing(bad):
    own = build(Adam(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    scaler.scale(own(IDS).sum() * bad).backward()
    scaler.step(own.row_optimizer)
    scaler.update()
    own.row_optimizer.zero_grad()
    own.row_optimizer.step()

    assert torch.equal(own.weight, ROWS)
    assert not own.row_optimizer.state[own.weight]
    assert scaler.get_scale() == 2.0**9


def test_the_parameters_of_a_model_show_their_gradients_and_lose_them():
    model = nn.Sequential(build(SGD(lr=1.0)), nn.Linear(3, 1))

    model(IDS).sum().backward()
    found = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    model.zero_grad()

    assert found == {"0.weight": True, "1.weight": True, "1.bias": True}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_table_that_outlives_its_module_is_a_parameter_like_others():
    own = build(SGD(lr=1.0))
    weight = own.weight

    del own
    gc.collect()
    weight.square().sum().backward()

    torch.testing.assert_close(weight.grad, 2 * ROWS)
