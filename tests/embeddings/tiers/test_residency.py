"""The residency machine against a dictionary of rows."""

import shutil
import tempfile
import threading
import tracemalloc
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.kernels.choice import HostCopies
from recsys.embeddings.kernels.cpu.slot_arrays import PINNED, POPULAR
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.tiers.cold.cold_files import ColdFiles
from recsys.embeddings.tiers.cold.device_copies import DeviceCopies
from recsys.embeddings.tiers.cold.file_store import FileStore
from recsys.embeddings.tiers.cold.host_store import HostStore
from recsys.embeddings.tiers.residency import Residency
from recsys.embeddings.tiers.slots import Slots
from recsys.embeddings.tiers.ticket import NotEnoughSlots
from recsys.embeddings.tiers.transfers import TransferQueue
from recsys.errors import TiersFailed
from tests.host_copies import look_up
from tests.torch_kernels import BY_NUMBA, BY_TORCH

DIM = 3
SIZES = (13, 1, 7)
STATE = {"momentum1": 1}
LOOKUPS = Lookups(
    tables=np.arange(len(SIZES)).astype(np.uint64),
    positions=np.arange(len(SIZES)).astype(np.uint64),
    columns=(DIM * np.arange(len(SIZES))).astype(np.uint64),
    width=DIM * len(SIZES),
)
EVERYTHING = [(table, row) for table, size in enumerate(SIZES) for row in range(size)]


class FaultyStore:
    """A cold store whose next transfers fail in the middle when told so, and that counts them.

    Attributes:
        gate: Closed, transfers wait: so a test, not chance, says when those in background are made.
    """

    def __init__(self, store):
        self._store = store
        self.faults = {"fetch": 0, "write_back": 0}
        self.num_moves = 0
        self.gate = threading.Event()
        self.gate.set()

    def fetch(self, hot, rows, slots):
        self._move("fetch", hot, rows, slots)

    def write_back(self, hot, rows, slots):
        self._move("write_back", hot, rows, slots)

    def copy(self, name, copy, *arguments):
        """In place of a kernel, which the device runs on rows and slots."""
        if self.faults[name] > 0:
            raise OSError(f"{name} failed")
        copy(*arguments)

    def _move(self, name, hot, rows, slots):
        self.gate.wait()
        self.num_moves += 1
        move, is_faulty = getattr(self._store, name), self.faults[name] > 0
        count = len(rows) // 2 if is_faulty else len(rows)
        move(hot, rows[:count], slots[:count])
        if is_faulty:
            self.faults[name] -= 1
            raise OSError(f"{name} failed")


