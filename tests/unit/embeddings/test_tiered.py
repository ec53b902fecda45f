"""With a budget, all rows and results are those of resident tables, to the last bit."""

import gc
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import recsys
from recsys.embeddings import SGD, Adagrad, Adam
from recsys.embeddings.tiers.budget import give_slots
from recsys.embeddings.tiers.fetch import Fetcher, versions_of
from recsys.embeddings.tiers.file_store import ColdFiles
from recsys.embeddings.tiers.queue import TransferQueue
from recsys.embeddings.tiers.transfer import Transfer
from recsys.errors import (
    ColdTierError,
    ConflictingWrite,
    MalformedBags,
)
from tests.unit.embeddings.model import TOO_MANY_ROWS, Tables, are_equal
from tests.unit.transfers import before_transfers

pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")


@pytest.fixture
def late_transfers(monkeypatch):
    """Transfers in the background wait."""
    before_transfers(monkeypatch, lambda is_alone, _: is_alone and time.sleep(0.03))


def pair(num_slots=4, formula=SGD(lr=1.0), num_rows=20, device=None):  # noqa: B008
    tables = partial(Tables, [num_rows], [0], 16, formula)
    return [tables(), tables(num_slots=num_slots, device=device)]


@pytest.fixture(params=["cpu", "device"])
def device(request):
    """None for the CPU's kernels, or a device for Triton's."""
    if request.param == "cpu":
        return None
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ids(both, *rows):
    return both[0].bags(torch.tensor(rows))


def train(both, *rows, has_step=True):
    for tables in both:
        tables(ids(both, *rows)).sum().backward()
        if has_step:
            tables.optimizer.step()


def step(both):
    for tables in both:
        tables.optimizer.step()


def are_same(both):
    """Whether all rows are the same for lookups, and then in the cold tier."""
    with torch.no_grad():
        found = [tables(ids(both, *range(20))) for tables in both]
    return torch.equal(*found) and are_equal(*both)


@pytest.mark.usefixtures("late_transfers")
class TestRaces:
    """Each race on purpose."""

    def test_an_update_waits_for_a_write_back_that_began_after_its_lookup(self):
        both = pair()
        train(both, 0, 1)
        train(both, 0, 1, has_step=False)
        for _ in range(2):  # the rows' generation ends before their update
            both[1].fetcher.begin(both[1].claim_ahead(ids(both, 2, 3)))
        train(both, 2, 3, has_step=False)
        both[1].claim_ahead(ids(both, 4, 5))  # takes the slots of 0 and 1, which are dirty
        step(both)
        assert are_same(both)

    def test_an_update_waits_for_a_fetch_that_began_after_its_lookup(self):
        both = pair()
        train(both, *range(4), 6, 7, has_step=False)  # 6 and 7 get no slot
        both[1].fetcher.begin(both[1].claim_ahead(ids(both, 0)))
        both[1].claim_ahead(ids(both, 6, 7))
        time.sleep(0.06)  # fetched, and not yet known
        step(both)
        assert are_same(both)

    def test_an_update_of_several_lookups_waits_for_a_fetch_that_began_after_one(self):
        both = pair()
        train(both, *range(4), 6, 7, has_step=False)  # 6 and 7 get no slot
        both[1].fetcher.begin(both[1].claim_ahead(ids(both, 0)))
        both[1].claim_ahead(ids(both, 6, 7))
        train(both, 0, has_step=False)  # after the last claim
        time.sleep(0.06)  # fetched, and not yet known
        step(both)
        assert are_same(both)

    def test_an_evaluation_waits_for_rows_that_leave(self):
        both = pair()
        train(both, 0, 1, 2, 3)
        both[1].claim_ahead(ids(both, 4, 5, 6, 7))
        with torch.no_grad():
            assert torch.equal(*(tables(ids(both, 0, 1, 2, 3, 4, 5)) for tables in both))
        assert are_same(both)

    def test_a_gradient_of_weights_waits_for_rows_that_leave(self):
        both, gradients = pair(), []
        train(both, 0, 1, 2, 3)
        for tables in both:
            weights = torch.ones(4, requires_grad=True)
            pooled = tables(tables.bags(torch.arange(4), None, weights))
            if tables.fetcher is not None:
                tables.fetcher.end_generation()
                tables.claim_ahead(ids(both, 4, 5, 6, 7))
            pooled.square().sum().backward()
            gradients.append(weights.grad)
        assert torch.equal(*gradients)

    def test_a_gradient_of_weights_reads_rows_in_slots(self):
        both, gradients = pair(), []
        train(both, 0, 1, 2, 3)
        for tables in both:
            weights = torch.ones(4, requires_grad=True)
            tables(tables.bags(torch.arange(4), None, weights)).square().sum().backward()
            gradients.append(weights.grad)
        assert torch.equal(*gradients)

    def test_the_slot_of_a_dropped_claim_is_not_taken_before_its_row_has_arrived(self):
        both = pair(num_slots=1)
        train(both, 9)
        first = both[1].claim_ahead(ids(both, 0))
        for row in (1, 0):  # updates end generations while their rows are on their way
            for _ in range(3):
                both[1].fetcher.end_generation()
            both[1].claim_ahead(ids(both, row))
        both[1].fetcher.begin(first)
        train(both, 0)
        assert are_same(both)

    def test_a_claim_may_come_between_lookup_and_update(self):
        both = pair(num_slots=6)
        train(both, 0, 1, 2)
        train(both, 0, 1, 2, has_step=False)
        both[1].claim_ahead(ids(both, 5, 6, 7))
        step(both)
        assert are_same(both)

    def test_state_that_is_new_finds_its_slots(self):
        both = pair(formula=Adam(lr=0.1))
        train(both, 0, 1, 2, has_step=False)
        both[1].claim_ahead(ids(both, 3, 4))
        step(both)  # makes the state, when rows are in slots already
        train(both, 0, 4, 7)
        assert are_same(both)


