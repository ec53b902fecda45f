"""One autograd node for the calls of many modules on a device; the CPU stands in for one."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recsys
from recsys.embeddings.lookup.one_table.device_calls import DeviceCalls
from recsys.embeddings.tiers.slots import Slots
from recsys.errors import IdOutOfRange
from tests.embeddings.lookup.models_on_device import (
    DIM,
    NUM_ROWS,
    NUM_SAMPLES,
    Bags,
    Model,
    accelerated,
    make_ids,
    train,
    trained_bags,
)
from tests.host_copies import reach_host

# What it does there can be seen, and tests of tiers on a device do the same on a GPU.
on_the_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


def nodes_of(outputs):
    """The nodes behind the views that are handed out."""
    return {output.grad_fn.next_functions[0][0] for output in outputs}


@pytest.mark.in_ci("cuda", "torch-cpu", "triton-cpu-cat")
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("join", "optimizer", "dtype"),
    [
        ("cat", "SGD", torch.float32),
        ("stack", "Adagrad", torch.float32),
        ("sum", "SGD", torch.float64),
    ],
    ids=lambda each: str(each).removeprefix("torch."),
)
def test_rows_have_the_bits_of_lookups_with_a_node_each(
    monkeypatch, device, join, optimizer, dtype
):
    def run():
        model, step = accelerated(device, optimizer, join=join, dtype=dtype)
        sizes = [NUM_SAMPLES, NUM_SAMPLES, 1, NUM_SAMPLES]
        ids = [make_ids(seed, size).to(device) for seed, size in enumerate(sizes)]
        return [train(model, step, each) for each in ids], model.state_dict()

    losses, rows = run()

    monkeypatch.setattr(DeviceCalls, "look_up", lambda *_, **__: None)
    expected_losses, expected_rows = run()
    assert losses == expected_losses
    assert all(torch.equal(rows[name], expected_rows[name]) for name in expected_rows)


@pytest.mark.usefixtures("each_way")
def test_calls_share_a_node_that_has_the_gradients_of_torch(device):
    model, _ = trained_bags(device)
    plain = Bags().to(device)
    plain.load_state_dict(model.state_dict())
    ids = make_ids(2).to(device)

    outputs = model.vectors(ids)

    assert len(nodes_of(outputs)) == 1
    for vectors in (outputs, plain.vectors(ids)):
        torch.cat(vectors, 1).square().sum().backward()
    for ours, theirs in zip(model.bags, plain.bags, strict=True):
        torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


@pytest.mark.usefixtures("each_way")
def test_columns_of_a_matrix_are_looked_up_as_by_torch(device):
    def vectors(model, ids):
        starts = torch.arange(0, len(ids), 2, device=ids.device)
        found = [bag(ids[:, number : number + 1]) for number, bag in enumerate(model.bags)]
        return [*found, model.sequence(ids[:, 3]), model.jagged[0](ids[:, 4], starts)]

    plain = Model().to(device)
    model, _ = accelerated(device)
    ids = make_ids(0).T.contiguous().to(device)

    torch.testing.assert_close(vectors(model, ids), vectors(plain, ids))


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@on_the_cpu
def test_the_ids_of_all_calls_are_copied_by_one_operation_and_need_no_offsets(monkeypatch, device):
    model, optimizer = trained_bags(device)
    kernels = model.bags[0]._group.kernels
    monkeypatch.setattr(kernels, "pooled_lookup", lambda *_: -1)
    ids = make_ids(2).to(device)

    with Operations() as forward:
        outputs = model.vectors(ids)
    with Operations() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])

    assert not {"arange", "clone"} & set(forward.names)
    assert forward.names.count("copy_") == 1  # the report
    assert backward.names.count("cat") == 1
    assert not {"clone", "arange"} & set(backward.names)
    optimizer.zero_grad()


@pytest.mark.usefixtures("each_way")
def test_ids_may_be_overwritten_after_backward(device):
    models = [trained_bags(device) for _ in range(2)]
    for is_overwritten, (model, optimizer) in enumerate(models):
        ids = make_ids(2).to(device)
        model(ids).backward()
        if is_overwritten:
            ids.fill_(NUM_ROWS)
        optimizer.step()

    found, expected = (model.state_dict() for model, _ in models)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ids_changed_in_place_before_backward_are_refused(device):
    model, _ = trained_bags(device)
    ids = make_ids(2).to(device)
    loss = model(ids)

    ids[0, 0] = 0

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_that_is_kept_has_a_second_backward_and_others_have_none(device):
    model, optimizer = trained_bags(device)
    ids = make_ids(2).to(device)
    loss = model(ids)
    loss.backward(retain_graph=True)
    once = model.bags[0].weight.grad.to_dense().clone()

    loss.backward()

    torch.testing.assert_close(model.bags[0].weight.grad.to_dense(), 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.zero_grad()


def test_a_table_frozen_after_its_call_gets_no_gradient(device):
    model, optimizer = trained_bags(device)
    before = copy.deepcopy(model.state_dict())
    loss = model(make_ids(2).to(device))

    model.bags[1].weight.requires_grad_(False)
    loss.backward()
    optimizer.step()

    is_same = [torch.equal(model.state_dict()[name], rows) for name, rows in before.items()]
    assert is_same == [False, True, False, False]


def test_rows_are_updated_although_the_module_is_gone(device):
    model, _ = trained_bags(device)
    weights = [bag.weight for bag in model.bags]
    before = weights[0].detach().clone()
    outputs = model.vectors(make_ids(2).to(device))
    known = weakref.ref(model)

    del model
    gc.collect()

    assert known() is None
    torch.cat(outputs, 1).sum().backward()
    assert torch.equal(weights[0], before)
    assert weights[0].grad is not None


@pytest.mark.usefixtures("each_way")
def test_a_step_waits_for_nothing(device, no_round_trips):
    model, optimizer = trained_bags(device)
    ids = make_ids(2).to(device)

    with no_round_trips:
        model(ids).backward()
        optimizer.step()

    assert model.bags[0].weight.grad is None


def test_other_forms_are_left_to_the_general_path(device, refused):
    ended = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", include_last_offset=True, device=device)
    bag = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", device=device)
    model = nn.ModuleList([ended, bag])
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), always=True)
    ids = make_ids(0)[0].unsqueeze(1).to(device)
    bounds = torch.arange(NUM_SAMPLES, device=device)
    with torch.inference_mode():
        without_version = ids.clone()

    model[1](ids)
    model[1](ids.view(-1), bounds)
    model[1](ids.view(1, -1))
    assert refused == [False] * 3
    refused.clear()
    model[0](ids.view(-1), torch.cat([bounds, bounds[:1] + NUM_SAMPLES]))
    model[1](ids.view(-1), bounds.int())
    with torch.inference_mode():
        bounds_without_version = bounds.clone()
    model[1](ids.view(-1), bounds_without_version)
    model[1](ids, per_sample_weights=torch.ones_like(ids, dtype=torch.float32))
    with torch.no_grad():
        model[1](without_version)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        model[1](ids)

    assert refused == [True] * 6


def test_ids_on_another_device_are_refused_by_name(device):
    model, _ = trained_bags(device)

    with pytest.raises(ValueError, match="ids must be on the device where rows are looked up"):
        model.bags[0](make_ids(0)[0].unsqueeze(1).to("meta"))


def test_moved_rows_are_looked_up_where_they_are(device):
    model, optimizer = accelerated("cpu", make=Bags)
    train(model, optimizer, make_ids(0))

    model.to(device)
    losses = [train(model, optimizer, make_ids(seed).to(device)) for seed in (1, 2)]

    plain = Bags()
    by_torch = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [train(plain, by_torch, make_ids(seed)) for seed in range(3)]
    torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(expected[1:]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_calls_on_other_streams_have_nodes_of_their_own():
    device = torch.device("cuda", 0)
    model, optimizer = trained_bags(device)
    ids = make_ids(2).to(device).unsqueeze(2)
    torch.cuda.synchronize()
    first = model.bags[0](ids[0])
    other = torch.cuda.Stream()

    with torch.cuda.stream(other):
        second = model.bags[1](ids[1])

    assert len(nodes_of([first, second])) == 2
    torch.cuda.synchronize()
    optimizer.zero_grad()


@on_the_cpu
@pytest.mark.parametrize("join", ["cat", "sum"])
def test_with_a_budget_rows_have_the_bits_of_lookups_by_the_general_path(
    monkeypatch, device, refused, join
):
    reach_host(monkeypatch)

    def run():
        model, optimizer = accelerated(device, budget=2900, join=join)
        assert model.bags[0].tiers()
        losses = [train(model, optimizer, make_ids(seed)) for seed in range(6)]
        return losses, model.state_dict()

    losses, rows = run()
    assert not all(refused)

    monkeypatch.setattr(DeviceCalls, "look_up", lambda *_, **__: None)
    expected_losses, expected_rows = run()
    assert losses == expected_losses
    assert all(torch.equal(rows[name], expected_rows[name]) for name in expected_rows)


@on_the_cpu
@pytest.mark.parametrize("is_bag", [True, False], ids=["bag", "embedding"])
def test_a_claim_made_ahead_needs_no_offsets_and_its_copy_of_the_ids_is_kept(
    monkeypatch, device, refused, is_bag
):
    reach_host(monkeypatch)
    make = nn.EmbeddingBag if is_bag else nn.Embedding
    options = {"mode": "sum"} if is_bag else {"padding_idx": 0}
    model = nn.Sequential(make(1000, DIM, sparse=True, **options))
    plain = copy.deepcopy(model)
    optimizer, by_torch = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    recsys.accelerate(model, optimizer=optimizer, budget="8KiB")
    ids = torch.stack([make_ids(0)[0], make_ids(1)[0]]).T[:, :1]  # not contiguous
    given = ids if is_bag else ids[:, 0]
    known = given.clone()

    with Operations() as ahead:
        claimed = model[0].prefetch(given)
    with Operations() as now:
        output = model[0](given)
    output.square().sum().backward()
    given.fill_(1)
    optimizer.step()

    assert claimed.is_held is False  # the lookup has taken it
    assert "arange" not in ahead.names[: ahead.names.index("clone")]
    assert "equal" not in now.names
    assert refused == [False]
    plain[0](known).square().sum().backward()
    by_torch.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@on_the_cpu
def test_ids_that_a_claim_has_copied_are_kept_for_the_stream_of_the_lookup(monkeypatch, device):
    reach_host(monkeypatch)
    model = nn.Sequential(nn.EmbeddingBag(1000, DIM, mode="sum", sparse=True))
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), budget="8KiB")
    kept = []
    monkeypatch.setattr(Slots, "_keep", lambda _, tensor: kept.append(tensor))
    ids = make_ids(0)[0].unsqueeze(1)

    model[0].prefetch(ids)
    kept.clear()
    output = model[0](ids)

    [call] = output.grad_fn.next_functions[0][0].node.calls
    assert any(each is call.input.values for each in kept)


@on_the_cpu
def test_a_claim_made_ahead_of_an_id_that_is_no_row_names_it(monkeypatch, device):
    reach_host(monkeypatch, None)  # so that a claim waits
    model = nn.Sequential(nn.EmbeddingBag(1000, DIM, mode="sum", sparse=True))
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), budget="8KiB")

    with pytest.raises(IdOutOfRange, match=r"table '0', sample 1: id 1000 is not in \[0, 1000\)"):
        model[0].prefetch(torch.tensor([[3], [1000]]))