class OpeningQueue(TransferQueue):
    """Opens the gate when a caller waits."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def put(self, run, *, in_background):
        if not in_background and self._num_done == self._num_put:
            self._gate.set()  # the caller runs it at once
        super().put(run, in_background=in_background)

    def wait(self, number):
        self._gate.set()
        super().wait(number)

    def settle(self):
        self._gate.set()
        super().settle()


class ReachedTables(NamedTuple):
    """Tables that copies find by the number of a row; instead of `HostRows`, to be fast."""

    tables: list
    device: torch.device
    sizes: tuple

    def row(self, number):
        for table, size in zip(self.tables, self.sizes, strict=True):
            if number < size:
                return table[number]
            number -= size
        raise AssertionError("no such row")

    @staticmethod
    def fetch(host, rows, slots, memory):
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if row >= 0:
                memory[slot] = host.row(row)

    @staticmethod
    def write(host, rows, slots, memory):
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if row >= 0:
                host.row(row).copy_(memory[slot].view_as(host.row(row)))


class LateStream:
    """A `TransferStream` that makes transfers as late as it may: once they are waited for."""

    def __init__(self):
        self.queued, self.num_done, self.is_open = [], 0, False

    @contextmanager
    def transfer(self):
        self.is_open = True
        yield
        self.is_open = False

    def record(self):
        number = len(self.queued)
        return SimpleNamespace(number=number, query=lambda: self.num_done >= number)

    last = property(record)

    def keep_for_transfer(self, tensors):
        pass

    def keep(self, tensor):
        pass

    def wait(self, done=None):
        end = len(self.queued) if done is None else done.number
        while self.num_done < end:
            self.queued[self.num_done]()
            self.num_done += 1

    def read(self, numbers, made):
        self.wait(made)
        return numbers.tolist()


class LateCopies(DeviceCopies):
    """Copies of transfers are made when their stream makes them, all others at once."""

    stream = None

    def fetch(self, rows, slots):
        self._later(super().fetch, rows, slots)

    def write_back(self, rows, slots):
        self._later(super().write_back, rows, slots)

    def launch(self, moves):
        self._later(super().launch, moves)

    def _later(self, copy, *arguments):
        if self.stream is not None and self.stream.is_open:
            self.stream.queued.append(partial(copy, *arguments))
        else:
            copy(*arguments)


class World:
    """Tables, their residency, and what each row should be."""

    def __init__(
        self,
        num_slots,
        pinned=(),
        *,
        is_in_files=False,
        is_on_device=False,
        is_reached=False,
        is_late=False,
    ):
        self.tables = [torch.zeros(size, DIM) for size in SIZES]
        self.state = [torch.zeros(size) for size in SIZES]
        files = None
        if is_in_files:
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder)
            kinds = {str(size): ((size, DIM), torch.float32) for size in SIZES}
            files = ColdFiles(folder, kinds)
            self.tables = [files.begin_with(str(size), None) for size in SIZES]
            self.state = [
                files.make(str(size), "momentum1", (size,), torch.float32) for size in SIZES
            ]
        self.expected = {}
        for table, row in EVERYTHING:
            self.write(table, row, float(100 * table + row))
        spaces = [RowSpace(self.tables), RowSpace(self.state)]
        self.space = spaces[0]
        self.is_on_device = is_on_device
        kernels = BY_TORCH if is_on_device else BY_NUMBA
        with mock.patch.object(kernel_choice, "DEVICE_KERNELS", kernels):
            hot = Slots(SIZES, DIM, torch.float32, STATE, num_slots, torch.device("cpu"))
        hot.rows.fill_(float("nan"))  # what was never fetched is never right
        hot.pin(np.array(pinned, np.int32))
        store = HostStore(lambda: spaces) if files is None else FileStore(files, lambda: spaces)
        self.store = FaultyStore(store)
        copies = None
        if is_reached:
            kernels = HostCopies(
                ReachedTables,
                partial(self.store.copy, "fetch", ReachedTables.fetch),
                partial(self.store.copy, "write_back", ReachedTables.write),
                look_up,
            )
            copies = LateCopies([hot.rows, *hot.states], SIZES, lambda: spaces, kernels)
            if is_late:
                copies.stream = hot._stream = LateStream()
        self.residency = Residency(hot, self.store, copies)
        self.residency.queue = OpeningQueue(self.store.gate)

    def write(self, table, row, value):
        """As code outside of the module does."""
        self.tables[table][row] = value
        self.state[table][row] = -value
        self.expected[table, row] = value

    def claim(self, wanted, *, in_background=False, **options):
        """A ticket of rows of tables, and these; waited for, unless in the background."""
        wanted = sorted(wanted, key=lambda pair: pair[0])  # runs of a table are one run
        tables = np.array([table for table, _ in wanted])
        offsets = np.searchsorted(tables, np.arange(len(SIZES) + 1))
        values = np.array([row for _, row in wanted], np.int64)
        bags = self.bags(values, offsets, 1)
        ticket = self.residency.claim(LOOKUPS, bags, in_background=in_background, **options)
        if not in_background:
            ticket.wait()
        return ticket, wanted

    def bags(self, values, offsets, batch_size):
        if self.is_on_device:
            tensors = torch.from_numpy(values), torch.from_numpy(offsets)
            return TorchBags(*tensors, None, batch_size, is_mean=False)
        return Bags(values, offsets, None, batch_size, is_mean=False)

    def let_transfers_run(self):
        """As far as they come: to the last one, or to one that fails."""
        self.store.gate.set()
        queue = self.residency.queue
        with queue._changed:
            while queue._num_done < queue._num_put and not queue._failure:
                queue._changed.wait()

    def require_here(self, ticket, wanted):
        hot = self.residency.hot
        for (table, row), slot in zip(wanted, ticket.slot_of_value.tolist(), strict=True):
            assert hot.rows[slot].tolist() == [self.expected[table, row]] * DIM
            assert hot.states[0][slot].item() == -self.expected[table, row]

    def update(self, ticket, wanted):
        hot = self.residency.hot
        slots = dict(zip(wanted, ticket.slot_of_value.tolist(), strict=True))
        for (table, row), slot in slots.items():
            self.expected[table, row] += 0.5
            hot.rows[slot] += 0.5
            hot.states[0][slot] -= 0.5
        self.residency.mark_updated(ticket)

    def look_up_everything(self):
        """Every row of every table, without claims: bag r of a feature is row r of its table."""
        num_bags = max(SIZES)
        lengths = [row < size for size in SIZES for row in range(num_bags)]
        rows = np.array([row for _, row in EVERYTHING], np.int64)
        offsets = np.cumsum([0, *lengths])
        bags = self.bags(rows, offsets, num_bags)
        result = torch.full((num_bags, LOOKUPS.width), float("nan"))
        assert self.residency.look_up(self.space, LOOKUPS, bags, result) == -1
        return {
            (table, row): result[row, DIM * table : DIM * (table + 1)].tolist()
            for table, row in EVERYTHING
        }

    def require_readable(self):
        found = self.look_up_everything()
        assert found == {key: [value] * DIM for key, value in self.expected.items()}

    def require_cold(self):
        for table, row in EVERYTHING:
            assert self.tables[table][row].tolist() == [self.expected[table, row]] * DIM
            assert self.state[table][row].item() == -self.expected[table, row]


wanted_rows = st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=12)


class ResidencyMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order, a waited ticket has the newest rows."""

    @initialize(
        num_slots=st.integers(1, 24),
        pinned=st.lists(st.integers(0, 20), unique=True, max_size=6),
        is_in_files=st.booleans(),
        how=st.sampled_from(["host", "device", "reached", "reached late"]),
    )
    def build(self, num_slots, pinned, is_in_files, how):
        is_reached = "reached" in how
        self.world = World(
            num_slots,
            pinned[:num_slots],
            is_in_files=is_in_files and not is_reached,
            is_on_device=how != "host",
            is_reached=is_reached,
            is_late="late" in how,
        )
        self.tickets = []
        self.rows_of = {}  # by what has the slots, which several tickets may share

    @rule(wanted=wanted_rows, in_background=st.booleans())
    def claim(self, wanted, in_background):
        self.world.store.gate.clear()
        try:
            ticket, wanted = self.world.claim(wanted, in_background=in_background)
        except NotEnoughSlots:
            others = {row for other, _ in self.tickets for row in self.rows_of[id(other._hold)]}
            assert len(others | set(wanted)) > self.world.residency.hot.num_slots
        else:
            if not in_background:
                self.world.require_here(ticket, wanted)
            self.rows_of[id(ticket._hold)] = wanted
            self.tickets.append((ticket, wanted))

    @rule()
    def time_passes(self):
        self.world.let_transfers_run()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), updates=st.booleans(), keeps=st.booleans())
    def compute(self, data, updates, keeps):
        place = data.draw(st.integers(0, len(self.tickets) - 1))
        ticket, wanted = self.tickets[place] if keeps else self.tickets.pop(place)
        self.world.let_transfers_run()
        ticket.wait()
        self.world.require_here(ticket, wanted)
        if updates:
            self.world.update(ticket, wanted)
        self.world.require_here(ticket, wanted)
        if not keeps:
            ticket.release()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), updates=st.booleans())
    def split(self, data, updates):
        """What had come before a ticket was claimed may be computed on before the rest has."""
        ticket, wanted = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        [(fetched, _)] = ticket._fetched
        is_missing = self.world.residency.hot.are_among(ticket.slot_of_value, fetched)
        sides = []
        for mask in (~is_missing, is_missing):
            places = mask.nonzero().flatten()
            part = ticket._part(places, None, was_missing=mask is is_missing)
            sides.append((part, [wanted[place] for place in places.tolist()]))
        del ticket
        here, coming = sides
        here[0].wait()
        self.world.require_here(*here)
        if updates:
            self.world.update(*here)
        self.tickets += [here, coming] if updates else [coming]

    @rule(share=st.sampled_from([0, 0.3, 1]), num_left=st.integers(0, 20))
    def pin_popular(self, share, num_left):
        self.world.residency.pin_popular(share, num_left)
        flags = self.world.residency.hot.map.flags
        num_popular = int(((flags & POPULAR) > 0).sum())
        assert num_popular <= share * self.world.residency.hot.num_slots
        assert not ((flags & POPULAR) > 0)[(flags & PINNED) == 0].any()

    @precondition(lambda self: self.tickets)
    @rule()
    def drop(self):
        self.tickets.pop(0)

    @rule()
    def flush(self):
        self.world.residency.flush()
        self.world.require_cold()

    @rule()
    def evaluate(self):
        slots = self.world.residency.hot.map
        counts, num_claimed = self.world.residency.counts, slots.num_claims.tolist()
        self.world.require_readable()
        assert self.world.residency.counts == counts
        assert slots.num_claims.tolist() == num_claimed

    @rule(table_and_row=st.sampled_from(EVERYTHING))
    def a_write_from_outside(self, table_and_row):
        self.world.residency.flush()
        self.world.write(*table_and_row, 1000.0)
        self.world.residency.reload()

    @invariant()
    def slots_and_rows_agree(self):
        if not hasattr(self, "world"):
            return
        slots = self.world.residency.hot.map
        for slot, row in enumerate(slots.row_of_slot.tolist()):
            if row >= 0:
                assert int(slots.slot_of_row[row]) & ~(1 << 30) == slot
        held = [slot for slot in slots.slot_of_row.tolist() if slot >= 0]
        assert len(held) == int((slots.row_of_slot >= 0).sum())
        if not self.world.is_on_device:
            is_idle = (slots.num_claims == 0) & ((slots.flags & PINNED) == 0)
            assert slots._num_idle == is_idle.sum()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.residency.flush()
            self.world.require_cold()


