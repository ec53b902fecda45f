"""What more slots would fetch, forecast from a sample of rows, beside slots that are there."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings import HotColdEmbeddingBag
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.cpu.miniature import Miniature
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.tiers.forecast import Forecast
from recsys.embeddings.tiers.slots import Slots

ONE_TABLE = Lookups(
    tables=np.zeros(1, np.uint64),
    positions=np.zeros(1, np.uint64),
    columns=np.zeros(1, np.uint64),
    width=1,
)


CPU = torch.device("cpu")


class Claims:
    """Slots of one table, claimed by one mini-batch after the other, and what became of them."""

    def __init__(self, num_rows, num_slots, pinned=()):
        self.hot = Slots([num_rows], 1, torch.float32, {}, num_slots, CPU)
        self.hot.pin(np.array(pinned, np.int32))
        self.forecast = self.hot.forecast = Forecast.of(self.hot)
        self.num_fetched = self.num_evicted = 0
        self._window = []

    def observe(self, num_slots, num_more):
        self.forecast = self.hot.forecast = Forecast(self.hot.map, num_slots, num_more, rate=1)

    def release(self):
        self.hot.map.release(self._window.pop(0))

    def claim(self, rows, num_held=1):
        """Claim rows; the claims of the last `num_held` mini-batches are held on to."""
        while len(self._window) >= num_held:
            self.release()
        bags = Bags(np.array(rows), None, None, len(rows), is_mean=False)
        row_of_slot = self.hot.map.row_of_slot
        before = row_of_slot.clone()
        claim = self.hot.claim(ONE_TABLE, bags)
        self.num_evicted += int(((before >= 0) & (row_of_slot != before)).sum())
        self.num_fetched += len(claim.moves.fetched_rows)
        self._window.append(claim.held)


mini_batches = st.lists(
    st.lists(st.integers(0, 39), min_size=1, max_size=8), min_size=1, max_size=40
)


@given(mini_batches=mini_batches, num_slots=st.integers(16, 30), num_held=st.integers(1, 2))
def test_with_every_row_followed_it_counts_what_slots_of_that_number_fetch(
    mini_batches, num_slots, num_held
):
    now, more = Claims(40, num_slots), Claims(40, num_slots + 7)
    now.observe(num_slots, num_slots + 7)

    for rows in mini_batches:
        now.claim(rows, num_held)
        more.claim(rows, num_held)

    assert now.forecast.fetched[0] == now.num_fetched
    assert now.forecast.evicted[0] == now.num_evicted
    # Which of several rows that miss gets which slot is not the same with more slots.
    assert now.forecast.fetched[1] == pytest.approx(more.num_fetched, abs=3)


def zipf(num_rows, num_lookups, num_steps, exponent, seed):
    """Mini-batches of rows whose popularity follows a power law, numbered in any order."""
    rng = np.random.default_rng(seed)
    share = np.cumsum(1 / np.arange(1, num_rows + 1) ** exponent)
    order = rng.permutation(num_rows)
    for _ in range(num_steps):
        yield order[np.searchsorted(share / share[-1], rng.random(num_lookups))]


@pytest.mark.parametrize("exponent", [0.8, 0.95, 1.1])
@pytest.mark.parametrize("num_slots", [1500, 12_000])
def test_what_twice_the_budget_saves_is_forecast_within_15_percent(exponent, num_slots):
    now = Claims(200_000, num_slots)
    forecast = now.forecast
    num_more = now.hot.slots_with(2 * now.hot.num_bytes)
    more = Claims(200_000, num_more)
    too_many = Claims(200_000, num_more + 1)
    assert more.hot.num_bytes <= 2 * now.hot.num_bytes < too_many.hot.num_bytes

    for rows in zipf(200_000, 500, 400, exponent, seed=3):
        now.claim(rows)
        more.claim(rows)

    assert forecast.rate < 0.1
    (fetched, fetched_more), (evicted, evicted_more) = forecast.fetched, forecast.evicted
    saved = 1 - more.num_fetched / now.num_fetched
    assert 1 - fetched_more / fetched == pytest.approx(saved, rel=0.15)
    saved = 1 - more.num_evicted / now.num_evicted
    assert 1 - evicted_more / evicted == pytest.approx(saved, rel=0.15)


def test_what_is_followed_stays_few_however_many_rows_and_slots_there_are():
    slots = Slots([10], 1, torch.float32, {}, 10, CPU).map

    forecasts = [Forecast(slots, count, 2 * count) for count in (1, 500, 20_000, 10**6, 10**9)]

    for forecast in forecasts:
        arrays = [*forecast._now, *forecast._more, forecast._sampled, forecast._missing]
        assert sum(array.nbytes for array in arrays) <= 700_000
    assert forecasts[0].rate == 1
    assert max(len(forecast._more.rows) for forecast in forecasts) == 8192


def test_pinned_rows_are_not_followed_for_they_never_go():
    slots = Claims(100, 20, pinned=range(10))

    for first in (0, 10, 5):
        slots.claim(range(first, first + 10))

    assert slots.forecast.rate == 1
    assert slots.forecast.fetched == (10, 10)


def test_rows_that_are_read_again_are_fetched_again_with_more_slots_too():
    slots = Claims(100, 20)
    slots.claim(range(10))
    slots.release()
    assert slots.forecast.fetched == (10, 10)

    slots.hot.drop_unclaimed()
    slots.claim(range(10))

    assert slots.forecast.fetched == (20, 20)


def test_more_rows_at_once_than_a_miniature_has_slots_for_are_all_fetched():
    slots = Claims(100, 40)
    slots.observe(4, 8)

    slots.claim(range(20))
    slots.claim(range(20))

    assert slots.forecast.fetched == (36, 32)
    assert slots.forecast.evicted == (0, 0)


def test_an_empty_miniature_has_room_in_its_hash_table():
    for num_slots in (1, 2, 3, 4, 5, 1000):
        assert len(Miniature.of_size(num_slots).keys) >= 2 * num_slots


def test_on_a_device_nothing_is_forecast(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_BY_TORCH", {"cpu"})

    assert Forecast.of(Slots([10], 1, torch.float32, {}, 4, CPU)) is None


def test_claims_are_followed_only_while_there_is_a_forecast_and_by_later_slots_too():
    bag = HotColdEmbeddingBag(300, 4, mode="sum", optimizer=SGD(lr=0.5), budget=3000)
    [tiers] = bag.tiers()
    bag(torch.arange(20).view(2, 10)).sum().backward()
    assert tiers.hot.forecast is None

    tiers.forecast()
    bag(torch.arange(30, 50).view(2, 10)).sum().backward()
    first = tiers.hot.forecast
    tiers.resize(60)

    assert first.fetched[0] == 20
    assert isinstance(tiers.hot.forecast, Forecast)
    assert tiers.hot.forecast is not first


def test_rows_pinned_for_their_uses_end_a_forecast():
    slots = Claims(100, 20)
    for _ in range(3):
        slots.claim(range(5))

    slots.hot.pin_popular(10)

    assert slots.hot.forecast is None
