"""The dense part replayed as CUDA graphs, on a GPU."""

import pytest
import torch

from recsys import DLRM
from recsys.embeddings.optimizer import Adagrad
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from tests.captured_training import (
    DENSE,
    add_dropout,
    dense_parameters,
    make_batch,
    make_model,
    train,
)

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Both run the same kernels, unless a library chooses others while it is captured.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-2}


@pytest.fixture
def precision(request):
    """Sets TF32 for the products of float32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if request.param == "tf32" else "ieee"
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def on_gpu(num_batches=8, num_samples=64, **options):
    options["device"] = "cuda:0"
    return [make_batch(seed, num_samples, **options) for seed in range(num_batches)]


def in_precision(precision):
    def wrap(model):
        def forward(batch):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                return model(batch)

        return forward

    return wrap


def require_close(found, expected, tolerance):
    assert len(found.outputs) == len(expected.outputs)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)
    for name, value in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], value, rtol=tolerance, atol=tolerance, msg=lambda _, n=name: n
        )


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("precision", TOLERANCES, indirect=True)
@pytest.mark.parametrize("kind", ["dlrm", "dcn_v2", "deepfm", "masked_transformer"])
def test_replayed_steps_on_a_gpu_are_those_op_by_op(precision, kind):
    options = {
        "kind": kind,
        "device": "cuda:0",
        "dim": 16,
        "custom_model_fwd": in_precision(precision),
    }
    expected = train(on_gpu(), capture=False, **options)

    found = train(on_gpu(), capture=True, **options)

    assert found.captured.reason == ""
    assert found.captured.num_replays == 8
    require_close(found, expected, TOLERANCES[precision])
    first, last = found.outputs[0][2], found.outputs[-1][2]
    assert not torch.equal(first, last)  # each step has memory of its own


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(2)], ids=str)
def test_steps_with_rows_in_two_tiers_are_replayed_on_a_gpu(schedule, dense):
    options = {
        "device": "cuda:0",
        "optimizer": Adagrad(lr=0.1),
        "scale": 10,
        "budget": 60_000,
        "schedule": schedule,
        "dense": dense,
    }
    batches = [*on_gpu(8, 16, scale=10), *on_gpu(1, 3, scale=10), *on_gpu(4, 16, scale=10)]
    expected = train(batches, capture=False, **options)

    found = train(batches, capture=True, **options)

    assert found.captured.reason == ""
    assert found.captured.num_replays == 12
    require_close(found, expected, TOLERANCES["fp32"])


@pytest.mark.gpu
@on_a_gpu
def test_replayed_steps_with_rows_in_two_tiers_wait_for_nothing():
    model = make_model(device="cuda:0", scale=10, budget=60_000)
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.05)
    pipeline = TrainPipeline(model, optimizer, capture=True, schedule=LookAhead(1))
    steps = pipeline.steps(iter(on_gpu(16, 16, scale=10)))
    for _ in range(8):
        next(steps)

    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [next(steps)[0] for _ in range(6)]
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.stack(losses).isfinite().all()
    assert pipeline.captured.num_replays == 14
    [tiers] = model.model.sparse_arch.embedding_bag_collection.tiers()
    assert tiers.hot.map.numbers.replays._recorded  # claims
    assert tiers.hot.space.replays._recorded  # row updates


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("auto_apply", [True, False])
def test_losses_on_a_gpu_are_those_of_autograd(auto_apply):
    """Autograd replays the backward graph, in a thread of its own."""
    seen = []

    def wrap(model):
        parameters, gradients = dense_parameters(model), []
        parameters[0].register_hook(gradients.append)
        seen.append(gradients)

        def forward(batch):
            loss, output = model(batch)
            loss *= 3
            return loss + 0.1 * sum(each.square().sum() for each in parameters), output

        return forward

    options = {"custom_model_fwd": wrap, "auto_apply": auto_apply, "device": "cuda:0"}
    expected = train(on_gpu(), capture=False, **options)

    found = train(on_gpu(), capture=True, **options)

    assert found.captured.num_replays == 8
    require_close(found, expected, TOLERANCES["fp32"])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_a_gpu
def test_random_draws_on_a_gpu_are_those_op_by_op():
    expected = train(on_gpu(), capture=False, change=add_dropout, device="cuda:0")

    found = train(on_gpu(), capture=True, change=add_dropout, device="cuda:0")

    assert found.captured.num_replays == 8
    require_close(found, expected, TOLERANCES["fp32"])


@pytest.mark.gpu
@on_a_gpu
def test_what_waits_for_the_host_cannot_be_captured_on_a_gpu():
    class Waits(DLRM):
        def head(self, embedded_dense, embedded_sparse):
            factor = 1.0 if embedded_dense.sum().item() == torch.inf else 2.0
            return super().head(embedded_dense, embedded_sparse) * factor

    def wait(model):
        model.model.__class__ = Waits

    expected = train(on_gpu(), capture=False, change=wait, device="cuda:0")

    with pytest.warns(UserWarning, match="no effect: capturing failed with"):
        found = train(on_gpu(), capture=True, change=wait, device="cuda:0")

    assert found.captured.num_replays == 0
    require_close(found, expected, TOLERANCES["fp32"])
