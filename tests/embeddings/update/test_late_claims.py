"""Lookups that read rows where they are: the update claims slots for all of them.

The CPU stands in for a device that reaches the tables. A run is that of resident tables, to the
last bit.
"""

import copy
import random
import threading

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings.lookup.prefetch_requests import prefetch_together
from recsys.embeddings.tiers.residency import Residency
from recsys.errors import BudgetTooSmall, IdOutOfRange
from tests.host_copies import reach_host, use_triton

SIZES = {"first": 270, "second": 210, "padded": 240, "wide": 180, "sequence": 225}
BUDGET = "13KiB"  # of 25 KiB without state


class Tables(nn.Module):
    """Two dims, a table of two modules, padding, sums and means, and a sequence."""

    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.EmbeddingBag(270, 4, mode="sum", sparse=sparse)
        self.second = nn.EmbeddingBag(210, 4, mode="mean", sparse=sparse)
        self.padded = nn.EmbeddingBag(240, 4, mode="sum", sparse=sparse, padding_idx=2)
        self.wide = nn.EmbeddingBag(180, 8, mode="sum", sparse=sparse)
        self.sequence = nn.Embedding(225, 4, sparse=sparse)
        self.again = nn.EmbeddingBag(270, 4, mode="sum", sparse=sparse)
        self.again.weight = self.first.weight

    def forward(self, ids):
        starts = torch.arange(0, len(ids["second"]), 2).to(ids["second"])
        found = [
            self.first(ids["first"].unsqueeze(1)),
            self.second(ids["second"], starts),
            self.padded(ids["padded"].view(-1, 1)),
            self.sequence(ids["sequence"]),
            self.again(ids["first"].flip(0).unsqueeze(1)),
            self.wide(ids["wide"].unsqueeze(1)),
        ]
        return sum(each.square().sum() for each in found)


@pytest.fixture(autouse=True)
def _reaches_the_host(monkeypatch, device):
    reach_host(monkeypatch)


def make_ids(draw, device):
    size = draw.choice([2, 4, 10])
    dtypes = [torch.int64, torch.int32]
    return {
        name: torch.tensor(
            [draw.randrange(rows) for _ in range(size)], dtype=draw.choice(dtypes)
        ).to(device)
        for name, rows in SIZES.items()
    }


def make(device, budget, kind=torch.optim.SGD, *, is_sparse=True):
    model = Tables(sparse=is_sparse).to(device)
    optimizer = kind(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return model, optimizer


def draw_step(model, optimizer, draw, device):
    """One step with what a program may do in it; the losses."""
    losses = []
    optimizer.zero_grad()
    for _ in range(draw.choice([1, 1, 2, 3])):
        loss = model(make_ids(draw, device))
        losses.append(loss.detach())
        if draw.random() < 0.8:  # else an evaluation with gradients on
            loss.backward()
    with torch.no_grad():
        losses.append(model(make_ids(draw, device)))
    what = draw.choice(["nothing", "nothing", "write", "gradient", "freeze"])
    frozen = draw.choice(list(SIZES))
    if what == "write":
        with torch.no_grad():
            model.second.weight[5:9] *= 0.5
    if what == "gradient" and model.padded.weight.grad is not None:
        model.padded.weight.grad = model.padded.weight.grad * 0.5
    if what == "freeze":
        getattr(model, frozen).weight.requires_grad_(False)
    optimizer.step()
    getattr(model, frozen).weight.requires_grad_(True)
    return losses


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_that_of_resident_tables(device, refused, seed, kind):
    found = []
    for budget in (None, BUDGET):
        model, optimizer = make(device, budget, kind)
        draw = random.Random(seed)
        losses = [draw_step(model, optimizer, draw, device) for _ in range(15)]
        found.append((losses, copy.deepcopy(model.state_dict())))

    (expected, expected_rows), (losses, rows) = found
    tiers = model.first.tiers()
    assert len(tiers) == 2
    assert all(each.residency.counts.num_written_back for each in tiers)
    assert not any(refused)
    for ours, theirs in zip(losses, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    for name, table in expected_rows.items():
        assert torch.equal(rows[name].cpu(), table.cpu()), name


def test_triton_kernels_train_as_with_resident_tables(device, monkeypatch):
    use_triton(monkeypatch)
    found = []
    for budget in (None, BUDGET):
        model, optimizer = make(device, budget)
        draw = random.Random(7)
        for _ in range(2):
            optimizer.zero_grad()
            model(make_ids(draw, device)).backward()
            optimizer.step()
        found.append(model.state_dict())

    for name, table in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), table.cpu(), msg=name)


def test_slots_are_held_in_the_update_alone(device):
    model, optimizer = make(device, BUDGET)
    tiers = model.first.tiers()
    claims = [each.residency.counts.num_rows for each in tiers]

    loss = model(make_ids(random.Random(0), device))
    loss.backward()

    assert [each.residency.num_claimed for each in tiers] == [0, 0]
    assert [each.residency.counts.num_rows for each in tiers] == claims
    optimizer.step()
    assert [each.residency.num_claimed for each in tiers] == [0, 0]
    assert all(each.residency.counts.num_rows for each in tiers)


