"""An accelerated model beside the plain one, in all that training may do between two steps."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import recsys
from recsys.embeddings import SGD

SIZES, BATCH_SIZE = [9, 5, 30], 6


class Towers(nn.Module):
    """Two towers look up the same tables; `dense` has parameters of its own."""

    def __init__(self, dim=4):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for size in SIZES
        )
        self.dense = nn.Linear(2 * dim * len(SIZES), 1)

    def tower(self, ids):
        offsets = torch.arange(0, ids.shape[1], 2)
        return torch.cat([bag(row, offsets) for bag, row in zip(self.bags, ids, strict=True)], 1)

    def forward(self, ids):
        first, second = ids
        return self.dense(torch.cat([self.tower(first), self.tower(second)], 1)).squeeze(1)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    shape = (2, len(SIZES), 2 * BATCH_SIZE)
    ids = torch.randint(0, 1000, shape, generator=generator) % torch.tensor(SIZES)[:, None]
    return ids, torch.rand(BATCH_SIZE, generator=generator, dtype=torch.float64)


def loss_of(model, number):
    ids, labels = batch(number)
    return mse_loss(model(ids), labels)


def pair():
    """A plain and an accelerated model in float64, with their optimizers."""
    torch.manual_seed(0)
    plain = Towers().double()
    model = copy.deepcopy(plain)
    runs = [(each, torch.optim.Adagrad(each.parameters(), lr=0.05)) for each in (plain, model)]
    recsys.accelerate(model, optimizer=runs[1][1], always=True)
    return runs


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_steps_that_grad_scaler_skips_move_nothing(options):
    torch.manual_seed(0)
    plain = Towers()
    model = copy.deepcopy(plain)
    # The plain one is never fused: torch's fused step takes no sparse gradients.
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    recsys.accelerate(model, optimizer=mine, always=True)

    for each, optimizer in ((plain, theirs), (model, mine)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(each, number).float() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
        assert found.isfinite().all()


def test_a_scale_that_is_left_to_a_fused_step_is_refused():
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0).float()).backward()

    with pytest.raises(RuntimeError, match=r"fused=True.* call scaler\.unscale_\(optimizer\)"):
        scaler.step(optimizer)


def test_tables_that_fsdp_divides_are_refused_before_and_after(process_group):
    divided = fully_shard(Towers(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"got DTensor; .* recsys\.distributed"):
        recsys.accelerate(divided, optimizer=SGD(lr=0.5))

    model = Towers()
    recsys.accelerate(model, optimizer=SGD(lr=0.5))
    with pytest.raises(ValueError, match="its Parameter was replaced"):
        loss_of(fully_shard(model, mesh=init_device_mesh("cpu", (1,))), 0)


def test_data_parallel_models_are_refused_before_and_after(process_group):
    wrapped = DistributedDataParallel(Towers())
    with pytest.raises(ValueError, match="must not be wrapped by DistributedDataParallel"):
        recsys.accelerate(wrapped)
    with pytest.raises(ValueError, match=r"module '0' must not be wrapped"):
        recsys.accelerate(nn.ModuleList([wrapped]))
    assert type(wrapped.module.bags[0]) is nn.EmbeddingBag

    (_, _), (model, _) = pair()
    with pytest.raises(
        RuntimeError, match="DistributedDataParallel: a recsys optimizer does not share"
    ):
        loss_of(DistributedDataParallel(model), 0)


def bags(*sizes, dim=4):
    torch.manual_seed(0)
    return nn.ModuleList(nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for size in sizes)


def halve_grads(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad = 0.5 * weight.grad


def set_rate(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["lr"] = 0.25


@pytest.mark.parametrize("hook", [halve_grads, set_rate])
@pytest.mark.parametrize("has_closure", [False, True])
def test_hooks_of_step_count_whenever_they_were_registered(hook, has_closure):
    plain, model = bags(5, 9), bags(5, 9)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        optimizer.register_step_pre_hook(hook)
        if each is model:
            recsys.accelerate(model, optimizer=optimizer, always=True)
        optimizer.register_step_pre_hook(hook)

        def closure(each=each):
            loss = sum(bag(torch.tensor([4, 2]), torch.tensor([0])).square().sum() for bag in each)
            loss.backward()
            return loss

        if has_closure:
            assert optimizer.step(closure) > 0
        else:
            closure()
            assert optimizer.step() is None

    for mine, theirs in zip(model, plain, strict=True):
        torch.testing.assert_close(mine.weight, theirs.weight)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_table_that_is_put_into_another_param_group_is_refused(is_kept):
    model = bags(5, 9)
    optimizer = torch.optim.SGD([{"params": [bag.weight]} for bag in model], lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    weight = model[1].weight
    before = weight.detach().clone()
    for bag in model:
        bag(torch.tensor([4]), torch.tensor([0])).sum().backward()

    del optimizer.param_groups[1]
    if is_kept:
        optimizer.param_groups[0]["params"].append(weight)

    with pytest.raises(ValueError, match=r"table '1'.* was in param group 1"):
        optimizer.step()
    assert torch.equal(weight, before)
    weight.requires_grad = is_kept
    recsys.restore(model)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    optimizer.step()
    assert torch.equal(weight[4], before[4] - 0.5 * is_kept)


@pytest.mark.parametrize("budget", [None, 800])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_not_be_called_is_refused(kind, budget):
    model = bags(60, 50)
    recsys.accelerate(model, optimizer=SGD(lr=0.1), budget=budget)
    called = []

    with pytest.raises(ValueError, match="table '1': a hook for its gradient would not be called"):
        getattr(model[1].weight, kind)(called.append)

    recsys.restore(model)
    getattr(model[1].weight, kind)(called.append)
    model[1](torch.tensor([4]), torch.tensor([0])).sum().backward()
    assert called


class WithPositions(nn.Module):
    """With one sample, the gradient of `positions` may be on the memory of that of `table`."""

    def __init__(self, table, num_positions, dim):
        super().__init__()
        self.table, self.dense = table, nn.Linear(dim, 1)
        self.positions = nn.Parameter(torch.zeros(num_positions, dim))

    def forward(self, ids):
        found = self.table(ids)
        return self.dense((found + self.positions.view(1, *found.shape[1:])).tanh())


@pytest.mark.parametrize("budget", [None, 420], ids=["resident", "tiered"])
@pytest.mark.parametrize(
    "then",
    [
        lambda model, ids: model(ids.flip(1)).sum().backward(),
        lambda model, _: nn.utils.clip_grad_norm_([model.positions], 0.01),
        lambda model, _: model.positions.grad.data.mul_(0.5),
    ],
    ids=["accumulate", "clip", "scale_data"],
)
@pytest.mark.parametrize("kind", ["bag", "embedding"])
def test_a_gradient_is_its_own_if_the_mini_batch_has_one_sample(kind, then, budget):
    if kind == "bag":
        plain = WithPositions(nn.EmbeddingBag(30, 4, mode="sum"), 1, 4)
    else:
        plain = WithPositions(nn.Embedding(30, 4), 6, 4)
    model = copy.deepcopy(plain)
    of_plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model))
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    for number in range(3):
        ids = torch.randint(0, 30, (1, 6), generator=torch.Generator().manual_seed(number))
        for each, its_optimizer in ((plain, of_plain), (model, optimizer)):
            its_optimizer.zero_grad()
            each(ids).sum().backward()
            then(each, ids)
            its_optimizer.step()

    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach().clone(), expected.detach())
