"""Gradients of replayed steps are those of autograd, whatever is made from the loss."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function

from recsys import DLRM
from recsys.pipeline import TrainPipeline, captured_dense, dense_graphs
from tests.captured_training import (
    dense_parameters,
    make_batch,
    make_model,
    require_equal,
    train,
)
from tests.fake_graphs import capture_on_cpu


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The captures; the CPU stands in for the device."""
    return capture_on_cpu(monkeypatch)


@pytest.fixture
def batches():
    return [make_batch(seed) for seed in range(6)]


def with_loss(change, seen):
    """A `custom_model_fwd` whose loss is `change(model, loss, seen)`."""

    def wrap(model):
        def forward(batch):
            loss, output = model(batch)
            return change(model, loss, seen), output

        return forward

    return wrap


def scale_in_place(_, loss, __):
    loss *= 3
    return loss


def add_in_place(model, loss, _):
    loss += dense_parameters(model)[0].square().sum()
    return loss


def with_three_terms(model, loss, _):
    """Floats are summed in an order that autograd chooses."""
    parameters = dense_parameters(model)
    squares = sum(each.square().sum() for each in parameters)
    return loss + 0.1 * squares + 0.07 * sum(each.abs().sum() for each in parameters)


def with_a_hook(_, loss, seen):
    loss.register_hook(lambda gradient: seen.append(gradient.clone()))
    return loss


def with_a_hook_of_its_double(_, loss, seen):
    double = loss * 2
    double.register_hook(lambda gradient: seen.append(gradient.clone()))
    return double


def with_a_gradient(_, loss, seen):
    loss.retain_grad()
    seen.append(loss)
    return loss


def with_an_earlier_backward(model, loss, _):
    loss.backward()
    return loss.detach() + dense_parameters(model)[0].square().sum()


def of_its_gradients(model, loss, seen):
    parameters = dense_parameters(model)
    gradients = torch.autograd.grad(loss, parameters)
    seen.extend(gradients)
    return sum(
        (each * gradient).sum() for each, gradient in zip(parameters, gradients, strict=True)
    )


class Double(Function):
    @staticmethod
    def forward(ctx, loss, seen):
        ctx.seen = seen
        return loss * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(gradient)
        return gradient * 2, None


def with_a_function(_, loss, seen):
    return Double.apply(loss, seen)


class NoGradient(Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def without_its_gradient(model, loss, _):
    return NoGradient.apply(loss) + dense_parameters(model)[0].square().sum()


LOSSES = [
    scale_in_place,
    add_in_place,
    with_three_terms,
    with_a_hook,
    with_a_hook_of_its_double,
    with_a_gradient,
    with_an_earlier_backward,
    of_its_gradients,
    with_a_function,
    without_its_gradient,
]


@pytest.mark.parametrize("change", LOSSES)
def test_losses_are_those_of_autograd(batches, change):
    before, seen = [], []
    options = {"auto_apply": change not in (with_an_earlier_backward, of_its_gradients)}
    expected = train(batches, capture=False, custom_model_fwd=with_loss(change, before), **options)

    found = train(batches, capture=True, custom_model_fwd=with_loss(change, seen), **options)

    require_equal(found, expected)
    assert found.captured.num_replays == len(batches)
    assert len(seen) == len(before)
    assert all(map(torch.equal, seen, before))
    if change is with_a_gradient:
        assert [each.grad for each in seen] == [each.grad for each in before]


def _keep_gradient(model, seen):
    dense_parameters(model)[0].register_hook(seen.append)


def _keep_gradient_of_vectors(model, seen):
    model.model.sparse_arch.register_forward_hook(
        lambda _, __, vectors: vectors.register_hook(seen.append) and None
    )


@pytest.mark.parametrize("keep", [_keep_gradient, _keep_gradient_of_vectors])
def test_gradients_that_hooks_keep_stay_as_they_are(batches, keep):
    before, seen = [], []
    train(batches, capture=False, change=lambda model: keep(model, before))

    train(batches, capture=True, change=lambda model: keep(model, seen))

    assert len(seen) == len(batches)
    assert all(map(torch.equal, seen, before))


class TwoBiases(DLRM):
    """The gradient of a bias is that of the other."""

    def head(self, embedded_dense, embedded_sparse):
        return super().head(embedded_dense, embedded_sparse) + (self.bias + self.other_bias)


class SumOfWeights(DLRM):
    """The gradient of a weight is one number, expanded."""

    def head(self, embedded_dense, embedded_sparse):
        return super().head(embedded_dense, embedded_sparse) + self.bias.sum()


class Offset(nn.BCEWithLogitsLoss):
    """The gradient of the offset is that of the loss."""

    def forward(self, logits, labels):
        return super().forward(logits, labels) + self.offset


def _with_two_biases(model):
    model.model.__class__ = TwoBiases
    model.model.bias = nn.Parameter(torch.ones(1))
    model.model.other_bias = nn.Parameter(torch.ones(1))


def _with_a_sum(model):
    model.model.__class__ = SumOfWeights
    model.model.bias = nn.Parameter(torch.ones(3))


def _with_an_offset(model):
    model.loss_fn = Offset()
    model.loss_fn.offset = nn.Parameter(torch.ones(()))


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        [group] = self.param_groups
        nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step(closure)


@pytest.mark.parametrize("change", [_with_two_biases, _with_a_sum, _with_an_offset])
def test_gradients_may_be_changed_in_place(batches, change):
    found = []
    for capture in (False, True):
        model = make_model()
        change(model)
        optimizer = Clipped(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        losses = [loss for loss, _ in pipeline.steps(batches)]
        found.append([*losses, *model.state_dict().values()])

    assert pipeline.captured.num_replays == len(batches)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("change", [lambda *_: None, _keep_gradient_of_vectors])
def test_gradients_pass_autograd_only_if_hooks_may_see_them(monkeypatch, batches, change):
    """Otherwise parameters get them without autograd, which takes the host longer."""
    seeds = []
    replay = dense_graphs.DenseGraphs.backward
    monkeypatch.setattr(
        dense_graphs.DenseGraphs,
        "backward",
        lambda self, number, seed=None: (seeds.append(seed), replay(self, number, seed))[1],
    )

    train(batches, capture=True, change=lambda model: change(model, []))

    assert len(seeds) == len(batches)
    assert all((each is None) is (change is not _keep_gradient_of_vectors) for each in seeds)


def _keep_vectors(model):
    model.model.sparse_arch.register_forward_hook(lambda *_: None)


def _freeze_rows(model):
    model.model.sparse_arch.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "auto_apply", "num_passes"),
    [
        (lambda _: None, False, 1),  # the first step, whose vectors are not yet in the graph
        (lambda _: None, True, 6),
        (_keep_vectors, False, 6),
        (_freeze_rows, False, 0),
    ],
)
@pytest.mark.parametrize("budget", [None, 9000])
def test_gradients_of_rows_pass_autograd_only_if_it_is_needed(
    monkeypatch, batches, change, auto_apply, num_passes, budget
):
    """A hook may keep the vectors, and only a pass of autograd can end with an update."""
    options = {"auto_apply": auto_apply, "change": change, "budget": budget}
    expected = train(batches, capture=False, **options)
    passes = []
    own = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *given: (passes.append(given), own(*given))
    )

    found = train(batches, capture=True, **options)

    assert len(passes) == num_passes
    require_equal(found, expected)


