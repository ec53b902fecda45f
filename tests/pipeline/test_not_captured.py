"""What cannot be captured or replayed runs op by op, and a warning says why."""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from recsys import DLRM, DLRMTrain
from recsys.models.batch_train import BatchTrain
from recsys.pipeline import TrainPipeline, dense_graphs
from tests.captured_training import (
    B,
    dense_parameters,
    make_batch,
    make_model,
    require_equal,
    train,
)
from tests.fake_graphs import capture_on_cpu


@pytest.fixture
def made(monkeypatch):
    """The captures; the CPU stands in for the device."""
    return capture_on_cpu(monkeypatch)


@pytest.fixture
def batches():
    return [make_batch(seed) for seed in range(6)]


def add_hook(model):
    model.model.over_arch.register_forward_hook(lambda *_: None)


def add_hook_of_model(model):
    model.model.register_forward_pre_hook(lambda *_: None)


def add_backward_hook(model):
    model.model.inter_arch.register_full_backward_hook(lambda *_: None)


def add_buffer(model):
    model.model.over_arch.register_module("norm", nn.BatchNorm1d(3))


def share_with_embeddings(model):
    [weight, *_] = model.model.sparse_arch.embedding_bag_collection.parameters()
    model.model.tied = weight


def replace_forward(model):
    model.model.forward = model.model.forward


OBSTACLES = {
    "hook": (add_hook, "'model.over_arch' has hooks, which graphs would not call"),
    "backward hook": (add_backward_hook, "'model.inter_arch' has hooks"),
    "hook of the model": (add_hook_of_model, "'model' has hooks"),
    "buffer": (add_buffer, "'model.over_arch.norm.running_mean' is a buffer"),
    "tied": (share_with_embeddings, "'model.tied' is also a parameter of the embeddings"),
    "forward": (replace_forward, "DLRM is no model of pooled vectors, such as DLRM, DCNv2 and"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_prevents_a_capture_is_told_when_the_pipeline_is_built(made, batches, name):
    change, message = OBSTACLES[name]
    expected = train(batches, capture=False, change=change)

    with pytest.warns(UserWarning, match=f"^capture=True has no effect: {message}") as told:
        found = train(batches, capture=True, change=change)

    assert len(told) == 1
    assert not made
    require_equal(found, expected)
    assert found.captured.reason.startswith(message)


def on_two_devices():
    model = make_model()
    model.model.over_arch.to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Linear(2, 1), "Linear"),
        (lambda: BatchTrain(nn.Linear(2, 1)), "BatchTrain"),
        (lambda: DLRMTrain(nn.Linear(2, 1)), "Linear"),
        (on_two_devices, "2 devices"),
    ],
)
def test_only_a_train_model_of_pooled_vectors_is_captured(made, make, name):
    with pytest.warns(UserWarning, match=f"capture=True has no effect: .*{name}"):
        TrainPipeline(make(), None, capture=True)
    assert not made


def test_only_work_on_a_cuda_device_is_captured():
    with pytest.warns(UserWarning, match="capture=True has no effect: .*'cpu'"):
        TrainPipeline(make_model(), None, capture=True)


def test_a_hook_that_is_newer_than_the_pipeline_prevents_the_capture(made, batches):
    model, calls = make_model(), []
    pipeline = TrainPipeline(model, torch.optim.SGD(dense_parameters(model), lr=0.1), capture=True)
    model.model.register_forward_hook(lambda *_: calls.append(1))

    with pytest.warns(UserWarning, match="no effect: 'model' has hooks"):
        list(pipeline.steps(batches))

    assert len(calls) == 6
    assert not made


def _replace_memory(model):
    bias = model.model.over_arch.model[1].bias
    bias.data = bias.detach() + 1


