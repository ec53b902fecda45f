"""Random models that call their tables one by one: accelerated and plain train alike."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import recsys

NUM_ROWS, DIM = 12, 3
MODES = ("sum", "mean", "sum", "mean")
EMBEDDINGS = ({"sparse": True}, {"padding_idx": 0}, {})
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}

calls = st.fixed_dictionaries(
    {
        "table": st.integers(0, len(MODES) + len(EMBEDDINGS) - 1),
        "form": st.sampled_from(["flat", "flat", "last offset", "even", "one-hot", "int32"]),
        "context": st.sampled_from(
            ["", "", "", "", "no_grad", "checkpoint", "reentrant", "branch", "saved on cpu"]
        ),
        "then": st.sampled_from(
            ["", "", "", "hook", "in place", "unused", "twice", "retain_grad", "detach", "relu_"]
        ),
        "loss": st.integers(0, 1),
        "seed": st.integers(0, 99),
    }
)
steps = st.fixed_dictionaries(
    {
        "calls": st.lists(calls, min_size=1, max_size=7),
        "num_bags": st.sampled_from([4, 4, 4, 1, 2]),
        "backward": st.sampled_from(["sum", "sum", "each", "retained", "grad", "none", "inputs"]),
        "read": st.sampled_from(["", "", "", "grad", "weight", "weight in loss"]),
        "step": st.sampled_from([True, True, True, False]),
    }
)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, sparse=True, include_last_offset=number == 1)
            for number, mode in enumerate(MODES)
        )
        self.tables.extend(nn.Embedding(NUM_ROWS, DIM, **more) for more in EMBEDDINGS)
        self.dense = nn.Linear(DIM, DIM)

    def call(self, number, form, num_bags, seed):
        generator = torch.Generator().manual_seed(seed)
        bag = self.tables[number]
        if number >= len(MODES):
            shape = (num_bags, 2) if form == "even" else (num_bags,)
            rows = bag(torch.randint(0, NUM_ROWS, shape, generator=generator))
            return rows.sum(1) if form == "even" else rows
        if form in ("even", "one-hot"):
            length = 1 if form == "one-hot" else 2
            ids = torch.randint(0, NUM_ROWS, (num_bags, length), generator=generator)
            return bag(ids)
        lengths = torch.randint(0, 4, (num_bags,), generator=generator)
        ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        offsets = ends if bag.include_last_offset else ends[:-1]
        if form == "int32":
            ids, offsets = ids.int(), offsets.int()
        return bag(ids, offsets)

    def pooled(self, call, num_bags):
        context = call["context"]
        arguments = call["table"], call["form"], num_bags, call["seed"]
        if context == "no_grad":
            with torch.no_grad():
                return self.call(*arguments)
        if context in ("checkpoint", "reentrant"):
            # What is computed anew needs an input that asks for a gradient.
            asks = torch.zeros((), requires_grad=True)
            return checkpoint(
                lambda zero: self.call(*arguments).tanh() + zero,
                asks,
                use_reentrant=context == "reentrant",
            )
        if context == "branch":
            first = self.call(*arguments)
            return self.call(*arguments) if first.sum() > 0 else first * 2
        if context == "saved on cpu":
            with torch.autograd.graph.save_on_cpu():
                return self.call(*arguments) * 3
        return self.call(*arguments)


def used(output, then):
    """What a model does with the output of a call; None if nothing."""
    if then == "unused":
        return None
    if then == "hook" and output.requires_grad:
        output.register_hook(lambda gradient: gradient * 0.5)
    if then == "retain_grad" and output.requires_grad:
        output.retain_grad()
    if then == "in place":
        output = output.mul_(0.25)
    if then == "relu_":
        output = output.relu_()
    if then == "twice":
        output = output * output
    return output.detach() if then == "detach" else output


def train(model, optimizer, step):
    """One step; what a user may see of it."""
    seen, outputs, losses = [], [], [model.dense.weight.sum(), model.dense.bias.sum()]
    for call in step["calls"]:
        output = model.pooled(call, step["num_bags"])
        seen.append(output.detach().clone())
        outputs.append(output)
        output = used(output, call["then"])
        if output is not None:
            losses[call["loss"]] = losses[call["loss"]] + model.dense(output).square().sum()
    if step["read"] == "weight in loss":
        losses[0] = losses[0] + model.tables[0].weight[3].square().sum()
    backward(model, losses, outputs, step["backward"], seen)
    seen += [output.grad for output in outputs if output.requires_grad and output.retains_grad]
    if step["read"] == "grad":
        seen += [_dense(table.weight.grad) for table in model.tables]
    if step["step"]:
        optimizer.step()
        optimizer.zero_grad()  # of rows the step forgets them
    if step["read"] == "weight":
        seen.append(model.tables[0].weight.norm())
    return seen


def backward(model, losses, outputs, how, seen):
    if how == "sum":
        sum(losses).backward()
    elif how == "each":
        for loss in losses:
            loss.backward()
    elif how == "retained":
        sum(losses).backward(retain_graph=True)
        sum(losses).backward()
    elif how == "grad":
        asking = [output for output in outputs if output.requires_grad]
        if asking:
            seen += torch.autograd.grad(sum(losses), asking, retain_graph=True, allow_unused=True)
        sum(losses).backward()
    elif how == "inputs":
        sum(losses).backward(inputs=[model.dense.weight])


def _dense(gradient):
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.filterwarnings("ignore:.*(its gradient has all rows|are left to torch)")
@given(st.lists(steps, min_size=2, max_size=5), st.sampled_from(sorted(OPTIMIZERS)))
def test_models_that_call_tables_in_any_order_train_as_plain_ones(program, name):
    torch.manual_seed(0)
    plain = Tables().double()
    model = copy.deepcopy(plain)
    optimizers = [OPTIMIZERS[name](each.parameters(), lr=0.01) for each in (plain, model)]
    recsys.accelerate(model, optimizer=optimizers[1], always=True)

    for step in program:
        expected, found = (
            train(each, optimizer, step)
            for each, optimizer in zip((plain, model), optimizers, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_accelerated_model_that_is_converted_later_trains_as_a_plain_one(
    name, dtype, steps_before
):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum"))
    model = copy.deepcopy(plain)
    states = []
    for each in (plain, model):
        generator = torch.Generator().manual_seed(1)
        optimizer = OPTIMIZERS[name](each.parameters(), lr=2**-10)
        if each is model:
            recsys.accelerate(each, optimizer=optimizer, always=True)
        for step in range(6):
            if step == steps_before:
                each.to(dtype)
            optimizer.zero_grad()
            # Distinct ids, whole numbers, and a rate of 2**-10: products that 16 bits hold exactly.
            pooled = each(torch.randperm(NUM_ROWS, generator=generator)[:5].unsqueeze(1))
            pooled.backward(
                torch.randint(-8, 9, pooled.shape, generator=generator).to(dtype=pooled.dtype)
            )
            optimizer.step()
        states.append(optimizer.state_dict()["state"])

    expected, found = plain[0].weight.detach(), model[0].weight.detach()
    # In float64 Adagrad's sums become float64, too; torch leaves those that it has in float32.
    tolerance = 1e-7 if (name, dtype) == ("adagrad", torch.float64) else 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(states[1], states[0], rtol=tolerance, atol=0, check_dtype=False)
