"""Tables on a device train like those on the CPU, in Triton's interpreter or on a GPU."""

from functools import partial

import pytest
import torch

from recsys.embeddings.optimizer import SGD, Adagrad, Adam
from recsys.embeddings.rows.bags import Bags
from recsys.embeddings.tiers.write_back import write_back
from recsys.errors import IdOutOfRange, MalformedBags, NonFiniteGradient
from tests.unit.embeddings.model import TOO_MANY_ROWS, Tables

pytest.importorskip("triton")

from recsys.embeddings import tables_module
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.rows.device_tables import DeviceGroup
from recsys.embeddings.tiers import device_fetch

pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")
ADAM = Adam(lr=0.1)
SIZES, FEATURES, DIM, B = [4, 30, 12], [0, 1, 1, 2], 4, 3


class LateMoves:
    """A side stream that claims at once, and moves rows as late as the main stream lets it."""

    def __init__(self, fetcher, patch):
        self.waiting, write_dirty, move = [], fetcher.write_dirty, device_fetch.move_rows
        fetcher.queue = self
        patch.setattr(device_fetch, "move_rows", lambda *of: self.waiting.append((move, of)))
        patch.setattr(fetcher, "write_dirty", lambda: (write_dirty(), self.finish()))

    def run(self, work, given):
        work()

    def finish(self):
        while self.waiting:
            move, of = self.waiting.pop(0)
            move(*of)


class Twins:
    """The same tables on the CPU and on a device."""

    def __init__(self, device, formula=ADAM, num_slots=None, **how):
        self.device = device
        self.on_cpu = Tables(SIZES, FEATURES, DIM, formula, **how)
        self.tables = Tables(
            SIZES, FEATURES, DIM, formula, num_slots=num_slots, device=device, **how
        )
        self.generator = torch.Generator().manual_seed(3)

    def bags(self, *, is_jagged=False):
        """The same bags for both."""
        num_bags = len(FEATURES) * B
        lengths = torch.ones(num_bags, dtype=torch.int64)
        if is_jagged:
            lengths = torch.randint(0, 4, (num_bags,), generator=self.generator)
        highs = torch.tensor(SIZES)[FEATURES].repeat_interleave(B).repeat_interleave(lengths)
        ids = (torch.rand(len(highs), generator=self.generator) ** 2 * highs).long()
        offsets = lengths.cumsum(0) - lengths if is_jagged else None
        mine = self.on_cpu.bags(ids, offsets)
        return mine, self.to_device(mine)

    def to_device(self, bags):
        ids, offsets = (None if part is None else part.to(self.device) for part in bags[:2])
        return Bags(ids, offsets, None, *bags[3:])

    def train(self, bags):
        """One step of both, which must give the same results."""
        factors = torch.randn(B, self.on_cpu.width, generator=self.generator)
        self.backward(bags, factors)
        for tables in (self.on_cpu, self.tables):
            tables.optimizer.step()

    def backward(self, bags, factors):
        for tables, of_tables in zip((self.on_cpu, self.tables), bags, strict=True):
            pooled = tables(of_tables)
            expected = self.on_cpu(bags[0]) if tables is self.tables else pooled
            with torch.no_grad():
                assert torch.equal(pooled.cpu(), expected)
            (pooled * factors.to(pooled.device, pooled.dtype)).sum().backward()

    def are_equal(self):
        mine, its = self.on_cpu.values(), self.tables.values()
        return mine.keys() == its.keys() and all(
            torch.equal(mine[key], its[key].cpu()) for key in mine
        )


