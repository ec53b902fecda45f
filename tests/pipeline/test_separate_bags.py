"""Separate bags of a model train as resident ones do, under every schedule."""

import warnings

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings.tiers.budget import floor_bytes, slot_bytes
from recsys.errors import IdOutOfRange
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline

SIZES = [200, 150, 180, 160]
NUM_SAMPLES = 12
ROOMY, TIGHT = 200, 0
SCHEDULES = [
    Sequential(),
    LookAhead(1),
    LookAhead(2),
    Hotline(learning_steps=3),
]


class Bags(nn.Module):
    """Bags with 150 rows or more. A mini-batch is a list with ids (B, L) for each feature."""

    features = (0, 1, 2, 3)  # of each, the number of its bag

    def __init__(self, dims=(4, 4, 4, 4), **options):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, dim, mode="sum", **options)
            for size, dim in zip(SIZES, dims, strict=True)
        )

    def arguments(self, batch):
        """Those of each lookup."""
        return [(ids_BL,) for ids_BL in batch]

    def inputs(self, batch):
        """As for `ids=`."""
        found = {}
        for bag, arguments in zip(self.features, self.arguments(batch), strict=True):
            found.setdefault(f"bags.{bag}", []).append(arguments)
        return found

    def forward(self, batch):
        pooled = [
            self.bags[bag](*arguments).view(len(batch[0]), -1)
            for bag, arguments in zip(self.features, self.arguments(batch), strict=True)
        ]
        return torch.cat(pooled, 1).square().mean(), None


class Several(Bags):
    """Bags that are called several times."""

    features = (0, 1, 0, 2, 0, 3)


class Tied(Bags):
    """Two of the bags have one table."""

    def __init__(self):
        super().__init__()
        self.bags[3] = nn.EmbeddingBag(SIZES[0], 4, mode="sum", _weight=self.bags[0].weight)
        self.bags[3].weight = self.bags[0].weight


class Frozen(Bags):
    def __init__(self):
        super().__init__()
        self.bags[1].weight.requires_grad_(False)


class WithoutEnd(Bags):
    """Offsets without the end of the last bag."""

    def arguments(self, batch):
        offsets = torch.arange(0, batch[0].numel(), batch[0].shape[1])
        return [(ids_BL.reshape(-1), offsets) for ids_BL in batch]


class Mixed(Bags):
    """An `nn.Embedding`, bags of ids in two dtypes, and one with offsets."""

    def __init__(self):
        super().__init__(dims=(4, 8, 4, 4))
        self.bags[3] = nn.Embedding(SIZES[3], 4)

    def arguments(self, batch):
        first, second, third, fourth = batch
        offsets = torch.arange(0, second.numel(), second.shape[1])
        return [(first,), (second.reshape(-1), offsets), (third.int(),), (fourth,)]


class Unforeseen(Bags):
    """Looks up other rows than `ids=` says."""

    def forward(self, batch):
        return super().forward([batch[0], (batch[1] + 37) % 150, *batch[2:]])


def make_batches(num_features=4, length=1, num_rows=150, count=8):
    generator = torch.Generator().manual_seed(1)
    shape = count, num_features, NUM_SAMPLES, length
    found = torch.randint(0, num_rows, shape, generator=generator)
    found[:, :, ::2] %= 5  # half of the samples look up popular rows
    return [list(batch) for batch in found]


def most_rows(batches):
    """The most distinct rows of a mini-batch, if each feature is of another table."""
    return max(sum(len(ids.unique()) for ids in batch) for batch in batches)


def accelerate(model, num_slots):
    """The pipeline's optimizer; None for the number of slots leaves all rows resident."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    budget = None
    if num_slots is not None:
        dims = {bag.weight.shape[1] for bag in model.bags}
        tables = {bag.weight: len(bag.weight) for bag in model.bags}
        slots = [(num_slots, slot_bytes(dim, torch.float32, {})) for dim in dims]
        budget = floor_bytes(sum(tables.values()), slots)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return optimizer


def train(model, batches, num_slots=None, schedule=None):
    """The losses, all rows, and the pipeline."""
    optimizer = accelerate(model, num_slots)
    pipeline = TrainPipeline(model, optimizer, schedule=schedule, ids=model.inputs)
    losses = [loss.item() for loss, _ in pipeline.steps(batches)]
    return losses, model.state_dict(), pipeline


def require_equal(found, expected):
    split = found[2].popular_split
    is_split = split is not None and split.num_split > 0
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_split else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[:2], expected[:2], **tolerance)


@pytest.mark.parametrize("num_more", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bags_train_as_resident_ones_do(schedule, length, num_more):
    batches = make_batches(length=length)
    expected = train(Bags(), batches)

    with warnings.catch_warnings():
        if isinstance(schedule, Hotline):  # pinned rows take slots; else each row has one
            warnings.filterwarnings("ignore", "tables")
        found = train(Bags(), batches, most_rows(batches) + num_more, schedule)

    assert found[2].popular_split is None or found[2].popular_split.num_split or num_more == TIGHT
    require_equal(found, expected)


@pytest.mark.parametrize("kind", [Several, Tied, Frozen, WithoutEnd, Mixed, Unforeseen])
@pytest.mark.parametrize("num_slots", [20, 120])
@pytest.mark.parametrize("schedule", [LookAhead(2), Hotline(learning_steps=3)], ids=str)
@pytest.mark.filterwarnings("ignore:schedule=", "ignore:tables")
def test_so_do_bags_of_every_kind(schedule, num_slots, kind):
    batches = make_batches(len(kind.features), length=2)
    if kind in (WithoutEnd, Mixed) and isinstance(schedule, Hotline):
        schedule = Hotline(learning_steps=99)  # a part has other offsets
    expected = train(kind(), batches)

    found = train(kind(), batches, num_slots, schedule)

    require_equal(found, expected)


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(1)], ids=str)
@pytest.mark.filterwarnings("ignore:tables")
def test_an_invalid_id_in_the_third_bag_is_reported_for_this_bag(schedule):
    [batch] = make_batches(count=1, num_rows=5)
    batch[2][7] = 180  # a row of the first table, but not of this one
    model, valid = Bags(), [torch.zeros_like(ids) for ids in batch]
    pipeline = TrainPipeline(model, accelerate(model, 30), schedule=schedule, ids=model.inputs)

    with pytest.raises(IdOutOfRange, match=r"^table 'bags.2', sample 7: id 180 is not in \[0, 180"):
        for _ in pipeline.steps([valid, batch, valid, valid]):
            pass


@pytest.mark.filterwarnings("ignore:schedule=")
def test_ids_after_the_last_bag_may_be_invalid():
    class Cut(Bags):
        def arguments(self, batch):
            return [(ids.reshape(-1), torch.arange(NUM_SAMPLES)) for ids in batch]

        def forward(self, batch):
            calls = zip(self.bags, self.arguments(batch), strict=True)
            return sum(bag(*arguments).square().mean() for bag, arguments in calls), None

    batches = make_batches(num_rows=5, count=3)
    for batch in batches:
        for ids in batch:
            ids[-1] = 10**6
    expected, *others = [
        train(Cut(include_last_offset=True), batches, num_slots, LookAhead(1))
        for num_slots in (None, 200, 20)
    ]

    for found in others:
        require_equal(found, expected)
