"""What reads a ledger waits for the streams on which backward has filled it."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbedding
from recsys.embeddings.lookup import backward_streams
from recsys.embeddings.lookup.backward_streams import BackwardStreams
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.update import late_claims
from recsys.embeddings.update.group_updater import GroupUpdater
from tests.host_copies import reach_host

DEVICE = torch.device("cuda", 0)


class FakeStream:
    device = DEVICE

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.fixture
def use(monkeypatch):
    """Makes a stream the current one."""

    def use(stream):
        monkeypatch.setattr(backward_streams, "current_stream_number", lambda _: id(stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    return use


def test_each_other_stream_is_waited_for_once(use):
    streams, known = [FakeStream() for _ in range(3)], BackwardStreams()
    for stream in (*streams, *streams):
        use(stream)
        known.note(DEVICE)

    known.wait()
    known.wait()

    assert set(streams[2].waited_for) == set(streams[:2])
    assert len(streams[2].waited_for) == 2
    assert not streams[0].waited_for


def test_the_current_stream_is_not_waited_for(use):
    stream, known = FakeStream(), BackwardStreams()
    use(stream)
    known.note(DEVICE)

    known.wait()

    assert not stream.waited_for


@pytest.fixture
def order(monkeypatch):
    """What happens to ledgers, in order."""
    found = []

    def note(owner, name, what):
        function = getattr(owner, name)

        def noted(*arguments, **options):
            found.append(what)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(TableGroup, "keep", "keep")
    note(BackwardStreams, "wait", "wait")
    note(GroupUpdater, "update_rows", "update")
    note(late_claims, "join_inputs", "claim")
    return found


@pytest.mark.parametrize("reads", ["step", "grad"])
@pytest.mark.parametrize("budget", [None, "8KiB"])
def test_updates_claims_and_reads_of_a_gradient_wait(monkeypatch, device, order, budget, reads):
    reach_host(monkeypatch)
    model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum", sparse=True)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    order.clear()

    model(torch.arange(8, device=device).unsqueeze(1)).sum().backward()
    if reads == "step":
        optimizer.step()
    else:
        assert model[0].weight.grad is not None

    assert order[:2] == ["keep", "wait"]
    assert ("claim" in order) == (budget is not None and reads == "step")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("reads", ["end of backward", "step", "grad"])
@pytest.mark.parametrize("budget", [None, "8KiB"])
def test_gradients_of_another_stream_are_waited_for_on_a_gpu(budget, reads):
    """A model of tables alone sets no `grad`, so autograd does not have this stream wait."""
    torch.manual_seed(0)
    rows, ids = torch.rand(1000, 4), torch.arange(100)
    module = HotColdEmbedding(
        1000,
        4,
        _weight=rows.clone() if budget else rows.cuda(),
        device="cuda",
        optimizer=SGD(lr=0.5),
        auto_apply=reads == "end of backward",
        budget=budget,
    )
    other, on_device = torch.cuda.Stream(), ids.cuda()
    for _ in range(2):  # compiles kernels
        module(on_device).sum().backward()
        if reads != "end of backward":
            module.row_optimizer.step()
    before = module.weight.detach().cpu()

    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        loss = module(on_device).square().sum()
        torch.cuda._sleep(200_000_000)
    loss.backward()
    if reads == "step":
        module.row_optimizer.step()
    if reads == "grad":
        gradient = module.weight.grad.to_dense()[:100].cpu()
        torch.testing.assert_close(gradient, 2 * before[:100])
    else:
        torch.testing.assert_close(module.weight.detach()[:100].cpu(), torch.zeros(100, 4))
