"""One random run of a pipeline, compared with a twin whose rows are all resident.

The seed chooses tables, optimizer, schedule, budget, plan, and what happens between two steps:
evaluations, writes to tables, loading of tables, another budget or plan, pinning of popular rows,
transfers that fail, graphs that are kept and dropped, claims that no lookup uses, and claims that
are split. After every step a row must be in at most one slot, the counts of slots must equal the
tickets that hold them, and losses must equal the twin's. Every few steps all rows must be equal
too, and at the end also the optimizer state. Plans and budgets change by rebuilding the module. So
does a run in which a transfer has failed: the twin's state is its checkpoint.
"""

import random
import warnings
from weakref import WeakSet

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, PINNED
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.embeddings.tiers.holds import Hold
from recsys.errors import BudgetTooSmall, TiersFailed
from recsys.pipeline import Auto, LookAhead, Sequential, TrainPipeline
from recsys.pipeline.micro_batches import select_samples

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
MOST_STEPS = 60
BROKEN = "the disk is broken"


class Faults:
    """How many transfers to come fail, and what to call: shared by all cold stores of a run."""

    def __init__(self):
        self.left = {"fetch": 0, "write_back": 0}


class FaultyStore:
    """A cold store that moves half of the rows and fails, when told so."""

    def __init__(self, store, faults):
        self._store, self._faults = store, faults

    def fetch(self, hot, rows, slots):
        self._move("fetch", hot, rows, slots)

    def write_back(self, hot, rows, slots):
        self._move("write_back", hot, rows, slots)

    def _move(self, what, hot, rows, slots):
        is_broken = self._faults.left[what] > 0
        count = len(rows) // 2 if is_broken else len(rows)
        getattr(self._store, what)(hot, rows[:count], slots[:count])
        if is_broken:
            self._faults.left[what] -= 1
            raise OSError(BROKEN)


def watch_tickets(monkeypatch):
    """What has the slots of every ticket that is alive, of whatever residency."""
    holds, make = WeakSet(), Hold.__init__

    def watched(hold, *arguments):
        make(hold, *arguments)
        holds.add(hold)

    monkeypatch.setattr(Hold, "__init__", watched)
    return holds


class Stream:
    """An iterator that can pause: then it seems to have ended, and what was taken can be used."""

    def __init__(self, batches):
        self._batches, self.is_paused = iter(batches), False

    def __iter__(self):
        return self

    def __next__(self):
        if self.is_paused:
            raise StopIteration
        return next(self._batches)


