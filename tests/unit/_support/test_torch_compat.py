"""What recsys expects of the private parts of torch; one that changes fails here, by its name."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from recsys._support import torch_compat
from recsys._support.torch_compat import (
    MODULE_HOOKS,
    NO_PASS,
    active_ddp_module,
    current_pass,
    current_stream_number,
    has_gradient_hooks,
    is_node_in_pass,
    not_compiled,
    queue_callback,
)


class Probe(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx, call, values):
        ctx.call = call
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return None, gradient


def in_backward(call, **options):
    values = torch.ones(2, requires_grad=True)
    Probe.apply(call, values).sum().backward(**options)


def test_a_function_that_is_not_compiled_breaks_the_graph():
    seen = []

    @not_compiled
    def outside(values):
        seen.append(torch.compiler.is_compiling())
        return values + 1

    found = torch.compile(lambda values: outside(values * 2) * 3, backend="eager")(torch.ones(2))

    assert found.tolist() == [9, 9]
    assert seen == [False]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_for_the_gradient_of_a_tensor_is_found_until_it_is_removed(kind):
    table = nn.Parameter(torch.zeros(2))
    before = has_gradient_hooks(table)

    handle = getattr(table, kind)(lambda _: None)
    during = has_gradient_hooks(table)
    handle.remove()

    assert (before, during, has_gradient_hooks(table)) == (False, True, False)


def test_every_backward_pass_has_a_number_of_its_own():
    found = []
    in_backward(lambda: found.append(current_pass()))
    in_backward(lambda: found.append(current_pass()))

    assert NO_PASS not in found
    assert len(set(found)) == 2
    assert current_pass() == NO_PASS


def test_a_pass_knows_which_nodes_it_runs():
    asked, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    node = torch.autograd.graph.get_gradient_edge(other).node
    found = []

    def loss():
        return (Probe.apply(lambda: found.append(is_node_in_pass(node)), asked) * other).sum()

    loss().backward()
    torch.autograd.grad(loss(), asked)

    assert found == [True, False]


def test_a_callback_comes_once_after_the_whole_pass():
    happened = []
    values = torch.ones(1, requires_grad=True)
    values.register_hook(lambda _: happened.append("gradient"))

    def queue():
        queue_callback(lambda: happened.append("callback"))

    Probe.apply(queue, values).sum().backward()

    assert happened == ["gradient", "callback"]


@pytest.mark.usefixtures("process_group")
def test_a_forward_of_ddp_is_seen():
    found = []

    class Looking(nn.Linear):
        def forward(self, values):
            found.append(active_ddp_module())
            return super().forward(values)

    model = nn.parallel.DistributedDataParallel(Looking(2, 1))
    model(torch.ones(1, 2))

    assert found == [model]
    assert active_ddp_module() is None


def test_these_are_all_the_hooks_that_a_module_has():
    module = nn.Linear(1, 1)

    found = {name for name in module.__dict__ if "hook" in name}

    assert found == set(MODULE_HOOKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_have_numbers():
    device = torch.device("cuda", torch.cuda.current_device())
    other = torch.cuda.Stream()

    with torch.cuda.stream(other):
        found = current_stream_number(device)

    assert found == other.cuda_stream
    assert current_stream_number(device) == torch.cuda.current_stream(device).cuda_stream


PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|(?<!recsys)\._version\b|getattr_static\(\s*torch"
    r"|_global_optimizer_|_active_ddp_module|super\(torch\.autograd|mkldnn\._"
    r"|_post_accumulate_grad_hooks\b|torch\._foreach_"
)


def test_no_other_module_of_recsys_names_them():
    files = Path(torch_compat.__file__).parents[1].rglob("*.py")

    found = [
        f"{file}: {private[0]}"
        for file in files
        if file.name != "torch_compat.py"
        for private in PRIVATE.finditer(file.read_text())
    ]

    assert found == []
