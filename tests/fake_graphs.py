"""`torch.cuda.make_graphed_callables` on the CPU, with what makes the real one hard to use.

It runs the function a few times before it captures. Inputs are copied to the sample arguments,
results and gradients are in memory that the next replay overwrites, and the gradients of a replay
are lost as soon as the next one begins. Backward runs in the autocast state of the capture.
"""

import torch

from recsys.pipeline import captured_dense


def capture_on_cpu(monkeypatch):
    """Let the dense part be captured on the CPU; the result counts calls of the function below."""
    made = []

    def make(function, samples, **options):
        made.append(function)
        return make_graphed_callables(function, samples, **options)

    monkeypatch.setattr(captured_dense, "_CAN_CAPTURE", {"cuda", "cpu"})
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return made


def make_graphed_callables(
    function, samples, num_warmup_iters=3, allow_unused_input=False, pool=None
):
    if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
        raise RuntimeError("make_graphed_callables does not support the autocast caching")
    required = [each for each in samples if each.requires_grad]
    for _ in range(num_warmup_iters):
        outputs = function(*samples)
        _gradients(outputs, required, map(torch.randn_like, outputs), allow_unused_input)
    is_autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    outputs = function(*samples)
    static_outputs = [each.detach().clone() for each in outputs]
    static_seeds = [torch.empty_like(each) for each in outputs]
    found = _gradients(outputs, required, static_seeds, allow_unused_input)
    static_gradients = [None if each is None else each.clone() for each in found]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for sample, each in zip(samples, inputs, strict=True):
                assert sample.shape == each.shape
                if sample.data_ptr() != each.data_ptr():
                    sample.copy_(each)
            for each in static_gradients:
                if each is not None:
                    each.data.fill_(torch.nan)
            with torch.enable_grad():
                Graphed.outputs = function(*samples)
            for static, each in zip(static_outputs, Graphed.outputs, strict=True):
                static.data.copy_(each.detach())  # a graph's writes change no version
            return tuple(each.detach() for each in static_outputs)

        @staticmethod
        def backward(ctx, *gradients):
            for seed, each in zip(static_seeds, gradients, strict=True):
                seed.copy_(each)
            with torch.autocast("cpu", dtype, enabled=is_autocast, cache_enabled=False):
                found = _gradients(Graphed.outputs, required, static_seeds, allow_unused_input)
            for static, each in zip(static_gradients, found, strict=True):
                if static is not None:
                    static.data.copy_(each)
            of_required = iter(static_gradients)
            taken = [next(of_required) if each.requires_grad else None for each in samples]
            return tuple(None if each is None else each.detach() for each in taken)

    return Graphed.apply


def _gradients(outputs, inputs, seeds, allow_unused_input):
    pairs = [pair for pair in zip(outputs, seeds, strict=True) if pair[0].requires_grad]
    outputs, seeds = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=allow_unused_input)