def test_ids_that_change_before_backward_are_refused(batches):
    def wrap(model):
        def forward(batch):
            result = model(batch)
            if batch is batches[2]:
                batch.sparse_features.values().zero_()
            return result

        return forward

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(batches, capture=True, auto_apply=False, custom_model_fwd=wrap)


def test_a_backward_on_another_stream_is_left_to_autograd(monkeypatch, batches):
    """Autograd lets the stream of the forward wait for that of the gradient, and vice versa."""
    seeds, streams = [], iter(range(100))
    replay = dense_graphs.DenseGraphs.backward
    monkeypatch.setattr(captured_dense, "current_stream", lambda _: next(streams))
    monkeypatch.setattr(
        dense_graphs.DenseGraphs,
        "backward",
        lambda self, number, seed=None: (seeds.append(seed), replay(self, number, seed))[1],
    )
    expected = train(batches, capture=False)

    found = train(batches, capture=True)

    require_equal(found, expected)
    assert [each.item() for each in seeds] == [1] * len(batches)


def _sum_with_the_last(_, loss, seen):
    seen.append(loss)
    return sum(seen[-2:])


def _keep_the_graph(_, loss, __):
    loss.backward(retain_graph=True)
    return loss


def _penalize(model, loss, _):
    gradients = torch.autograd.grad(loss, dense_parameters(model), create_graph=True)
    return loss + sum(each.square().sum() for each in gradients)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_sum_with_the_last, "capture=True"),
        (_keep_the_graph, "capture=True"),
        (_penalize, "cannot be differentiated again"),
    ],
)
def test_a_second_backward_is_refused(batches, change, name):
    auto_apply = {} if change is _penalize else {"auto_apply": False}

    with pytest.raises(RuntimeError, match=name):
        train(batches, capture=True, custom_model_fwd=with_loss(change, []), **auto_apply)


def test_a_step_that_raises_keeps_no_loss(batches):
    losses = []

    def fail(model):
        def forward(batch):
            losses.append(weakref.ref(model(batch)[0]))
            raise ValueError("in between")

        return forward

    model = make_model()
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    pipeline = TrainPipeline(model, optimizer, capture=True, custom_model_fwd=fail(model))
    with pytest.raises(ValueError, match="in between"):
        pipeline.progress(iter(batches))

    assert pipeline.captured.num_replays == 1
    assert losses[0]() is None
