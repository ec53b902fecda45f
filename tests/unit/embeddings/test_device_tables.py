"""Tables on a device train like those on the CPU, in Triton's interpreter or on a GPU."""

from functools import partial

import pytest
import torch
from torch import nn

from recsys import accelerate
from recsys._support.cuda.own_pages import pages_of
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.embeddings.lookup.inputs import LEFT_OUT, read_ids
from recsys.embeddings.rows.bags import Bags
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.tiers.write_back import write_back
from recsys.errors import IdOutOfRange, MalformedBags, NonFiniteGradient
from tests.unit.embeddings.model import TOO_MANY_ROWS, Tables

pytest.importorskip("triton")

from recsys.embeddings import tables_module
from recsys.embeddings.kernels.triton.row_sort import CHUNK
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

    def __init__(self, device, formula=ADAM, num_slots=None, dim=DIM, num_samples=B, **how):
        self.device, self.num_samples = device, num_samples
        self.on_cpu = Tables(SIZES, FEATURES, dim, formula, **how)
        self.tables = Tables(
            SIZES, FEATURES, dim, formula, num_slots=num_slots, device=device, **how
        )
        self.generator = torch.Generator().manual_seed(3)

    def bags(self, form="one-hot"):
        """The same bags for both."""
        num_samples, num_bags = self.num_samples, len(FEATURES) * self.num_samples
        lengths = torch.full((num_bags,), {"one-hot": 1, "equal": 2}.get(form, 0))
        offsets = weights = None
        if form not in ("one-hot", "equal"):
            lengths = torch.randint(0, 4, (num_bags,), generator=self.generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            offsets = offsets if form == "with the end" else offsets[:-1]
        highs = torch.tensor(SIZES)[FEATURES].repeat_interleave(num_samples)
        highs = highs.repeat_interleave(lengths)
        ids = (torch.rand(len(highs), generator=self.generator) ** 2 * highs).long()
        if form == "weighted":
            weights = torch.rand(len(ids), generator=self.generator)
            weights = weights.to(self.on_cpu.group.compute_dtype)
        mine = Bags(ids, offsets, weights, num_samples, num_bags)
        return mine, self.to_device(mine)

    def to_device(self, bags):
        on_device = (None if part is None else part.to(self.device) for part in bags[:3])
        return Bags(*on_device, *bags[3:])

    def train(self, bags, factors=None):
        """One step of both, which must give the same results."""
        if factors is None:
            shape = self.num_samples, self.on_cpu.width
            factors = torch.randn(shape, generator=self.generator)
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


FORMULAS = [SGD(lr=0.5), Adagrad(lr=0.1), ADAM, RowWiseAdagrad(lr=0.1), PartialRowWiseAdam(lr=0.1)]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: type(formula).__name__)
@pytest.mark.parametrize(
    ("dim", "dtype", "is_mean", "num_slots"),
    [
        (16, torch.float32, False, None),
        (5, torch.float64, True, None),
        (8, torch.bfloat16, False, 9),
        (300, torch.bfloat16, False, None),
    ],
)
def test_every_form_of_bags_trains_as_on_the_cpu(
    triton_device, formula, dim, dtype, is_mean, num_slots
):
    twins = Twins(triton_device, formula, num_slots, dim, dtype=dtype, is_mean=is_mean)
    is_by_row = isinstance(formula, RowWiseAdagrad | PartialRowWiseAdam)
    forms = ["one-hot", "jagged", "equal", "with the end"] + ["weighted"] * (not is_by_row)
    for form in forms[: 1 if is_by_row and is_mean else None]:
        # The squares of quarters add up exactly in any order, without weights and thirds.
        factors = torch.randint(-9, 9, (B, twins.on_cpu.width), generator=twins.generator) / 4
        twins.train(twins.bags(form), factors)
    assert twins.are_equal()