CHANGES = {
    "hook": add_hook,
    "requires_grad": lambda model: model.model.over_arch.requires_grad_(False),
    "mode": lambda model: model.model.over_arch.eval(),
    "parameter": lambda model: setattr(
        model.model.over_arch.model[1], "bias", nn.Parameter(torch.ones(1))
    ),
    "memory": _replace_memory,
    "module": lambda model: setattr(model.model, "over_arch", copy.deepcopy(model.model.over_arch)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_dense_part_that_changes_after_its_capture_runs_op_by_op(made, batches, name):
    found = []
    for capture in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        steps = pipeline.steps(batches)
        losses = [next(steps)[0] for _ in range(3)]
        CHANGES[name](model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses += [loss for loss, _ in steps]
        found.append((losses, model.state_dict()))

    assert [str(each.message).partition(":")[0] for each in told] == [
        "capture=True has no effect any more"
    ]
    assert pipeline.captured.num_replays == 3
    assert len(made) == 1
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def _call_next(calls):
    return next(calls)()


@pytest.mark.usefixtures("made")
def test_gradients_of_rows_kept_over_steps_are_not_overwritten(batches, monkeypatch):
    """The rows step after every second mini-batch, the dense part after each."""
    found = []
    for capture in (False, True):
        model = make_model(auto_apply=False)
        rows = model.model.sparse_arch.embedding_bag_collection.row_optimizer
        calls = itertools.cycle([lambda: None, rows.step])
        monkeypatch.setattr(rows, "step", partial(_call_next, calls))
        monkeypatch.setattr(rows, "zero_grad", lambda: None)
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        list(pipeline.steps(batches))
        found.append(copy.deepcopy(model.state_dict()))

    assert pipeline.captured.num_replays == len(batches) // 2
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.usefixtures("made")
def test_gradients_kept_over_steps_are_not_overwritten(batches):
    class EveryOther(torch.optim.SGD):
        """Updates after two mini-batches, by the sum of their gradients."""

        num_steps = 0

        def zero_grad(self, set_to_none=True):
            if self.num_steps % 2 == 0:
                super().zero_grad(set_to_none)

        def step(self, closure=None):
            self.num_steps += 1
            if self.num_steps % 2 == 0:
                super().step()

    found = []
    for capture in (False, True):
        model = make_model()
        optimizer = EveryOther(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        list(pipeline.steps(batches))
        found.append(model.state_dict())

    assert pipeline.captured.num_replays == 3
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_an_optimizer_that_zeroes_gradients_in_place_is_told(made, batches):
    class InPlace(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    found = []
    for capture in (False, True):
        model = make_model()
        optimizer = InPlace(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            list(pipeline.steps(batches))
        found.append(model.state_dict())

    assert len(told) == 1
    assert "'model.dense_arch" in str(told[0].message)
    assert pipeline.captured.num_replays == 1
    assert len(made) == 1
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    "make", [lambda seed: make_batch(seed, 5), lambda seed: make_batch(seed, weights=torch.rand(B))]
)
def test_mini_batches_of_other_forms_are_told_once(batches, make):
    others = [*batches, *map(make, range(3))]
    expected = train(others, capture=False)

    with pytest.warns(UserWarning, match="op by op now") as told:
        found = train(others, capture=True)

    assert len(told) == 1
    require_equal(found, expected)
    assert found.captured.num_replays == 6


def test_an_error_while_capturing_is_told_and_training_goes_on(monkeypatch, batches):
    capture_on_cpu(monkeypatch)

    def fail(*_, **__):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(dense_graphs, "GraphRecorder", fail)
    expected = train(batches, capture=False)

    message = "no effect: capturing failed with RuntimeError: operation not permitted$"
    with pytest.warns(UserWarning, match=message) as told:
        found = train(batches, capture=True)

    assert len(told) == 1
    require_equal(found, expected)
    assert found.captured.num_replays == 0


def test_a_head_that_reads_a_parameter_of_the_embeddings_is_told(made, batches):
    class Scaled(DLRM):
        def head(self, embedded_dense, embedded_sparse):
            return super().head(embedded_dense, embedded_sparse) * self.sparse_arch.scale

    def add(model):
        model.model.__class__ = Scaled
        model.model.sparse_arch.scale = nn.Parameter(torch.ones(1))

    expected = train(batches, capture=False, change=add)

    with pytest.warns(UserWarning, match=r"the loss depends on a tensor of shape \(1,\)"):
        found = train(batches, capture=True, change=add)

    require_equal(found, expected)
    assert found.weights["model.sparse_arch.scale"] != 1
    assert not made
