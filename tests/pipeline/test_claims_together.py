"""Separate bags: those with tables in one group make one claim for a mini-batch.

On the CPU, and on a device that copies rows by itself, for which the CPU stands in.
"""

import gc
import warnings

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.lookup.prefetch_requests import prefetch_together
from recsys.embeddings.tiers.ahead import InputIds
from recsys.embeddings.tiers.residency import Residency
from recsys.errors import IdOutOfRange
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline
from tests.host_copies import reach_host, use_triton
from tests.torch_kernels import BY_TORCH, TorchSlotMap

SIZES = [200, 150, 180, 160]
NUM_SAMPLES = 12
NUM_STEPS = 8
ROOMY, TIGHT = 200, 0


@pytest.fixture(autouse=True, params=["cpu", "device"])
def place(request, monkeypatch):
    if request.param == "cpu":
        yield request.param
        return
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
    reach_host(monkeypatch)
    yield request.param
    errors_on(torch.device("cpu")).forget()


@pytest.fixture
def claims(monkeypatch):
    """Gets whether each claim is made ahead."""
    found, claim = [], Residency.claim

    def note(*arguments, in_background=False, **options):
        found.append(in_background)
        return claim(*arguments, in_background=in_background, **options)

    monkeypatch.setattr(Residency, "claim", note)
    return found


class Bags(nn.Module):
    """Bags. A mini-batch is a list with ids (B, L) for each feature.

    Args:
        calls: For each feature, the number of its bag.
    """

    def __init__(self, calls=(0, 1, 2, 3), dims=(4, 4, 4, 4), padding=(None,) * 4, **options):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, dim, mode="sum", padding_idx=id, **options)
            for size, dim, id in zip(SIZES, dims, padding, strict=True)
        )
        self.calls = calls

    def arguments(self, ids_BL):
        return (ids_BL,)

    def inputs(self, batch):
        """As for `ids=`."""
        found = {}
        for bag, ids_BL in zip(self.calls, batch, strict=True):
            found.setdefault(f"bags.{bag}", []).append(self.arguments(ids_BL))
        return found

    def forward(self, batch):
        pooled = [
            self.bags[bag](*self.arguments(ids_BL))
            for bag, ids_BL in zip(self.calls, batch, strict=True)
        ]
        return torch.cat(pooled, 1).square().mean(), None


class FlatBags(Bags):
    """Bags that are given offsets."""

    offsets = torch.tensor([0, 0, 1, 2, 5, 6, 7, 7, 8, 9, 10, 12])

    def arguments(self, ids_BL):
        return ids_BL.view(-1), self.offsets


def make_batches(num_features=4, length=1, num_rows=150, count=NUM_STEPS):
    generator = torch.Generator().manual_seed(1)
    shape = count, num_features, NUM_SAMPLES, length
    # Half of the samples look up popular rows.
    found = torch.randint(0, num_rows, shape, generator=generator)
    found[:, :, ::2] %= 5
    # Ids are views of one tensor.
    return [list(batch) for batch in found]


