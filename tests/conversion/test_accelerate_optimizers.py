"""Whose optimizers move the rows of an accelerated model: several, shared, partial, Adam, RWS."""

import copy

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import HotColdEmbedding, HotColdEmbeddingBag

IDS = torch.tensor([[1, 3, 3], [0, 2, 1], [4, 4, 1]])


class Towers(nn.Module):
    """Two tables, one looked up pooled and one not, and a layer."""

    def __init__(self, *, sparse=True):
        super().__init__()
        self.users = nn.EmbeddingBag(40, 4, mode="sum", sparse=sparse)
        self.goods = nn.Embedding(40, 4, sparse=sparse)
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        return self.top((self.users(ids) + self.goods(ids).mean(1)).sin()).square().sum()

    def tables(self):
        return [self.users.weight, self.goods.weight]


def train(model, optimizers, num_steps=4):
    for _ in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(IDS).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(model, plain):
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


def both(**settings):
    plain = Towers(**settings)
    return copy.deepcopy(plain), plain


def test_several_optimizers_move_the_tables_that_they_have():
    model, plain = both()

    ours, theirs = (
        [
            torch.optim.SGD(each.users.parameters(), lr=0.1),
            torch.optim.Adagrad([each.goods.weight, *each.top.parameters()], lr=0.1),
        ]
        for each in (model, plain)
    )
    result = recsys.accelerate(model, optimizer=ours, always=True)
    train(model, ours)
    train(plain, theirs)

    assert result.updated_by == (
        "rows are updated in the step of SGD",
        "rows are updated in the step of Adagrad",
    )
    assert_equal(model, plain)
    recsys.restore(model)
    train(model, ours)
    train(plain, theirs)
    assert_equal(model, plain)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_table_that_no_given_optimizer_can_update_stays_as_it_was_and_is_reported(momentum):
    model, plain = both()

    ours, theirs = (
        [
            torch.optim.SGD(each.users.parameters(), lr=0.1),
            torch.optim.SGD(
                [each.goods.weight, *each.top.parameters()], lr=0.1, momentum=momentum or 0
            ),
        ]
        for each in (model, plain)
    )
    result = recsys.accelerate(model, optimizer=ours if momentum else ours[0], always=True)
    train(model, ours)
    train(plain, theirs)

    assert type(model.goods) is nn.Embedding
    assert isinstance(model.users, HotColdEmbeddingBag)
    assert ("momentum" if momentum else "param group") in result.left_alone["goods"]
    assert_equal(model, plain)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("sparse", [True, False])
