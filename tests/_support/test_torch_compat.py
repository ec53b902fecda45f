"""What recsys expects of the private parts of torch; one that changes fails here, by its name."""

import ast
import re
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

from recsys._support import torch_compat
from recsys._support.torch_compat import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    MODULE_HOOKS,
    NO_PASS,
    DisableTorchFunctionSubclass,
    active_ddp_module,
    are_functorch_transforms_active,
    current_pass,
    current_stream_number,
    has_gradient_hooks,
    is_graph_kept,
    is_node_in_pass,
    is_profiler_enabled,
    not_compiled,
    onednn_linear,
    outside_graphs,
    plain_apply,
    plain_data,
    plain_grad,
    queue_callback,
    set_plain_data,
    set_plain_grad,
    top_saved_tensors_hooks,
    version_of,
    versions_of,
)


class Watched(nn.Parameter):
    """Notes what torch asks of it, and has attributes of its own in the place of torch's."""

    seen = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Hiding(nn.Parameter):
    @property
    def grad(self):
        raise AssertionError("torch's is meant")

    @property
    def data(self):
        raise AssertionError("torch's is meant")

    @property
    def requires_grad(self):
        raise AssertionError("torch's is meant")


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


def test_a_function_outside_graphs_breaks_them_and_is_called_as_it_is_elsewhere():
    seen = []

    @outside_graphs
    def outside(values):
        seen.append(torch.compiler.is_compiling())
        return values + 1

    found = torch.compile(lambda values: outside(values * 2) * 3, backend="eager")(torch.ones(2))

    assert found.tolist() == [9, 9]
    assert outside(torch.ones(1)).tolist() == [2]
    assert seen == [False, False]


def test_every_name_is_tested():
    source = ast.parse(Path(__file__).read_text())

    used = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}

    assert not set(torch_compat.__all__) - used


def test_a_subclass_is_a_plain_tensor_while_its_function_is_disabled():
    table = Watched(torch.ones(3))
    Watched.seen = ()

    with DisableTorchFunctionSubclass():
        total = table + 1
    untold = Watched.seen

    assert (type(total), untold) == (torch.Tensor, ())
    torch.add(table, 1)
    assert Watched.seen


def test_a_write_in_place_is_a_new_version():
    tensor = torch.zeros(3)
    before = version_of(tensor)

    tensor.add_(1)
    view = tensor[1:]
    view.zero_()

    assert version_of(tensor) == version_of(view) == before + 2
    assert versions_of([tensor, torch.zeros(1), view]) == [before + 2, 0, before + 2]


def test_a_write_through_data_is_no_new_version():
    tensor = torch.zeros(3)
    before = version_of(tensor)

    tensor.data.add_(1)

    assert version_of(tensor) == before


def test_attributes_that_a_subclass_hides_are_read_and_set():
    hiding = Hiding(torch.zeros(2))
    gradient, rows = torch.ones(2), torch.full((2,), 3.0)

    set_plain_grad(hiding, gradient)
    set_plain_data(hiding, rows)

    assert plain_grad(hiding) is gradient
    assert plain_data(hiding).data_ptr() == rows.data_ptr()
    set_plain_grad(hiding, None)
    assert plain_grad(hiding) is None


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


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_pass_knows_whether_its_graph_is_kept(is_kept):
    found = []

    in_backward(lambda: found.append(is_graph_kept()), retain_graph=is_kept)

    assert found == [is_kept]


def test_a_callback_comes_once_after_the_whole_pass():
    happened = []
    values = torch.ones(1, requires_grad=True)
    values.register_hook(lambda _: happened.append("gradient"))

    def queue():
        queue_callback(lambda: happened.append("callback"))

    Probe.apply(queue, values).sum().backward()

    assert happened == ["gradient", "callback"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_is_kept_until_its_pass_ends_also_with_an_error(fails):
    class Callback:
        def __call__(self):
            pass

    found, values = [], torch.ones(1, requires_grad=True)

    def queue():
        callback = Callback()
        found.append(weakref.ref(callback))
        queue_callback(callback)

    def look(_):
        found.append(found[0]() is not None)
        if fails:
            raise RuntimeError("the hook fails")

    values.register_hook(look)
    with pytest.raises(RuntimeError, match="the hook fails") if fails else nullcontext():
        Probe.apply(queue, values).sum().backward()

    assert found[1] is True
    assert found[0]() is None


def test_hooks_of_saved_tensors_are_seen_as_checkpointing_sets_them():
    found = []

    def look(values):
        found.append(top_saved_tensors_hooks(True) is not None)
        return values * 2

    look(torch.ones(1))
    checkpoint(look, torch.ones(1, requires_grad=True), use_reentrant=False)

    assert found == [False, True]


def test_a_function_is_applied_without_a_look_for_transforms():
    called = []
    values = torch.ones(2, requires_grad=True)

    result = plain_apply(Probe)(lambda: called.append(True), values)
    result.sum().backward()

    assert called == [True]
    assert torch.equal(values.grad, torch.ones(2))


def test_transforms_are_seen():
    found = []

    def look(values):
        found.append(are_functorch_transforms_active())
        return values + 1

    look(torch.ones(1))
    torch.func.vmap(look)(torch.ones(3))

    assert found == [False, True]


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


def test_hooks_of_steps_are_seen_until_they_are_removed():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)

    for register, hooks in (
        (optimizer.register_step_pre_hook, optimizer._optimizer_step_pre_hooks),
        (optimizer.register_step_post_hook, optimizer._optimizer_step_post_hooks),
        (register_optimizer_step_pre_hook, GLOBAL_STEP_PRE_HOOKS),
        (register_optimizer_step_post_hook, GLOBAL_STEP_POST_HOOKS),
    ):
        handle = register(lambda *_: None)
        during = len(hooks)
        handle.remove()
        assert (during, len(hooks)) == (1, 0)


def test_a_profiler_is_seen():
    before = is_profiler_enabled()
    with torch.autograd.profiler.profile():
        during = is_profiler_enabled()

    assert (before, during, is_profiler_enabled()) == (False, True, False)


def test_these_are_all_the_hooks_that_a_module_has():
    module = nn.Linear(1, 1)

    found = {name for name in module.__dict__ if "hook" in name}

    assert found == set(MODULE_HOOKS)


def test_a_handle_removes_its_hook_from_a_module_that_shares_the_dictionaries():
    module, successor, called = nn.Identity(), nn.Identity(), []
    handle = module.register_forward_hook(lambda *_: called.append(True))
    for name in MODULE_HOOKS:
        successor.__dict__[name] = module.__dict__[name]

    successor(torch.ones(1))
    handle.remove()
    successor(torch.ones(1))

    assert called == [True]


@pytest.mark.skipif(onednn_linear is None, reason="torch is built without oneDNN")
@pytest.mark.parametrize("has_bias", [False, True])
def test_onednn_multiplies_as_torch_does(has_bias):
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    bias = torch.randn(3, generator=generator) if has_bias else None

    found = onednn_linear(left, right, bias, "none", [], "")

    torch.testing.assert_close(found, nn.functional.linear(left, right, bias))


def test_the_cpu_has_one_stream():
    assert current_stream_number(torch.device("cpu")) == 0


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