def accelerate(model, num_slots, tables=SIZES, dims=(4,)):
    """A pipeline's optimizer; None for the number of slots keeps all rows on the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    budget = None
    if num_slots is not None:
        budget = 4 * sum(tables) + sum(num_slots * (4 * dim + 8) for dim in dims)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return optimizer


def train(model, batches, num_slots=None, schedule=None, **options):
    """The losses, all rows, and the pipeline."""
    optimizer = accelerate(model, num_slots, **options)
    schedule = Sequential() if num_slots is None else schedule
    pipeline = TrainPipeline(model, optimizer, schedule=schedule, ids=model.inputs)
    losses = [loss.item() for loss, _ in pipeline.steps(batches)]
    if num_slots is not None:
        [tiers, *_] = model.bags[0].tiers()
        assert tiers.residency.num_claimed == 0
        assert len(tiers.residency._holds) == 0
    return losses, model.state_dict(), pipeline


def require_equal(found, expected, *, is_split=False):
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_split else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[:2], expected[:2], **tolerance)


def most_rows(batches):
    """The most distinct rows of a mini-batch whose features are of different tables."""
    return max(sum(len(ids.unique()) for ids in batch) for batch in batches)


SCHEDULES = [
    Sequential(),
    LookAhead(1),
    LookAhead(2),
    Hotline(learning_steps=0),
    Hotline(learning_steps=2),
]


@pytest.mark.parametrize("num_more", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.filterwarnings("ignore:schedule=")
def test_bags_train_as_resident_ones_do_under_every_schedule(schedule, length, num_more):
    batches = make_batches(length=length)
    expected = train(Bags(), batches)

    found = train(Bags(), batches, most_rows(batches) + num_more, schedule)

    split = found[2].popular_split
    assert split is None or split.num_split > 0 or num_more == TIGHT
    require_equal(found, expected, is_split=split is not None and split.num_split > 0)


@pytest.mark.parametrize("kind", [Bags, FlatBags], ids=["2-D", "with offsets"])
@pytest.mark.parametrize("dims", [(4,), (4, 8)], ids=str)
def test_a_mini_batch_makes_one_claim_for_each_table_group(claims, dims, kind):
    dims_of = (*dims, *dims, *dims, *dims)[:4]
    batches = make_batches()
    expected = train(kind(dims=dims_of), batches)

    found = train(kind(dims=dims_of), batches, 200, LookAhead(2), dims=dims)

    assert claims == [True] * (NUM_STEPS * len(dims))
    assert found[2].mean_depth > 1.5
    require_equal(found, expected)


@pytest.mark.parametrize("place", ["device"], indirect=True)
def test_triton_kernels_read_the_slots_of_a_shared_claim(monkeypatch, claims):
    pytest.importorskip("triton")
    use_triton(monkeypatch)
    # 11 samples: the slots of the second bag do not begin at a multiple of 16 bytes.
    batches = [[ids[:11] for ids in batch] for batch in make_batches(count=3)]
    expected = train(Bags(), batches)

    found = train(Bags(), batches, 200, LookAhead(1))

    assert claims == [True] * 3
    require_equal(found, expected)


@pytest.mark.parametrize("schedule", [LookAhead(2), Hotline(learning_steps=0)], ids=str)
def test_a_bag_that_is_called_several_times_is_in_the_same_claim(claims, schedule):
    calls = 0, 1, 0, 2, 0, 3
    batches = make_batches(len(calls))
    expected = train(Bags(calls), batches)

    found = train(Bags(calls), batches, 300, schedule)

    assert claims == [True] * NUM_STEPS
    split = found[2].popular_split
    require_equal(found, expected, is_split=split is not None and split.num_split > 0)


def test_bags_with_one_table_are_in_the_same_claim(claims):
    # Two of the bags look up the same rows.
    batches = [[*batch[:3], batch[0]] for batch in make_batches()]
    models = [Bags(), Bags()]
    for model in models:
        model.bags[3] = nn.EmbeddingBag(SIZES[0], 4, mode="sum", _weight=model.bags[0].weight)
        model.bags[3].weight = model.bags[0].weight
    expected = train(models[0], batches)

    found = train(models[1], batches, 200, LookAhead(2))

    assert claims == [True] * NUM_STEPS
    require_equal(found, expected)


def test_a_frozen_bag_claims_nothing_and_keeps_its_rows(claims):
    batches = make_batches()
    models = [Bags(), Bags()]
    for model in models:
        model.bags[1].weight.requires_grad_(False)
    before = models[1].bags[1].weight.clone()
    expected = train(models[0], batches)

    found = train(models[1], batches, 200, LookAhead(2))

    assert claims == [True] * NUM_STEPS
    require_equal(found, expected)
    assert torch.equal(models[1].bags[1].weight, before)


@pytest.mark.parametrize(
    "options",
    [{"padding": [2] * 4}, {"padding": [2, 2, 3, None]}],
    ids=str,
)
@pytest.mark.parametrize("schedule", [LookAhead(2), Hotline(learning_steps=0)], ids=str)
@pytest.mark.filterwarnings("ignore:schedule=")
def test_bags_of_every_setting_train_as_resident_ones_do(schedule, options):
    batches = make_batches(length=2)
    expected = train(Bags(**options), batches)

    found = train(Bags(**options), batches, 300, schedule)

    split = found[2].popular_split
    require_equal(found, expected, is_split=split is not None and split.num_split > 0)


class Mixed(Bags):
    """Bags of different numbers of ids, an `nn.Embedding`, and ids of two dtypes."""

    def __init__(self):
        super().__init__()
        self.bags[3] = nn.Embedding(SIZES[3], 4)

    def arguments_of(self, batch):
        first, second, third, fourth = batch
        return [
            (first,),
            (second.reshape(-1)[:-5], torch.arange(NUM_SAMPLES)),
            (third.int(),),
            (fourth,),
        ]

    def inputs(self, batch):
        return {f"bags.{number}": each for number, each in enumerate(self.arguments_of(batch))}

    def forward(self, batch):
        calls = zip(self.bags, self.arguments_of(batch), strict=True)
        pooled = [bag(*each).view(NUM_SAMPLES, -1) for bag, each in calls]
        return torch.cat(pooled, 1).square().mean(), None


@pytest.mark.parametrize("schedule", [LookAhead(2), Hotline(learning_steps=0)], ids=str)
@pytest.mark.filterwarnings("ignore:schedule=")
def test_lookups_of_other_numbers_of_ids_or_dtypes_make_claims_of_their_own(claims, schedule):
    batches = make_batches(length=2)
    expected = train(Mixed(), batches)
    if isinstance(schedule, Hotline):  # whose parts the model cannot be given
        schedule = Hotline(learning_steps=NUM_STEPS)

    found = train(Mixed(), batches, 300, schedule)

    # The first bag shares its claim with the embedding.
    assert claims == [True] * (3 * NUM_STEPS)
    require_equal(found, expected)


def prefetch(model, batch):
    """Claim for a mini-batch, as a pipeline does."""
    calls = [
        (model.get_submodule(name), arguments)
        for name, inputs in model.inputs(batch).items()
        for arguments in inputs
    ]
    return list(prefetch_together(bag.prefetch_request(*each) for bag, each in calls))


def test_only_rows_of_bags_that_were_looked_up_count_as_updated():
    model, [batch] = Bags(), make_batches(count=1)
    optimizer = accelerate(model, 200)
    [claim] = prefetch(model, batch)
    ids = batch[2]

    model.bags[2](ids).sum().backward()
    claim.cancel()
    optimizer.step()

    [tiers] = model.bags[0].tiers()
    rows, _ = tiers.hot.dirty()
    first = sum(SIZES[:2])
    assert sorted(rows.tolist()) == sorted({first + each for each in ids.flatten().tolist()})


def test_the_slots_of_a_shared_claim_are_given_up_at_once(claims):
    model, [batch] = Bags(), make_batches(count=1, num_rows=150)
    accelerate(model, most_rows([batch]) + 4)
    [claim] = prefetch(model, batch)
    assert claim.is_held

    model.bags[0](torch.arange(100, 120).view(-1, 1)).sum()

    assert claim.is_given_up
    assert not claim.is_held
    assert claims == [True, False, False]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("wrong", [[1], [3], [0, 2]], ids=str)
def test_bags_of_other_ids_than_known_need_no_more_slots(wrong, schedule):
    class Shifted(Bags):
        def forward(self, batch):
            changed = [(ids + 37) % 150 if bag in wrong else ids for bag, ids in enumerate(batch)]
            return super().forward(changed)

    batches = make_batches()
    expected = train(Shifted(), batches)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other ids, and of a budget for a shorter look-ahead
        found = train(Shifted(), batches, most_rows(batches), schedule)

    split = found[2].popular_split
    require_equal(found, expected, is_split=split is not None and split.num_split > 0)


def test_a_lookup_that_lacks_slots_gets_those_of_a_shared_claim_that_no_lookup_needs():
    model, [batch] = Bags(), make_batches(count=1)
    num_rows = most_rows([batch])
    accelerate(model, num_rows)
    [claim] = prefetch(model, batch)
    [tiers] = model.bags[0].tiers()
    kept = [model.bags[0](batch[0]), model.bags[3](batch[3])]
    num_kept = len(batch[0].unique()) + len(batch[3].unique())

    others = torch.arange(100, 100 + num_rows - num_kept).view(-1, 1)
    kept.append(model.bags[1](others))

    assert claim.is_given_up
    assert tiers.residency.num_claimed == num_rows
    del kept
    assert tiers.residency.num_claimed == 0


def test_an_error_after_a_shared_claim_leaves_no_ticket(monkeypatch):
    model, [batch] = Bags(), make_batches(count=1)
    accelerate(model, 200)
    [tiers] = model.bags[0].tiers()
    copies, copy = [], InputIds.copy

    def fail_at_third(*arguments):
        copies.append(arguments)
        if len(copies) == 3:
            raise MemoryError
        return copy(*arguments)

    monkeypatch.setattr(InputIds, "copy", fail_at_third)

    with pytest.raises(MemoryError):
        prefetch(model, batch)

    gc.collect()  # the error's frames
    assert not tiers.ahead
    assert tiers.residency.num_claimed == 0


def test_slots_stay_claimed_until_the_last_lookup_is_done():
    model, [batch] = Bags(), make_batches(count=1)
    accelerate(model, 200)
    [claim] = prefetch(model, batch)
    [tiers] = model.bags[0].tiers()
    num_rows = most_rows([batch])

    for number in (3, 1, 0):
        model.bags[number](batch[number])
        assert claim.is_held
        assert tiers.residency.num_claimed == num_rows
    model.bags[2](batch[2])
    assert not claim.is_held
    assert tiers.residency.num_claimed == 0


def test_too_few_slots_claim_nothing(claims):
    model, [batch] = Bags(), make_batches(count=1)
    accelerate(model, most_rows([batch]) - 1)

    [claim] = prefetch(model, batch)

    [tiers] = model.bags[0].tiers()
    assert not claim.has_room
    assert claims == [True]
    assert tiers.residency.num_claimed == 0


@pytest.mark.parametrize("num_slots", [200, 30], ids=["queued", "waited for"])
def test_an_invalid_id_in_the_third_bag_is_reported_for_this_bag(num_slots, monkeypatch, place):
    waited, claim = [], TorchSlotMap.claim
    monkeypatch.setattr(
        TorchSlotMap, "claim", lambda *arguments: waited.append(1) or claim(*arguments)
    )
    [batch] = make_batches(count=1, num_rows=5)
    batch[2][7] = 180  # a row of the first table, but not of this one
    model, valid = Bags(), [torch.zeros_like(ids) for ids in batch]
    optimizer = accelerate(model, num_slots)
    pipeline = TrainPipeline(model, optimizer, schedule=LookAhead(1), ids=model.inputs)

    with pytest.raises(IdOutOfRange, match=r"^table 'bags.2', sample 7: id 180 is not in \[0, 180"):
        for _ in pipeline.steps([valid, batch, valid, valid]):
            pass

    assert bool(waited) == (num_slots == 30 and place == "device")
    [tiers] = model.bags[0].tiers()
    gc.collect()  # the error's frames
    assert tiers.residency.num_claimed == 0


def test_ids_after_the_last_bag_may_be_invalid():
    class Cut(Bags):
        bounds = torch.arange(NUM_SAMPLES)  # the end of the last bag is before the last id

        def arguments(self, ids_BL):
            return ids_BL.view(-1), self.bounds

    batches = make_batches(num_rows=5, count=3)
    for batch in batches:
        for ids in batch:
            ids[-1] = 10**6
    runs = [
        train(Cut(include_last_offset=True), batches, num_slots, LookAhead(1))
        for num_slots in (None, 200, 20)
    ]

    require_equal(runs[1], runs[0])
    require_equal(runs[2], runs[0])