TestResidency = pytest.mark.filterwarnings("ignore:the budget's")(ResidencyMachine.TestCase)


def updated(world, wanted):
    """Rows that were updated in their slots and that no ticket needs now."""
    ticket, wanted = world.claim(wanted)
    world.update(ticket, wanted)
    ticket.release()


LATER_USES = {
    "claim": lambda world: world.claim([(0, 0)]),
    "claim ahead": lambda world: world.claim([(2, 0)], in_background=True),
    "flush": lambda world: world.residency.flush(),
    "reload": lambda world: world.residency.reload(),
    "look up": lambda world: world.look_up_everything(),
}


@pytest.mark.parametrize("how", ["host", "device", "reached"])
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("what", ["fetch", "write_back"])
def test_after_a_failed_transfer_every_use_raises_the_named_error(what, in_background, how):
    world = World(num_slots=2, is_on_device=how != "host", is_reached=how == "reached")
    updated(world, [(0, 0), (0, 1)])
    world.store.faults[what] = 1

    with pytest.raises(TiersFailed, match=rf"OSError: {what} failed.*load a checkpoint") as raised:
        world.claim([(0, 2), (0, 3)], in_background=in_background)[0].wait()

    assert isinstance(raised.value.__cause__, OSError)
    for use in LATER_USES.values():
        with pytest.raises(TiersFailed, match=f"OSError: {what} failed"):
            use(world)
    world.residency.settle()
    del raised
    assert world.residency.num_claimed == 0