def test_another_thread_may_evaluate_while_rows_move(monkeypatch):
    def pause():  # of the thread that evaluates, between what it compares
        return time.sleep(0.001 * (threading.current_thread() is not threading.main_thread()))

    name = f"{Fetcher.__module__}.versions_of"
    monkeypatch.setattr(name, lambda tensors: (versions_of(tensors), pause())[0])
    both = pair(num_slots=3, formula=SGD(lr=0.0))
    every_row, is_done, found = ids(both, *range(20)), threading.Event(), []

    def evaluate():
        with torch.no_grad():
            while not is_done.is_set():
                found.append(torch.equal(both[1](every_row), both[0](every_row)))

    thread = threading.Thread(target=evaluate)
    thread.start()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = torch.randint(0, 20, (6,), generator=generator).tolist()
        both[1].fetcher.begin(both[1].claim_ahead(ids(both, *rows)))
        train(both[1:] * 2, *rows)
    is_done.set()
    thread.join()
    assert found
    assert all(found)


# Python prints an interrupt that arrives in a weakref's callback, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_loses_no_row():
    """With a learning rate of 0, rows that move and are updated must stay what they are."""
    tables = Tables([300] * 3, [0, 1, 2], 16, Adagrad(lr=0.0), num_slots=250)
    before = [weight.detach().clone() for weight in tables.weights]
    rng, num_interrupts, is_armed = random.Random(0), 0, False

    def interrupt(*_):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def train_ahead():
        claimed = None
        for _ in range(3):
            bags = tables.bags((torch.rand(3 * 50) ** 2 * 300).long())
            tables.fetcher.begin(claimed)
            claimed = tables.claim_ahead(bags)
            tables.train(bags)

    train_ahead()  # numba compiles or loads the kernels, and does not bear interrupts then
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            is_armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.004)
                train_ahead()
            except KeyboardInterrupt:
                num_interrupts += 1
                tables.optimizer.zero_grad()
            is_armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    train_ahead()
    for weight, rows in zip(tables.weights, before, strict=True):
        assert torch.equal(weight.detach().clone(), rows)
    assert num_interrupts > 20


def test_offsets_that_lie_leave_rows_as_they_were():
    tables = Tables([100] * 4, [0, 1, 2, 3], 16, SGD(lr=0.0), num_slots=300)
    before = torch.cat([weight.detach().clone() for weight in tables.weights], dim=1)
    with pytest.raises(MalformedBags):
        tables(tables.bags(torch.tensor([50, 51, 52, 53]), torch.tensor([0, 4, 0, 4])))
    tables.train(tables.bags(torch.arange(100).repeat(4)))
    with torch.no_grad():
        assert torch.equal(tables(tables.bags(torch.arange(100).repeat(4))), before)