class Run:
    """A pipeline and its twin.

    Args:
        small: What tests of pipelines share.
        seed: Says everything.
        tickets: What has the slots of those that are alive.
        folder: For rows in files.
    """

    def __init__(self, small, seed, tickets, folder):
        self._small, self._tickets, self._folder = small, tickets, folder
        self._random = random.Random(seed)
        chance = self._random
        sizes = [chance.randint(60, 400) for _ in range(chance.randint(1, 4))]
        self._tables = small.make_tables(sizes, [chance.choice([1, 3, 4, 8]) for _ in sizes])
        self._optimizer = chance.choice(OPTIMIZERS)
        self._options = {"auto_apply": chance.random() < 0.5}
        share = chance.choice([1.0, 0.3, 0.05])
        self._batches = [
            small.make_batch(self._tables, chance.randrange(2**31), share=share)
            for _ in range(chance.randint(10, MOST_STEPS))
        ]
        self._faults, self._graphs, self._given = Faults(), [], []
        self._num_folders = 0
        self._twin = small.Model(self._tables, self._optimizer, **self._options)
        self._twin_dense = torch.optim.SGD(self._twin.layer.parameters(), lr=0.1)
        self._model = None
        self._build()

    def go(self):
        """Until the mini-batches end."""
        actions = [
            (self._evaluate, 3),
            (self._evaluate_by_the_pipeline, 2),
            (self._evaluate_on_the_training_data, 1),
            (self._look, 1),
            (self._write, 1),
            (self._load, 1),
            (self._build, 1),
            (self._break_a_transfer, 2),
            (self._keep_a_graph, 2),
            (self._drop_graphs, 1),
            (self._claim_without_use, 2),
            (self._split_a_claim, 2),
            (self._pin_popular, 2),
            (self._pipeline_detaches, 1),
        ]
        names, weights = zip(*actions, strict=True)
        self._iterator = Stream(self._give())
        while self._step():
            self._require_slots()
            for act in self._random.choices(names, weights, k=self._random.randint(0, 2)):
                try:
                    act()
                except TiersFailed as error:
                    self._go_on_from_the_twin(error)
                self._require_slots()
            if self._random.random() < 0.3:
                self._require_rows()
        self._graphs.clear()
        self._leave_a_broken_model()
        self._small.require_equal(self._twin, self._model)
        self._pipeline.detach()
        assert self._small.num_claimed(self._model) == 0
        self._require_slots()

    def _give(self):
        for batch in self._batches:
            self._given.append(batch)
            yield batch

    def _step(self):
        """Whether there was a mini-batch; one whose transfers fail, or too large, is left out."""
        try:
            loss, _ = self._pipeline.progress(self._iterator)
        except StopIteration:
            return False
        except TiersFailed as error:
            self._go_on_from_the_twin(error)
        except BudgetTooSmall as error:
            self._require_known(error)
            self._given.pop(0)
            self._graphs.clear()
        else:
            batch = self._given.pop(0)
            [expected] = self._small.run_plain(self._twin, self._twin_dense, [batch])
            assert loss.item() == expected
        self._wrap()
        return True

    def _build(self):
        """The model anew, at another budget, with another plan or none, in memory or in files."""
        if self._model is not None:
            self._iterator.is_paused = True  # what was taken from it is the old pipeline's
            while self._given:
                self._step()
            self._iterator.is_paused = False
            self._graphs.clear()
            self._leave_a_broken_model()
            self._small.require_equal(self._twin, self._model)
        self._build_from_the_twin()

    def _leave_a_broken_model(self):
        """No transfer fails from now on; if one has, go on from the twin."""
        self._faults.left |= {"fetch": 0, "write_back": 0}
        for tiers in self._model.embeddings.tiers():
            tiers.residency.settle()
        try:
            self._model.embeddings.table_weights()[0].norm()
            self._model.state_dict()
        except TiersFailed as error:
            self._go_on_from_the_twin(error)

    def _go_on_from_the_twin(self, error):
        """After a failed transfer every use of the tables raises; the twin is a checkpoint."""
        self._require_known(error)
        with pytest.raises(TiersFailed, match=BROKEN):
            self._model.state_dict()
        with torch.no_grad(), pytest.raises(TiersFailed, match=BROKEN):
            self._model(self._batches[0])
        self._given.clear()
        self._graphs.clear()
        self._faults.left |= {"fetch": 0, "write_back": 0}
        self._build_from_the_twin()

    def _build_from_the_twin(self):
        chance, small = self._random, self._small
        more = chance.choice([60, 20, 8, 3, 0])
        budget = small.budget_for(self._tables, self._optimizer, self._batches, more)
        options = {"budget": budget}
        if chance.random() < 0.3:
            options = {"plan": self._plan(budget)} if more > 3 else options
        elif chance.random() < 0.3:
            self._num_folders += 1
            options |= {"cold_tier": "file", "cold_path": self._folder / str(self._num_folders)}
        model = small.Model(self._tables, self._optimizer, **self._options, **options)
        model.load_state_dict(self._twin.state_dict())
        model.embeddings.row_optimizer.load_state_dict(
            self._twin.embeddings.row_optimizer.state_dict()
        )
        schedule = chance.choice(
            [Sequential(), LookAhead(chance.randint(1, 8)), Auto(steps_per_turn=1, num_rounds=1)]
        )
        dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        self._model, self._pipeline = model, TrainPipeline(model, dense, schedule=schedule)
        self._wrap()

    def _plan(self, budget):
        profile = PopularityProfile({table.name: table.num_embeddings for table in self._tables})
        for batch in self._random.sample(self._batches, 3):
            profile.add(batch.sparse_features)
        optimizer = self._optimizer
        return plan_hot_rows(profile, self._tables, 2 * budget, optimizer, window_lookups=8)

    def _wrap(self):
        """Put the faulty store before each cold store: new slots have a new one."""
        for tiers in self._model.embeddings.tiers():
            if not isinstance(tiers.residency._cold, FaultyStore):
                tiers.residency._cold = FaultyStore(tiers.residency._cold, self._faults)

    def _models(self):
        return self._twin, self._model

    def _evaluate(self):
        batch = self._random.choice(self._batches)
        with torch.no_grad():
            expected, found = (model(batch)[0] for model in self._models())
            assert torch.equal(expected, found)

    def _evaluate_by_the_pipeline(self):
        """Evaluate on a separate iterator, which may be left before its end."""
        chance = self._random
        batches = chance.choices(self._batches, k=chance.randint(1, 3))
        iterator = iter(batches) if chance.random() < 0.5 else (batch for batch in batches)
        for batch in batches[: chance.randint(1, 3)]:
            self._compute_loss(iterator, batch)

    def _evaluate_on_the_training_data(self):
        """On the next mini-batch, which is not trained on then."""
        if self._given:
            self._compute_loss(self._iterator, self._given.pop(0))

    def _compute_loss(self, iterator, batch):
        for model in self._models():
            model.eval()
        try:
            with torch.no_grad():
                assert torch.equal(self._pipeline.progress(iterator)[0], self._twin(batch)[0])
        finally:
            for model in self._models():
                model.train()

    def _look(self):
        number = self._random.randrange(len(self._tables))
        expected, found = (each.embeddings.table_weights()[number] for each in self._models())
        assert torch.equal(expected, found)

    def _write(self):
        number, factor = self._random.randrange(len(self._tables)), self._random.choice([0.5, -1])
        first = self._random.randrange(50)
        with torch.no_grad():
            for model in self._models():
                model.embeddings.table_weights()[number][first:] *= factor

    def _load(self):
        for model in self._models():
            halved = {name: each * 0.5 for name, each in model.state_dict().items()}
            model.load_state_dict(halved)
            row_optimizer = model.embeddings.row_optimizer
            row_optimizer.load_state_dict(row_optimizer.state_dict())

    def _break_a_transfer(self):
        self._faults.left[self._random.choice(["fetch", "write_back"])] += 1

    def _keep_a_graph(self):
        """A forward that no backward comes back to, yet: its rows keep their slots."""
        try:
            self._graphs.append(self._model(self._random.choice(self._batches))[0])
        except BudgetTooSmall as error:
            self._require_known(error)
            self._graphs.clear()
        self._wrap()

    def _drop_graphs(self):
        self._graphs.clear()

    def _claim_without_use(self):
        claim = self._model.embeddings.prefetch(self._random.choice(self._batches).sparse_features)
        if self._random.random() < 0.5:
            claim.cancel()

    def _split_a_claim(self):
        """As Hotline does; of the parts, each is looked up or given back."""
        chance, batch = self._random, self._random.choice(self._batches)
        try:
            claim = self._model.embeddings.prefetch(batch.sparse_features)
            if not claim.is_held:
                return
            is_missing = torch.stack(claim.missing_samples()).any(0)
            sides = [side.nonzero().flatten() for side in (~is_missing, is_missing)]
            parts = claim.split([(sides[0], False), (sides[1], True)])
            for part, samples in zip(parts, sides, strict=True):
                if chance.random() < 0.7 and len(samples):
                    loss, _ = self._model(select_samples(batch, samples, len(is_missing)))
                    self._graphs.append(loss)
                elif chance.random() < 0.5:
                    part.cancel()
        except BudgetTooSmall as error:
            self._require_known(error)
            self._graphs.clear()
        self._wrap()

    def _pin_popular(self):
        for tiers in self._model.embeddings.tiers():
            tiers.residency.pin_popular(self._random.choice([0, 0.3, 0.8]), 1)

    def _pipeline_detaches(self):
        self._pipeline.detach()
        assert all(tiers.residency.queue.last == 0 for tiers in self._model.embeddings.tiers())

    def _require_known(self, error):
        """It is one that was asked for; and it keeps no frames, which would keep slots."""
        while error is not None:
            assert isinstance(error, BudgetTooSmall) or BROKEN in str(error) or error.__cause__
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    def _require_slots(self):
        """A row is in one slot at most, and slots are counted as often as tickets hold them."""
        for tiers in self._model.embeddings.tiers():
            residency, slots = tiers.residency, tiers.hot.map.arrays
            _ = residency.num_claimed  # takes note of what was released
            full = np.flatnonzero(slots.row_of_slot >= 0)
            at = slots.slot_of_row[slots.row_of_slot[full]]
            assert np.array_equal(np.where(at >= AWAITED, at - AWAITED, at), full)
            assert (slots.slot_of_row >= 0).sum() == len(full)
            assert (slots.slot_of_row >= -1).all()
            expected = np.zeros(tiers.hot.num_slots, np.int64)
            known = [hold for hold in list(self._tickets) if hold.residency is residency]
            for hold in known:
                assert len(np.unique(hold.slots)) == len(hold.slots)
                expected[hold.slots] += 1
            assert np.array_equal(slots.num_claims, expected)
            is_idle = (slots.num_claims == 0) & (slots.flags & PINNED == 0)
            assert tiers.hot.map._num_idle == is_idle.sum()

    def _require_rows(self):
        """Every row is the twin's, in its slot or in the cold store, whichever counts."""
        weights = iter(self._twin.embeddings.table_weights())
        expected = {table.name: next(weights).detach() for table in self._tables}
        names = {
            weight.data_ptr(): name
            for name, weight in zip(expected, _raw_tables(self._model), strict=True)
        }
        for tiers in self._model.embeddings.tiers():
            tiers.residency.settle()
            slots = tiers.hot.map.arrays
            if tiers.residency.queue._failure:  # then the next use raises
                continue
            if tiers.is_exposed:  # the table was read: it counts until the next lookup
                continue
            for number, table in enumerate(tiers.cold.tables.tables if tiers.cold.tables else ()):
                first, rows = int(tiers.hot.first_rows[number]), table.detach().clone()
                at = slots.slot_of_row[first : first + len(rows)]
                is_here = torch.from_numpy((at >= 0) & (at < AWAITED))
                rows[is_here] = tiers.hot.rows[at[is_here.numpy()].astype(np.int64)]
                assert torch.equal(rows, expected[names[table.data_ptr()]])


def _raw_tables(model):
    """The tables' memory, read without telling the module."""
    with torch._C.DisableTorchFunctionSubclass():
        return [weight.data for weight in model.embeddings.table_weights()]


def run(small, seed, tickets, folder):
    """One run."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "schedule=|budget=|the budget's")
            Run(small, seed, tickets, folder).go()
    finally:
        torch.set_num_threads(before)
