import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import recsys
from recsys.conversion import verify as verify_module
from recsys.embeddings.rows.tables import TableGroup
from recsys.embeddings.tables_module import groups_of


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, 4, mode="mean", sparse=True, dtype=dtype) for size in (9, 5)
        )
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.drop = nn.Dropout(0.2)
        self.top = nn.Linear(8, 1, dtype=dtype)

    def forward(self, ids):
        pooled = torch.cat([bag(row) for bag, row in zip(self.bags, ids, strict=True)], 1)
        return self.top(self.drop(self.norm(pooled))).squeeze(1)


def batches(number=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        ids = [torch.randint(0, size, (7, 3), generator=generator) for size in (9, 5)]
        yield ids, torch.rand(7, generator=generator, dtype=dtype)


def loss_of(model, batch):
    ids, labels = batch
    return mse_loss(model(ids), labels)


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = Model(dtype)
    if name == "sparse_adam":
        dense = [*model.norm.parameters(), *model.top.parameters()]
        return model, [torch.optim.SparseAdam(model.bags.parameters()), torch.optim.Adam(dense)]
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    return model, kind(model.parameters(), lr=0.05)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_agrees_with_its_accelerated_self(name, dtype):
    model, optimizer = build(name, dtype)

    report = recsys.verify(model, batches(dtype=dtype), loss=loss_of, optimizer=optimizer)

    assert report.ok
    assert report.differences == []
    assert report.num_steps == 6
    is_double = dtype == torch.float64
    assert (report.rtol, report.atol) == ((1e-9, 1e-9) if is_double else (1e-5, 1e-7))


def test_model_optimizer_and_random_numbers_stay_as_they_are():
    model, optimizer = build("adagrad")
    loss_of(model, next(batches())).backward()
    optimizer.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    modules, gradient = list(model.modules()), model.top.weight.grad
    numbers = torch.get_rng_state()

    recsys.verify(model, batches(), loss=loss_of, optimizer=optimizer)

    torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
    assert list(model.modules()) == modules
    assert model.top.weight.grad is gradient
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.equal(torch.get_rng_state(), numbers)


def test_no_more_batches_are_taken_than_steps_are_asked_for():
    model, optimizer = build("sgd")
    source = batches(5)

    report = recsys.verify(model, source, loss=loss_of, optimizer=optimizer, steps=2)

    assert report.num_steps == 2
    assert len(list(source)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_move_otherwise_are_found_and_named(monkeypatch, dtype):
    model, optimizer = build("sgd", dtype)
    right = TableGroup.update

    def wrong(group, joined, formula, rates_T2, keys_T):
        return right(group, joined, formula, rates_T2 * 1.01, keys_T)

    monkeypatch.setattr(TableGroup, "update", wrong)

    report = recsys.verify(model, batches(dtype=dtype), loss=loss_of, optimizer=optimizer)

    assert not report.ok
    first = report.differences[0]
    assert (first.step, first.what, first.name) == (0, "row", "bags.0.weight")
    assert "Mismatched elements" in first.error
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.step = 1
    assert {each.step for each in report.differences if each.what == "row"} == set(range(6))
    assert {each.what for each in report.differences} == {"row"}


def test_state_is_compared(monkeypatch):
    model, optimizer = build("adagrad")
    right = TableGroup.update

    def wrong(group, *arguments):
        bad = right(group, *arguments)
        state_of_first = group.tensors[len(group.tables)]
        state_of_first += 1
        return bad

    monkeypatch.setattr(TableGroup, "update", wrong)

    report = recsys.verify(model, batches(1), loss=loss_of, optimizer=optimizer)

    assert {(each.what, each.name) for each in report.differences} == {
        ("state", "bags.0.weight sum")
    }


class Tables(nn.Module):
    """Tables that a budget does not hold."""

    def __init__(self, *, sparse=True):
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 4, mode="mean", sparse=sparse)
        self.embedding = nn.Embedding(80, 4, padding_idx=0, sparse=sparse)
        self.drop, self.top = nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, ids):
        found = torch.cat([self.bag(ids), self.embedding(ids).sum(1)], 1)
        return self.top(self.drop(found)).squeeze(1)


def batches_of_tables():
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        ids = torch.randint(0, 60, (7, 2), generator=generator)
        yield ids, torch.rand(7, generator=generator)


@pytest.mark.parametrize("sparse", [True, False])
def test_with_a_budget_each_step_is_that_without_to_the_last_bit(sparse):
    model = Tables(sparse=sparse)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    report = recsys.verify(
        model, batches_of_tables(), loss=loss_of, optimizer=optimizer, budget="3KiB"
    )

    assert report.ok
    assert report.num_steps == 6


def test_a_row_that_only_a_budget_gets_wrong_is_found(monkeypatch):
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    real = verify_module.restore

    def lose_a_bit(copied):
        is_tiered = any(group.num_slots for group in groups_of(copied))
        real(copied)
        if is_tiered:
            with torch.no_grad():
                copied.bag.weight[7, 0] = copied.bag.weight[7, 0].nextafter(torch.tensor(9.0))

    monkeypatch.setattr(verify_module, "restore", lose_a_bit)

    report = recsys.verify(
        model, batches_of_tables(), loss=loss_of, optimizer=optimizer, budget="2KiB"
    )

    assert not report.ok
    wrong = {(each.what, each.name) for each in report.differences}
    assert wrong == {("budget row", "bag.weight")}
    assert "at index (7, 0)" in report.differences[0].error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_model_on_a_gpu_agrees_and_so_does_its_run_at_a_budget(name):
    torch.manual_seed(0)
    bags = nn.ModuleList(nn.EmbeddingBag(300, 4, mode="sum", sparse=True) for _ in range(2)).cuda()
    optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    ids = [torch.randint(0, 300, (7, 3), device="cuda") for _ in range(6)]

    report = recsys.verify(
        bags,
        ids,
        loss=lambda model, batch: sum(bag(batch).square().sum() for bag in model),
        optimizer=optimizer(bags.parameters(), lr=0.05),
        budget=2400 + 60 * 40,
    )

    assert report.ok, str(report)
    assert report.num_steps == 6