def test_a_mini_batch_larger_than_the_slots_trains(device):
    both = pair(num_slots=5, device=device)
    train(both, 1, 2, 3)
    with pytest.warns(match="65% of the rows .* were used in the cold tier") as found:
        train(both * 2, *range(20))
    assert len(found) == 1
    assert both[1].fetcher.counts.left == 2 * 15
    assert are_equal(*both)


def places(tables, *rows):
    return tables.fetcher.marks.slot_of_row[[*rows]]


def test_popular_rows_stay_until_others_are_more_popular(device):
    both = pair(num_slots=6, device=device)
    fetcher = both[1].fetcher
    for number in range(8):
        train(both, 1, 2, 5 + number)
    assert fetcher.pin_popular(3) == (2, 0)
    assert sorted(fetcher.popular) == [1, 2]
    train(both, *range(8, 16))
    assert are_same(both)  # empties the slots
    train(both, 3, 4)
    assert (places(both[1], 1, 2) >= 0).all()
    train(both, 3, 4)
    assert fetcher.pin_popular(2) == (2, 2)
    fetcher.pin(np.array([17, 18, 19], np.int32), 2)
    train(both, *range(8))
    assert (places(both[1], 17, 18, 19) >= 0).tolist() == [True, True, False]
    assert are_same(both)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_counts_are_those_of_mini_batches(is_ahead, device):
    both = pair(num_slots=4, device=device)
    fetcher = both[1].fetcher
    for rows in ([0, 1, 1], [0, 1, 2], [0, 3, 4, 5, 5, 6]):
        fetcher.begin(both[1].claim_ahead(ids(both, *rows)) if is_ahead else None)
        train(both, *rows)
    assert are_equal(*both)
    assert tuple(fetcher.counts) == (12, 3, 10, 3, 1, 6, 6)


BYTES = 64 + 11  # of a slot


@pytest.mark.parametrize("has_offsets", [False, True])
def test_samples_with_a_row_that_is_not_pinned_are_known(has_offsets, device):
    tables = Tables([20, 20], [0, 1, 0], 16, SGD(lr=1.0), num_slots=39, device=device)
    known = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])  # four samples
    tables.train(tables.bags(known))
    tables.fetcher.pin(np.array([1, 2, 3, 4, 25, 26, 27, 28, 9, 10, 11, 12], np.int32), 12)
    asked, offsets = known.clone(), None
    asked[[2, 5]] = torch.tensor([15, 1])  # of sample 2, of sample 1: a row of another table
    if has_offsets:  # the first sample has no id of the first feature
        asked, offsets = asked[1:], torch.cat([torch.tensor([0, 0]), torch.arange(1, 11)])
    missing = tables.fetcher.unpinned_samples(tables.lookups, tables.bags(asked, offsets))
    assert missing.tolist() == [False, True, True, False]


def test_a_pass_that_failed_ends_the_update_that_it_was_a_part_of():
    tables = Tables([20], [0], 4, SGD(lr=1.0), auto_apply=True)
    before = tables.weights[0].detach().clone()

    def train():
        with tables.optimizer.update_once():
            for number in range(3):
                late = torch.ones(1, requires_grad=True) * 2
                if number == 1:
                    late.register_hook(lambda _: 1 / 0)
                with suppress(ZeroDivisionError):
                    (tables(tables.bags(torch.tensor([number]))).sum() + late.sum()).backward()

    with pytest.raises(RuntimeError, match="update_once"):
        train()
    assert torch.equal(tables.weights[0], before)


def test_the_thread_of_transfers_may_collect_a_fetcher():
    """A model is deleted while its rows are on their way, and garbage is collected there."""
    run, is_deleted = Transfer.run, threading.Event()

    def collect(self, **how):
        if threading.current_thread() not in others:
            assert is_deleted.wait(30)
            gc.collect()
        run(self, **how)

    others = threading.enumerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "run", collect)
        tables = Tables([20], [0], 4, SGD(lr=1.0), num_slots=8)
        ids = torch.tensor([1, 2, 3])
        tables.train(tables.bags(ids))
        weight = tables.weights[0]
        expected = Tables([20], [0], 4, SGD(lr=1.0))
        expected.train(expected.bags(ids))
        tables.claim_ahead(tables.bags(torch.tensor([4, 5])))
        [thread] = {*threading.enumerate()} - {*others}
        del tables
        is_deleted.set()
        thread.join(30)
    assert torch.equal(weight.detach(), expected.weights[0].detach())