def test_many_lookups_of_a_row_are_summed_chunk_by_chunk(triton_device):
    twins = Twins(triton_device, SGD(lr=1.0), num_samples=2 * CHUNK, dtype=torch.float64)
    bags = twins.bags()
    bags[0].ids[CHUNK // 2 : 4 * CHUNK] = 3
    whole = torch.randint(-9, 9, (2 * CHUNK, twins.on_cpu.width), generator=twins.generator)
    twins.train((bags[0], twins.to_device(bags[0])), whole.double())
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
    batches = [twins.bags("jagged" if number % 3 == 1 else "one-hot") for number in range(6)]
    claims = []
    for number, bags in enumerate(batches):
        twins.tables.fetcher.begin(claims.pop(0) if claims else None)
        twins.backward(bags, torch.randn(B, twins.on_cpu.width, generator=twins.generator))
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
    bags, gradients = twins.bags("jagged"), []
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


def twin_modules(device, patch, kind, formula, settings, budget=None):
    """The same module on the CPU and on a device."""
    how = {"optimizer": formula, "auto_apply": False, **settings}
    on_cpu = kind(7, 4, **how)
    if device.type == "cpu":
        patch.setattr(tables_module, "_make_group", partial(DeviceGroup, device=device))
    ours = kind(7, 4, budget=budget, device=device, **how)
    ours.load_state_dict(on_cpu.state_dict())
    return on_cpu, ours


@pytest.mark.parametrize(("kind", "settings", "arguments"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("budget", [None, 7 * 4 + 3 * (16 * 2 + 11)])
def test_modules_on_a_device_train_like_those_on_the_cpu(
    triton_device, monkeypatch, kind, settings, arguments, budget
):
    made = twin_modules(triton_device, monkeypatch, kind, Adagrad(lr=0.1), settings, budget)
    on_cpu, ours = made
    given = [argument.to(triton_device) for argument in arguments]
    for factor in (1.0, -0.5, 2.0):
        results = []
        for module, of_module in ((on_cpu, arguments), (ours, given)):
            result = module(*of_module)
            factors = torch.arange(1.0, result.numel() + 1, device=result.device) * factor
            (result * factors.view(result.shape)).sum().backward()
            module.row_optimizer.step()
            results.append(result.detach().cpu())
        assert torch.equal(*results)
        assert torch.equal(ours.weight.detach().cpu(), on_cpu.weight.detach())


@pytest.mark.parametrize(("kind", "settings", "arguments"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("budget", [None, 7 * 4 + 3 * (16 + 11)])
def test_a_grad_is_that_of_the_cpu_and_may_be_changed(
    triton_device, monkeypatch, kind, settings, arguments, budget
):
    modules = twin_modules(triton_device, monkeypatch, kind, SGD(lr=0.5), settings, budget)
    left_out = arguments[0].masked_fill(arguments[0] == settings.get("padding_idx", -1), LEFT_OUT)
    for module, ids in zip(modules, (arguments[0], left_out.to(triton_device)), strict=True):
        result = module(ids, *[argument.to(ids.device) for argument in arguments[1:]])
        factors = torch.arange(1.0, result.numel() + 1, device=ids.device)
        (result * factors.view(result.shape)).sum().backward()
        assert module.weight.grad.device == module.weight.device
    grad = modules[0].weight.grad
    torch.testing.assert_close(modules[1].weight.grad.cpu(), grad)
    for module in modules:
        module.weight.grad = (grad * 2).to_sparse(1).to(module.weight.device)
        module.row_optimizer.step()
    assert torch.equal(modules[1].weight.detach().cpu(), modules[0].weight.detach())


def begun(module, device):
    """A module that was made without memory."""
    module.to_empty(device=device).weight.data.copy_(torch.arange(28).view(7, 4))
    return nn.Sequential(module)


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_tables_that_get_a_budget_move_to_the_memory_of_the_host(
    triton_device, monkeypatch, is_accelerated
):
    if triton_device.type == "cpu":
        make = partial(DeviceGroup, device=triton_device)
        monkeypatch.setattr(tables_module, "_make_group", make)
    how = {"optimizer": SGD(lr=1.0), "budget": 7 * 4 + 2 * (16 + 11)}
    kind, settings = (nn.EmbeddingBag, {}) if is_accelerated else (HotColdEmbeddingBag, how)
    model = begun(kind(7, 4, mode="sum", device="meta", **settings), triton_device)
    before = model[0].weight.detach().cpu().clone()
    if is_accelerated:
        accelerate(model, **how)
    model(IDS.view(4, 2).to(triton_device)).sum().backward()
    assert torch.equal(before - IDS.bincount(minlength=7).view(7, 1), model[0].weight.detach())
    assert pages_of(model[0].weight) is not None


@pytest.mark.parametrize("is_collection", [False, True])
def test_tables_with_a_budget_stay_where_they_are_when_a_model_moves(monkeypatch, is_collection):
    make = partial(DeviceGroup, device=torch.device("cpu"))
    monkeypatch.setattr(tables_module, "_make_group", make)
    how = {"optimizer": SGD(lr=1.0), "budget": 7 * 4 + 2 * (16 + 11)}
    table = TableConfig(name="t", num_embeddings=7, embedding_dim=4)
    module = HotColdEmbeddingBagCollection([table], **how)
    if not is_collection:
        module = HotColdEmbeddingBag(7, 4, **how)
    model = nn.Sequential(module, nn.Linear(4, 4))
    before = module.tables()[0].weight.detach().clone()
    module.groups()[0].device = torch.device("meta")
    assert model.to("meta")[1].weight.is_meta
    assert torch.equal(module.tables()[0].weight.detach(), before)
    with pytest.raises(ValueError, match="its memory is fixed while it has a budget"):
        model.double()


def test_input_and_tables_on_another_device_are_refused():
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(MalformedBags, match=r"on cuda:1, .* moved the module, build it"):
        read_ids(ids, torch.float32, torch.device("cuda:1"))
    with pytest.raises(ValueError, match="to move it, build it with device="):
        TableGroup(["t"], [nn.Parameter(torch.empty(3, 4, device="meta"))])
    group = DeviceGroup(["t"], [nn.Parameter(torch.empty(3, 4))], torch.device("cpu"))
    group.device, group.tables[0].data = torch.device("cuda"), torch.empty(3, 4)
    with pytest.raises(ValueError, match=r"bfloat16 on cuda, .* to move it, build it"):
        group.notice_moved_tables()  # as after `module.cpu()`


def test_a_collection_that_is_left_to_torch_may_move():
    table = TableConfig(name="t", num_embeddings=7, embedding_dim=4)
    module = HotColdEmbeddingBagCollection([table])
    ids = JaggedIds.from_one_hot(["t"], IDS.view(1, 8))
    before = module(ids).values()
    module.groups()[0].device = torch.device("cuda")  # as before `module.cpu()`
    assert torch.equal(module(ids).values(), before)


@pytest.mark.parametrize("num_slots", [None, 9])
def test_errors_are_raised_by_the_next_lookup_or_update(triton_device, num_slots):
    twins = Twins(triton_device, SGD(lr=1.0), num_slots)
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
    weights = torch.ones(len(bags.ids), device=twins.device)
    weights[3] = float("nan")
    tables(bags._replace(weights=weights))
    with pytest.raises(MalformedBags, match="weight 3"):
        tables(bags)
    (tables(bags).sum() * float("nan")).backward()
    tables.optimizer.step()
    with pytest.raises(NonFiniteGradient, match="No rows were updated"):
        tables(bags)
    after = tables.values()
    assert all(torch.equal(before[key], after[key]) for key in before)
    write_back(tables.group)  # without slots there is nothing to write
