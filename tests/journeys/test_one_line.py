"""Journey 3: one line on a model of PyTorch or of TorchRec."""

import copy

import pytest
import torch
from torch import nn

import recsys
from recsys.errors import BudgetTooSmall

SIZES, DIM, BATCH = (900, 500, 200), 16, 64
BUDGET = "64KiB"  # of 100 KiB of rows and as much state


class OfPyTorch(nn.Module):
    """Bags of PyTorch, and a dense layer."""

    def __init__(self, device):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True, device=device) for size in SIZES
        )
        self.top = nn.Linear(DIM * len(SIZES), 1, device=device)

    def forward(self, ids):
        """Logits of ids (tables, B, L)."""
        return self.top(
            torch.cat([bag(rows) for bag, rows in zip(self.tables, ids, strict=True)], 1)
        )


class OfTorchRec(nn.Module):
    """The same tables in a collection of TorchRec."""

    def __init__(self, device):
        super().__init__()
        torchrec = pytest.importorskip("torchrec")
        names = [f"f{number}" for number in range(len(SIZES))]
        self.keyed, self.names = torchrec.KeyedJaggedTensor, names
        self.tables = torchrec.EmbeddingBagCollection(
            device=device,
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t_{name}", embedding_dim=DIM, num_embeddings=size, feature_names=[name]
                )
                for name, size in zip(names, SIZES, strict=True)
            ],
        )
        self.top = nn.Linear(DIM * len(SIZES), 1, device=device)

    def forward(self, ids):
        """Logits of ids (tables, B, L)."""
        lengths = torch.full((ids.shape[0] * ids.shape[1],), ids.shape[2], device=ids.device)
        features = self.keyed(keys=self.names, values=ids.reshape(-1), lengths=lengths)
        return self.top(self.tables(features).values())


def loss_of(model, ids):
    return (model(ids).squeeze(1) - ids[0, :, 0] / SIZES[0]).square().mean()


def train(model, optimizer, batches):
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        losses.append(loss_of(model, ids))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device(request.param)


@pytest.fixture(params=[OfPyTorch, OfTorchRec])
def start(request, device):
    """A function that builds the same model and optimizer each time, and 2,048 samples."""
    generator = torch.Generator().manual_seed(0)
    highest = torch.tensor(SIZES).view(-1, 1, 1)
    batches = [
        (torch.rand(len(SIZES), BATCH, 2, generator=generator).square() * highest).long().to(device)
        for _ in range(32)
    ]

    def build():
        torch.manual_seed(0)
        model = request.param(device)
        return model, torch.optim.Adagrad(model.parameters(), lr=0.05)

    return build, batches


def require_equal_rows(model, expected, **tolerance):
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name, **tolerance)


def test_a_model_trains_as_before_and_on_a_budget_to_the_last_bit(start):
    build, batches = start
    plain, resident, tiered = build(), build(), build()
    recsys.accelerate(resident[0], optimizer=resident[1], always=True)
    recsys.accelerate(tiered[0], optimizer=tiered[1], budget=BUDGET)

    expected, of_resident, of_tiered = (train(*each, batches) for each in (plain, resident, tiered))
    for model in (resident[0], tiered[0]):
        recsys.restore(model)

    torch.testing.assert_close(of_resident, expected)
    assert torch.equal(of_tiered, of_resident)
    assert expected[-8:].mean() < expected[:8].mean()
    require_equal_rows(resident[0], plain[0], rtol=1e-4, atol=1e-6)
    require_equal_rows(tiered[0], resident[0], rtol=0, atol=0)


def test_a_restored_model_is_plain_and_trains_on(start):
    build, batches = start
    plain, taken = build(), build()
    kinds = [type(module) for module in taken[0].modules()]
    recsys.accelerate(taken[0], optimizer=taken[1], budget=BUDGET)
    assert [type(module) for module in taken[0].modules()] != kinds
    for each in (plain, taken):
        train(*each, batches[:16])
    recsys.restore(taken[0])

    assert [type(module) for module in taken[0].modules()] == kinds
    torch.testing.assert_close(train(*taken, batches[16:]), train(*plain, batches[16:]))


def test_it_is_verified_and_estimated_first(start):
    build, batches = start
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())

    report = recsys.verify(model, batches[:4], loss=loss_of, optimizer=optimizer, budget=BUDGET)
    estimate = recsys.estimate(model, BUDGET, optimizer=optimizer)

    assert report.ok, str(report)
    assert "KiB" in str(estimate)
    with pytest.raises(BudgetTooSmall):
        recsys.estimate(model, "1KiB", optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
