"""Schedules on a device that copies rows of the host by itself; the CPU stands in for it."""

import pytest
import torch
from torch import nn

from recsys.embeddings import HotColdEmbeddingBag
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.errors import IdOutOfRange
from recsys.pipeline import Hotline, LookAhead, TrainPipeline
from recsys.pipeline.hotline import popular_split
from tests.host_copies import reach_host
from tests.torch_kernels import BY_TORCH, TorchSlotMap

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
    reach_host(monkeypatch)
    yield
    errors_on(torch.device("cpu")).forget()


@pytest.mark.parametrize("num_more", [100, 0], ids=["roomy", "tight"])
@pytest.mark.parametrize("schedule", [LookAhead(2), Hotline(learning_steps=0)], ids=str)
@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
def test_a_schedule_trains_as_the_resident_module(small, monkeypatch, schedule, num_more):
    waited, claim = [], TorchSlotMap.claim
    monkeypatch.setattr(
        TorchSlotMap, "claim", lambda *arguments: waited.append(1) or claim(*arguments)
    )
    optimizer = Adagrad(lr=0.1)
    tables = small.make_tables([200, 150], [4, 4])
    batches = [small.make_batch(tables, seed, share=0.2) for seed in range(12)]
    budget = small.budget_for(tables, optimizer, batches, num_more)
    models = [small.Model(tables, optimizer), small.Model(tables, optimizer, budget=budget)]
    dense = [torch.optim.SGD(model.layer.parameters(), lr=0.1) for model in models]
    expected = small.run_plain(models[0], dense[0], batches)

    pipeline = TrainPipeline(models[1], dense[1], schedule=schedule)
    losses = small.run(pipeline, iter(batches))

    [tiers] = models[1].embeddings.tiers()
    assert tiers.residency._copies is not None
    assert not (waited and num_more)
    assert small.num_claimed(models[1]) == 0
    if isinstance(schedule, LookAhead):
        assert waited or num_more
        assert losses == expected
        small.require_equal(*models)
        return
    assert pipeline.popular_split.num_split > 0
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_hotline_says_that_the_host_waits_for_the_device(small, monkeypatch):
    monkeypatch.setattr(popular_split, "_HOST_WAITS_FOR", {"cpu"})
    tables, optimizer = small.make_tables([200], [4]), Adagrad(lr=0.1)
    batches = [small.make_batch(tables, 0, share=0.2)]
    budget = small.budget_for(tables, optimizer, batches, 10)
    model = small.Model(tables, optimizer, budget=budget)

    with pytest.warns(UserWarning, match=r"schedule=Hotline.* waits for 'cpu' in each step"):
        TrainPipeline(model, None, schedule=Hotline())


class OneBag(nn.Module):
    """Calls a bag with 60 slots for each part of a mini-batch."""

    def __init__(self, num_calls=1):
        super().__init__()
        budget = 4 * 3000 + 60 * (16 + 8)
        self.bag = HotColdEmbeddingBag(3000, 4, mode="sum", optimizer=SGD(lr=0.1), budget=budget)
        [self.tiers] = self.bag.tiers()
        assert self.tiers.hot.num_slots == 60
        self.num_calls = num_calls

    def ids(self, batch):
        return {"bag": [*batch.chunk(self.num_calls)]}

    def pipeline(self):
        return TrainPipeline(self, None, schedule=LookAhead(2), ids=self.ids)

    def forward(self, batch):
        return sum(self.bag(ids).square().sum() for ids in batch.chunk(self.num_calls)), None


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
def test_the_next_mini_batch_is_claimed_however_often_a_bag_is_called(num_calls):
    pipeline = OneBag(num_calls).pipeline()
    # 72 lookups may be more rows than there are slots; they turn out to be fewer.
    batches = [torch.randint(0, 5, (36, 2)) + number for number in range(20)]
    for _ in pipeline.steps(batches):
        pass

    assert pipeline.mean_depth == pytest.approx(19 / 20)


def test_two_mini_batches_ahead_are_claimed_if_their_rows_fit_and_their_lookups_would_not(
    monkeypatch,
):
    model = OneBag()
    hot = model.tiers.hot
    monkeypatch.setattr(hot, "claim", lambda *_, **__: pytest.fail("a claim is waited for"))
    pipeline = model.pipeline()
    # 30 lookups of 10 rows each: 10 + 10 + 30 are at most 60, but 30 + 30 + 30 are not.
    batches = [(torch.arange(30) % 10 + 10 * number).view(15, 2) for number in range(20)]
    for _ in pipeline.steps(batches):
        pass

    assert pipeline.mean_depth == pytest.approx((18 * 2 + 1) / 20)


@pytest.mark.parametrize("num_ids", [1, 2])
def test_an_invalid_id_in_the_last_lookup_is_raised_not_a_loss_of_nan(num_ids):
    model = OneBag()
    model.tiers.hot.rows.fill_(torch.nan)  # memory of empty slots may hold anything
    before = model.bag.state_dict()["weight"].clone()
    pipeline = TrainPipeline(model, None, schedule=LookAhead(1), ids=model.ids)
    valid = torch.arange(10 * num_ids).view(10, num_ids)
    invalid = valid.clone()
    invalid[7, 0] = 3000

    with pytest.raises(IdOutOfRange, match=r"sample 7: id 3000 is not in \[0, 3000\)"):
        for _ in pipeline.steps([invalid, valid]):
            pass

    assert torch.equal(model.bag.state_dict()["weight"], before)
