"""What lookups refuse of torch's transforms, tracers and kinds of tensors."""

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad

from recsys.embeddings import SGD, HotColdEmbedding, HotColdEmbeddingBag
from recsys.errors import MalformedBags

IDS = torch.tensor([[1, 2], [3, 8]])
NESTED = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3]))


def bag(budget=None, **settings):
    return HotColdEmbeddingBag(
        99, 4, mode="sum", optimizer=SGD(lr=0.1), auto_apply=False, budget=budget, **settings
    )


def trace_without_gradients(module):
    with torch.no_grad():
        torch.jit.trace(module, (IDS,))


def look_up_in_forward_mode():
    with forward_ad.dual_level():
        weights = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        bag()(torch.tensor([1, 1, 2]), torch.tensor([0]), weights)


def differentiate_twice():
    weights = torch.ones(2, 2, requires_grad=True)
    pooled = bag()(IDS, None, weights).square().sum()
    (gradient,) = torch.autograd.grad(pooled, weights, create_graph=True)
    gradient.sum().backward()


def trace_with_hooks():
    module = bag()
    module.register_forward_hook(lambda *_: None)
    fx.symbolic_trace(nn.Sequential(module))


def convert_by_swapping(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    bag().double()


def load_by_swapping(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    bag().load_state_dict(bag().state_dict())


REFUSALS = [
    ("vmap over ids", lambda: torch.vmap(bag())(IDS[:, None]), RuntimeError, "storage"),
    (
        "vmap around a lookup",
        lambda: torch.vmap(lambda factor: factor * bag()(IDS))(torch.ones(3)),
        RuntimeError,
        "vmap",
    ),
    (
        "grad around a lookup",
        lambda: torch.func.grad(lambda factor: (factor * bag()(IDS)).sum())(torch.ones(())),
        RuntimeError,
        "storage",
    ),
    ("jit.trace", lambda: trace_without_gradients(bag()), RuntimeError, "torch.jit.trace"),
    ("jit.trace, tiered", lambda: trace_without_gradients(bag(1000)), RuntimeError, "jit.trace"),
    ("jit.script", lambda: torch.jit.script(bag()), ValueError, "type annotation"),
    ("forward mode", look_up_in_forward_mode, NotImplementedError, "jvp"),
    ("double backward", differentiate_twice, RuntimeError, "once_differentiable"),
    ("nested ids", lambda: bag()(NESTED), MalformedBags, "input"),
    (
        "nested ids of an embedding",
        lambda: HotColdEmbedding(9, 4, optimizer=SGD(lr=0.1))(NESTED),
        MalformedBags,
        "input",
    ),
    ("fx with hooks", trace_with_hooks, TypeError, "HotColdEmbeddingBag"),
    (
        "a lookup on meta",
        lambda: bag(device="meta")(IDS.to("meta")),
        TypeError,
        "meta",
    ),
]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("use", "error", "name"), [each[1:] for each in REFUSALS], ids=[each[0] for each in REFUSALS]
)
def test_a_mode_of_torch_that_lookups_do_not_know_is_refused(use, error, name):
    with pytest.raises(error, match=name):
        use()


@pytest.mark.parametrize("swap", [convert_by_swapping, load_by_swapping])
def test_a_table_is_not_swapped_for_another_parameter(monkeypatch, swap):
    with pytest.raises(RuntimeError, match="swap"):
        swap(monkeypatch)