def test_lazy_adam_moves_rows_as_sparse_adam_and_says_so(kind, sparse):
    model, plain = Towers(sparse=sparse), Towers()
    plain.load_state_dict(model.state_dict())
    ours = kind(model.parameters(), lr=0.1, weight_decay=0)
    theirs = [
        torch.optim.SparseAdam(plain.tables(), lr=0.1),
        kind(plain.top.parameters(), lr=0.1, weight_decay=0),
    ]

    with pytest.warns(UserWarning, match=r"lazy_adam=True: .* rule of torch.optim.SparseAdam"):
        recsys.accelerate(model, optimizer=ours, lazy_adam=True, always=True)
    with pytest.warns(UserWarning, match="a copied Adam updates"):
        copy.deepcopy(model)
    train(model, [ours])
    train(plain, theirs)

    assert_equal(model, plain)
    assert set(ours.state[model.goods.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    recsys.restore(model)
    if not sparse:
        train(model, [ours])  # Adam goes on with the state that it finds


class RWSAdagrad(torch.optim.Optimizer):
    """The rule of the optimizer of that name: of sparse gradients row by row, else by number."""

    def __init__(self, params, lr=0.1, lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "eps": eps,
                "weight_decay": 0.0,
                "initial_accumulator_value": initial_accumulator_value,
            },
        )
        self.momentum_initialized = False
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._move(each, group)
        self.momentum_initialized = True
        return loss

    def _move(self, each, group):
        state, gradient = self.state[each], each.grad.to_dense()
        name = "momentum" if each.grad.is_sparse else "sum"
        squares = gradient.square().mean(1) if each.grad.is_sparse else gradient.square()
        if not self.momentum_initialized:
            state[name] = torch.zeros_like(squares)
        state["step"] += 1
        state[name] += squares
        lr = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        scale = state[name].sqrt() + group["eps"]
        each -= lr * gradient / (scale.unsqueeze(1) if each.grad.is_sparse else scale)


def test_rws_adagrad_is_read_by_its_name_and_fields():
    model, plain = both()
    ours, theirs = (RWSAdagrad(each.parameters(), lr_decay=0.1) for each in (model, plain))
    recsys.accelerate(model, optimizer=ours, always=True)

    train(model, [ours])
    train(plain, [theirs])

    assert_equal(model, plain)
    assert ours.state[model.users.weight]["step"] == 4
    recsys.restore(model)
    train(model, [ours])
    train(plain, [theirs])
    assert_equal(model, plain)


def test_rws_adagrad_of_dense_gradients_or_another_start_is_refused():
    dense, model = Towers(sparse=False), Towers()

    with pytest.raises(ValueError, match="'users': sparse must be True with RWSAdagrad"):
        recsys.accelerate(dense, optimizer=RWSAdagrad(dense.parameters()), always=True)
    with pytest.raises(ValueError, match=r"initial_accumulator_value=0\.5 is not translated"):
        recsys.accelerate(
            model,
            optimizer=RWSAdagrad(model.parameters(), initial_accumulator_value=0.5),
            always=True,
        )


def test_embeddings_and_bags_of_one_dim_are_updated_by_one_call():
    model = Towers()

    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), always=True)

    assert isinstance(model.goods, HotColdEmbedding)
    assert model.goods.groups() == model.users.groups()


@pytest.mark.parametrize(("first", "message"), [(0, "are left to torch"), (2, "has all rows")])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_penalty_of_a_whole_table_counts_and_is_reported_once(sparse, first, message):
    model, plain = both(sparse=sparse)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    recsys.accelerate(model, optimizer=ours, always=True)

    def train_with_penalty(model, optimizer):
        for number in range(4):
            optimizer.zero_grad()
            model(IDS).backward()
            if number >= first:
                (model.users.weight.square().sum() * 0.01).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="users.*" + message) as reported:
        train_with_penalty(model, ours)
    train_with_penalty(plain, theirs)

    assert len(reported) == 1
    assert_equal(model, plain)
    assert (type(model.users.weight) is nn.Parameter) == (first == 0)
    assert type(model.goods.weight) is not nn.Parameter


OWN = {
    "forward": (lambda module: setattr(module, "forward", lambda ids: ids.float()), "'forward'"),
    "buffer": (lambda module: module.register_buffer("mask", torch.ones(2)), "'mask'"),
    "module": (lambda module: module.add_module("scale", nn.Linear(2, 2)), "'scale'"),
    "hook": (lambda module: module.weight.register_hook(lambda g: g * 0), "hook for its gradient"),
    "other hook": (
        lambda module: module.weight.register_post_accumulate_grad_hook(lambda _: None),
        "hook for its gradient",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_a_module_with_more_than_its_class_gives_it_is_left_as_it_is(case):
    change, message = OWN[case]
    model = Towers()
    change(model.goods)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = recsys.accelerate(model, optimizer=optimizer, always=True)

    assert message in result.left_alone["goods"]
    assert type(model.goods) is nn.Embedding
    assert isinstance(model.users, HotColdEmbeddingBag)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_comes_before_anything_is_exchanged():
    model = Towers()
    optimizer = torch.optim.Adam(model.parameters())

    with pytest.raises(UserWarning, match="lazy_adam=True"):
        recsys.accelerate(model, optimizer=optimizer, lazy_adam=True, always=True)

    assert type(model.goods) is nn.Embedding
    assert type(model.goods.weight) is nn.Parameter
    assert not optimizer._optimizer_step_pre_hooks