def test_transfers_queued_after_a_failed_one_do_not_run_and_their_tickets_raise():
    world = World(num_slots=6)
    here, _ = world.claim([(2, 3)])
    world.store.gate.clear()
    world.store.faults["fetch"] = 1
    first, _ = world.claim([(0, 0)], in_background=True)
    second, _ = world.claim([(0, 0), (0, 1)], in_background=True)
    num_moves = world.store.num_moves

    for ticket in (second, first, here):
        with pytest.raises(TiersFailed, match="fetch failed"):
            ticket.wait()

    assert world.store.num_moves == num_moves + 1


def test_a_flush_that_fails_is_a_failed_transfer():
    world = World(num_slots=4)
    updated(world, [(0, 0), (2, 1)])
    world.store.faults["write_back"] = 1

    for _ in range(2):
        with pytest.raises(TiersFailed, match="write_back failed"):
            world.residency.flush()


def test_with_too_few_slots_nothing_is_claimed_and_what_would_do_is_told():
    world = World(num_slots=3)
    kept, wanted = world.claim([(0, 0), (0, 1)])

    with pytest.raises(NotEnoughSlots, match="4"):
        world.claim([(0, 5), (0, 6)])

    assert world.residency.num_claimed == 2
    world.require_here(kept, wanted)
    kept.release()
    world.require_here(*world.claim([(0, 5), (0, 6)]))