def test_forwards_without_a_backward_keep_no_slot():
    tables = Tables([40], [0], 4, SGD(lr=1.0), num_slots=8)
    for first in range(0, 40, 8):
        tables.fetcher.begin(None)
        tables(tables.bags(torch.arange(first, first + 8)))
    assert tables.fetcher.counts.left == 0


@pytest.mark.parametrize(
    ("budget", "num_slots", "planned"),
    [
        (30 * 4 + BYTES, 1, []),
        (30 * 4 + BYTES * 3, 3, [27, 4]),
        (30 * 4 + BYTES * 5, 5, [27, 4, 12]),
        (30 * 4 + BYTES * 15, 15, [27, 4, 12]),
    ],
)
def test_a_budget_pays_for_row_maps_then_for_a_plan_then_for_slots(budget, num_slots, planned):
    tables = Tables([10, 20], [0, 1], 16, SGD(lr=1.0))
    of_plan = {"t0": ([4], [5]), "t1": ([2, 17], [1, 9]), "other": ([0], [7])}
    pinned = {name: tuple(map(np.array, both)) for name, both in of_plan.items()}
    give_slots([tables.group], SGD(lr=1.0), budget, pinned)
    tables.train(tables.bags(torch.tensor([1, 1])))
    assert tables.group.num_slots == num_slots
    pins = tables.fetcher.marks.pins > 0
    assert sorted(tables.fetcher.marks.row_of_slot[pins]) == sorted(planned)


def test_files_need_a_folder_and_room(tmp_path):
    with pytest.raises(ColdTierError, match="free"):
        ColdFiles(tmp_path).make("t", (2**40, 2**10), torch.float32)
    (tmp_path / "file").touch()
    with pytest.raises(ColdTierError, match="folder"):
        ColdFiles(tmp_path / "file").make("t", (1, 1), torch.float32)


@pytest.mark.usefixtures("late_transfers")
def test_a_write_beside_rows_that_are_written_back_is_noticed():
    both = pair(num_slots=2)
    kept = both[1].weights[0].detach()
    train(both, 1, 2)
    both[1].claim_ahead(ids(both, 3, 4))
    kept[1] += 1
    with pytest.raises(ConflictingWrite):
        train(both[1:] * 2, 3, 4)


@pytest.mark.usefixtures("late_transfers")
@pytest.mark.parametrize(
    ("guard", "race"),
    [
        (
            (Fetcher, "begin_update"),
            "an_update_waits_for_a_write_back_that_began_after_its_lookup",
        ),
        ((Fetcher, "begin_update"), "an_update_waits_for_a_fetch_that_began_after_its_lookup"),
        (
            (Fetcher, "begin_update"),
            "an_update_of_several_lookups_waits_for_a_fetch_that_began_after_one",
        ),
        ((Fetcher, "settle"), "an_evaluation_waits_for_rows_that_leave"),
        ((Fetcher, "settle"), "a_gradient_of_weights_waits_for_rows_that_leave"),
        (
            (TransferQueue, "oldest_generation"),
            "the_slot_of_a_dropped_claim_is_not_taken_before_its_row_has_arrived",
        ),
    ],
)
def test_without_a_rule_its_race_is_lost(guard, race, monkeypatch):
    monkeypatch.setattr(*guard, lambda self, *given: given[0] if given else None)
    with pytest.raises(AssertionError):
        getattr(TestRaces, f"test_{race}")(None)


def test_a_model_is_as_before_if_a_group_gets_no_slots(monkeypatch, tmp_path):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(99, 4), torch.nn.EmbeddingBag(99, 8))
    before = [(type(table), table.data_ptr()) for table in model.parameters()]
    give = "recsys.embeddings.tiers.budget._fetcher_of"
    monkeypatch.setattr(give, Mock(side_effect=[Fetcher, MemoryError]))
    with pytest.raises(MemoryError):
        recsys.accelerate(
            model, optimizer=SGD(lr=1.0), budget=2000, cold_tier="file", cold_path=tmp_path
        )
    assert [(type(table), table.data_ptr()) for table in model.parameters()] == before