@pytest.mark.parametrize("formula", [SGD(lr=0.5), Adagrad(lr=0.1), ADAM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_tables_train_like_those_on_the_cpu(triton_device, formula, dtype):
    twins = Twins(triton_device, formula, dtype=dtype)
    for number in range(4):
        twins.train(twins.bags(is_jagged=number % 2 == 1))
    assert twins.are_equal()


@pytest.mark.parametrize(
    ("num_slots", "is_late", "num_ahead"),
    [(1, True, 1), (9, False, 0), (9, True, 0), (9, True, 3), (46, True, 1)],
)
def test_tables_in_two_tiers_train_like_those_on_the_cpu(
    triton_device, monkeypatch, num_slots, is_late, num_ahead
):
    twins = Twins(triton_device, num_slots=num_slots, planned=[5, 40])
    if is_late:
        LateMoves(twins.tables.fetcher, monkeypatch)
    batches = [twins.bags(is_jagged=number % 3 == 1) for number in range(6)]
    claims = []
    for number, bags in enumerate(batches):
        twins.tables.fetcher.begin(claims.pop(0) if claims else None)
        factors = torch.randn(B, twins.on_cpu.width, generator=twins.generator)
        twins.backward(bags, factors)
        if number == 4:
            claims = []  # mini-batches that were claimed may be dropped
        elif num_ahead:
            following = batches[number + 1 + len(claims) : number + 1 + num_ahead]
            claims += [twins.tables.claim_ahead(later) for _, later in following]
        for tables in (twins.on_cpu, twins.tables):
            tables.optimizer.step()
        if number == 3:
            assert twins.are_equal()
    assert twins.are_equal()
    counts = twins.tables.fetcher.counts
    assert counts.lookups
    assert (counts.left > 0) == (num_slots < 46)


def test_a_caller_may_write_to_a_table_in_two_tiers(triton_device, monkeypatch):
    twins = Twins(triton_device, num_slots=9)
    LateMoves(twins.tables.fetcher, monkeypatch)
    twins.train(twins.bags())
    for tables in (twins.on_cpu, twins.tables):
        with torch.no_grad():
            tables.weights[1].mul_(2)
    twins.train(twins.bags())
    assert twins.are_equal()


@pytest.mark.parametrize("num_slots", [None, 9])
@pytest.mark.parametrize("is_mean", [False, True])
def test_weights_of_ids_have_the_gradient_that_they_have_on_the_cpu(
    triton_device, num_slots, is_mean
):
    twins = Twins(triton_device, num_slots=num_slots, is_mean=is_mean)
    bags, gradients = twins.bags(is_jagged=True), []
    for tables, of_tables in zip((twins.on_cpu, twins.tables), bags, strict=True):
        weights = torch.linspace(-1, 1, len(of_tables.ids), device=of_tables.ids.device)
        weights.requires_grad_()
        pooled = tables(of_tables._replace(weights=weights))
        (pooled * torch.arange(tables.width, device=pooled.device)).sum().backward()
        tables.optimizer.step()
        gradients.append(weights.grad.cpu())
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()
    assert twins.are_equal()


IDS, OFFSETS = torch.tensor([1, 2, 1, 0, 3, 3, 6, 1]), torch.tensor([0, 2, 4, 4, 7])
WEIGHTS = torch.linspace(0.1, 1, 8)
MODULES = {
    "offsets": (HotColdEmbeddingBag, {"mode": "sum"}, (IDS, OFFSETS)),
    "padding": (HotColdEmbeddingBag, {"mode": "mean", "padding_idx": 1}, (IDS.view(4, 2),)),
    "weights": (HotColdEmbeddingBag, {"mode": "sum"}, (IDS, OFFSETS, WEIGHTS)),
    "unpooled": (HotColdEmbedding, {"padding_idx": 1}, (IDS.view(2, 4),)),
}


@pytest.mark.parametrize(("kind", "settings", "arguments"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("budget", [None, 7 * 4 + 3 * (16 * 2 + 11)])
def test_modules_on_a_device_train_like_those_on_the_cpu(
    triton_device, monkeypatch, kind, settings, arguments, budget
):
    on_cpu = kind(7, 4, optimizer=Adagrad(lr=0.1), **settings)
    if triton_device.type == "cpu":
        make = partial(DeviceGroup, device=triton_device)
        monkeypatch.setattr(tables_module, "_make_group", make)
    how = {"optimizer": Adagrad(lr=0.1), "budget": budget, "device": triton_device}
    ours = kind(7, 4, **how, **settings)
    ours.load_state_dict(on_cpu.state_dict())
    given = [argument.to(triton_device) for argument in arguments]
    for factor in (1.0, -0.5, 2.0):
        results = []
        for module, of_module in ((on_cpu, arguments), (ours, given)):
            result = module(*of_module)
            factors = torch.arange(1.0, result.numel() + 1, device=result.device) * factor
            (result * factors.view(result.shape)).sum().backward()
            results.append(result.detach().cpu())
        assert torch.equal(*results)
        assert torch.equal(ours.weight.detach().cpu(), on_cpu.weight.detach())


def test_errors_are_raised_by_the_next_lookup_or_update(triton_device):
    twins = Twins(triton_device, SGD(lr=1.0))
    (_, bags), tables = twins.bags(), twins.tables
    before = tables.values()
    bad = bags._replace(ids=bags.ids.clone())
    bad.ids[4] = 30
    tables(bad).sum().backward()
    with pytest.raises(IdOutOfRange, match="'t1': id 30, number 4"):
        tables.optimizer.step()
    tables.optimizer.zero_grad()
    offsets = torch.arange(len(FEATURES) * B, device=twins.device)
    offsets[7] = 99
    tables(bags._replace(offsets=offsets))
    with pytest.raises(MalformedBags, match=r"offsets\[7\] = 99"):
        tables(bags)
    (tables(bags).sum() * float("nan")).backward()
    tables.optimizer.step()
    with pytest.raises(NonFiniteGradient, match="No rows were updated"):
        tables(bags)
    after = tables.values()
    assert all(torch.equal(before[key], after[key]) for key in before)
    write_back(tables.group)  # without slots there is nothing to write