def test_a_value_that_is_no_row_is_named_and_nothing_is_claimed():
    world = World(num_slots=2)

    with pytest.raises(NoSuchRow, match="1"):
        world.claim([(0, 0), (0, 13)])

    assert world.residency.hot.map.num_claims.tolist() == [0, 0]
    world.require_here(*world.claim([(0, 0), (0, 12)]))


def test_pinned_rows_stay_whatever_else_is_used():
    world = World(num_slots=4, pinned=[0, 1])
    for row in range(2, 13):
        for _ in range(3):
            world.claim([(0, row)])
        world.claim([(0, 0), (0, 1)])

    counts = world.residency.counts

    assert counts.num_fetched == 2 + 11


def test_rows_of_a_plan_give_way_to_a_mini_batch_the_least_popular_first():
    world = World(num_slots=4, pinned=[4, 3, 2, 1])
    world.claim([(0, row) for row in (1, 2, 3, 4)])

    with pytest.warns(UserWarning, match="2 of the plan's rows were unpinned"):
        world.require_here(*world.claim([(0, 7), (0, 8)]))

    world.claim([(0, 3), (0, 4)])
    assert world.residency.counts.num_fetched == 6


@pytest.mark.parametrize("is_on_device", [False, True])
def test_popular_rows_of_an_earlier_run_are_pinned_again_as_far_as_they_fit(is_on_device):
    world = World(num_slots=6, pinned=[4, 3], is_on_device=is_on_device)
    hot = world.residency.hot

    world.residency.pin_as_popular(np.array([9, 4, 7, 8], np.int64), share=0.7, num_left=1)

    assert sorted(hot.popular_rows().tolist()) == [7, 9]  # the plan has 4, and 8 is one too many
    world.claim([(0, 7), (0, 9), (0, 3)])
    for row in (0, 1, 2, 5, 6, 10, 11, 12):
        world.require_here(*world.claim([(0, row), (0, 9)]))
    assert (hot.where(np.array([7, 9])) >= 0).all()
    world.residency.pin_popular(share=0.0, num_left=0)
    assert len(hot.popular_rows()) == 0


@pytest.mark.parametrize("is_on_device", [False, True])
def test_popular_rows_are_listed_most_uses_first(is_on_device):
    world = World(num_slots=6, is_on_device=is_on_device)
    for rows in ([1, 2], [2, 3], [2, 3], [2, 1], [2]):
        world.claim([(0, row) for row in rows])
    world.claim([(0, 3)])

    world.residency.pin_popular(share=1.0, num_left=0)

    assert world.residency.hot.popular_rows().tolist()[0] == 2
    assert set(world.residency.hot.popular_rows().tolist()) == {1, 2, 3}


def test_rows_used_often_stay_without_a_plan():
    world = World(num_slots=6)
    rng = np.random.default_rng(0)
    for _ in range(300):
        world.claim([(0, 0), (0, 1), (0, int(rng.integers(2, 13)))])

    assert world.residency.counts.num_fetched < 300 * 9 / 11


def test_claiming_takes_what_was_said_beside_the_slots():
    num_lookups, num_rows = 40_000, 10_000
    hot = Slots([30_000], 1, torch.float32, {}, num_rows, torch.device("cpu"))
    space = RowSpace([torch.zeros(30_000, 1)])
    residency = Residency(hot, HostStore(lambda: [space]))
    lookups = LOOKUPS.of_tables({0})

    def claim(values):
        bags = Bags(values, None, None, num_lookups, is_mean=False)
        return residency.claim(lookups, bags)

    claim(np.zeros(num_lookups, np.int64))  # compiles, or loads, kernels
    tickets, peaks = [], []
    tracemalloc.start()
    try:
        for first in (0, 0, 20_000):  # rows that are not here, that are, and for which others go
            values = np.arange(num_lookups) % num_rows + first
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            tickets.append(claim(values))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
            residency.mark_updated(tickets[-1])
            tickets[-1].release()
    finally:
        tracemalloc.stop()

    assert residency.counts.num_written_back == num_rows
    assert max(peaks) <= 20 * num_lookups + 32 * num_rows + 10_000
    assert tickets[0].slot_of_value.nbytes == 4 * num_lookups


def test_memory_is_what_was_said():
    hot = World(num_slots=5).residency.hot

    arrays = [*hot.map.arrays, *hot.arrays]

    assert hot.num_bytes == sum(array.nbytes for array in arrays)