@pytest.mark.parametrize("num_more", [0, 1])
def test_rows_of_small_tables_are_not_waited_for(device, monkeypatch, num_more):
    """The host knows how many values each lookup has, so that small tables need few slots."""
    monkeypatch.setattr(Residency, "_claim_and_wait", None)
    torch.manual_seed(0)
    sizes = [2000, 5, 5, 5]
    model = nn.ModuleList(nn.EmbeddingBag(size, 4, mode="sum", sparse=True) for size in sizes)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget="16KiB")
    [tiers] = model[0].tiers()
    assert 200 + 15 < tiers.hot.num_slots < 4 * 100

    for number, bag in enumerate(model):
        ids = torch.arange(100 + number * num_more, device=device) % len(bag.weight)
        bag(ids, ids[:1]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("is_read", "is_sparse"), [(False, True), (True, True), (True, False)])
def test_the_budget_is_divided_anew_for_a_step_that_needs_more_of_one_dim(
    device, is_read, is_sparse
):
    """Where gradients were read, as by clipping, no lookup has claimed slots for their rows."""
    found = []
    for budget in (None, BUDGET):
        model, optimizer = make(device, budget, is_sparse=is_sparse)
        slots = [each.hot.num_slots for each in model.first.tiers()]
        ids = torch.arange(170, device=device).unsqueeze(1)
        model.wide(ids).square().sum().backward()
        model.first(ids[:4]).square().sum().backward()
        if is_read:
            model.wide.weight.grad = model.wide.weight.grad * 0.5
        model.wide(ids + 10).square().sum().backward()  # in the ledger, beside `grad`
        optimizer.step()
        found.append(model.state_dict())

    assert [each.hot.num_slots for each in model.first.tiers()] != slots
    for name, table in found[0].items():
        assert torch.equal(found[1][name].cpu(), table.cpu()), name


def test_gradients_with_too_many_rows_name_the_budget(device):
    model, optimizer = make(device, BUDGET)
    for name in ("first", "second", "padded"):
        table = getattr(model, name).weight
        table.grad = torch.ones_like(table)

    with pytest.raises(BudgetTooSmall, match=r"weight\.grad of tables of embedding_dim 4"):
        optimizer.step()

    assert model.first.weight.grad is not None


def test_an_error_that_is_kept_holds_no_slots(device):
    """Its traceback would: the claim for `first` succeeds before that for `padded` fails."""
    model, optimizer = make(device, BUDGET)
    ids = torch.arange(150, device=device).unsqueeze(1)
    bad = ids.clone()
    bad[1] = 5000
    (model.first(ids).sum() + model.padded(bad).sum()).backward()

    with pytest.raises(IdOutOfRange) as kept:
        optimizer.step()

    assert [each.residency.num_claimed for each in model.first.tiers()] == [0, 0]
    assert kept.value.__traceback__ is not None


def test_a_late_claim_takes_one_that_was_made_ahead_for_the_same_ids(device):
    """One of several lookups that share a claim; its slots cannot be shared again."""
    found = []
    for budget in (None, BUDGET):
        model, optimizer = make(device, budget)
        model.first(ids := torch.arange(9, device=device).unsqueeze(1)).square().sum().backward()
        if budget:
            modules = model.first, model.again
            list(prefetch_together([each.prefetch_request(ids) for each in modules]))
        optimizer.step()
        found.append(model.first.weight.detach().cpu())

    assert torch.equal(*found)


def test_a_step_with_too_many_rows_names_the_budget_and_keeps_the_gradients(device):
    model, optimizer = make(device, BUDGET)
    before = copy.deepcopy(model.state_dict())
    rows = {name: torch.arange(size, device=device) for name, size in SIZES.items()}
    used = ("first", "second", "padded", "sequence", "wide")
    loss = sum(getattr(model, name)(rows[name].unsqueeze(1)).sum() for name in used)
    loss.backward()

    with pytest.raises(BudgetTooSmall, match="budget"):
        optimizer.step()

    assert all(
        torch.equal(*pair)
        for pair in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert model.first.weight.grad.coalesce()._nnz() == 270
    optimizer.zero_grad()
    model(make_ids(random.Random(0), device)).backward()
    optimizer.step()


@pytest.mark.parametrize("is_scarce", [False, True])
def test_an_id_that_is_no_row_is_named_and_nothing_is_updated(device, is_scarce):
    """With few slots the host waits for the claim, which refuses the id."""
    model, optimizer = make(device, BUDGET)
    before = copy.deepcopy(model.state_dict())
    count = 180 if is_scarce else 3
    ids = torch.arange(count, device=device).unsqueeze(1)
    bad = ids.clone()
    bad[1] = 210
    loss = model.first(ids).sum() + model.second(bad).sum() + model.padded(ids).sum()
    loss.backward()

    with pytest.raises(IdOutOfRange, match="table 'second', sample 1: id 210"):
        optimizer.step()
    if is_scarce:
        with pytest.raises(IdOutOfRange, match=r"table 'second': .* an earlier error"):
            optimizer.step()

    optimizer.zero_grad()
    assert all(
        torch.equal(*pair)
        for pair in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_a_lookup_waits_for_another_thread_that_claims_ahead(device):
    model, _ = make(device, BUDGET)
    tiers, found = model.first.tiers()[0], []
    thread = threading.Thread(target=lambda: found.append(tiers.may_claim_later), daemon=True)

    with tiers.lock:
        thread.start()
        thread.join(0.1)
        assert not found
    thread.join()
    assert found == [True]
