"""Claims made ahead of a lookup change nothing that is computed."""

import copy
import signal
import sys
import tempfile
import threading
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recsys.embeddings
from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.embeddings.table import TableConfig
from recsys.errors import BudgetTooSmall, TiersFailed
from tests.embeddings.tiers import twins
from tests.embeddings.tiers.twins import (
    FEATURES,
    OPTIMIZERS,
    TABLES,
    build,
    require_equal,
    state_bytes,
)

pair = partial(twins.pair, budget=14_000)


def some_ids(seed, num_samples=4):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * num_samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 250, (int(lengths.sum()),), generator=generator)
    return JaggedIds(FEATURES, values, offsets)


def step(module, ids):
    """A step of training; the loss."""
    loss = module(ids).values().square().sum()
    loss.backward()
    return loss.item()


def num_claimed(module):
    return sum(tiers.residency.num_claimed for tiers in module.tiers())


def num_fetched(module):
    return [tiers.residency.counts.num_fetched for tiers in module.tiers()]


def test_a_lookup_takes_the_claim_of_its_ids_and_fetches_nothing():
    modules = pair(SGD(lr=0.5))
    claim = modules[1].prefetch(some_ids(1))
    assert claim.is_held
    before = num_fetched(modules[1])
    assert all(before)

    losses = [step(module, some_ids(1)) for module in modules]

    assert losses[0] == losses[1]
    assert not claim.is_held
    assert not claim.is_given_up
    assert num_fetched(modules[1]) == before
    assert num_claimed(modules[1]) == 0
    require_equal(*modules)


def test_a_row_that_is_updated_after_it_was_claimed_is_the_newest_when_its_lookup_comes():
    modules = pair(Adagrad(lr=0.5))
    ids = some_ids(1)
    claims = [modules[1].prefetch(ids) for _ in range(3)]  # of one slot each row has one

    losses = [[step(module, ids) for _ in range(3)] for module in modules]

    assert losses[0] == losses[1]
    assert not any(claim.is_held or claim.is_given_up for claim in claims)
    require_equal(*modules)


def test_a_lookup_of_other_ids_leaves_the_claim_alone():
    modules = pair(SGD(lr=0.5))
    claim = modules[1].prefetch(some_ids(1))

    losses = [step(module, some_ids(2)) for module in modules]

    assert losses[0] == losses[1]
    assert claim.is_held
    claim.cancel()
    assert claim.is_given_up
    assert num_claimed(modules[1]) == 0
    require_equal(*modules)


def test_ids_that_were_overwritten_after_they_were_claimed_are_other_ids():
    modules = pair(SGD(lr=0.5))
    ids = some_ids(1)
    claim = modules[1].prefetch(ids)
    ids.values().numpy()[:] = 7

    losses = [step(module, ids) for module in modules]

    assert losses[0] == losses[1]
    assert claim.is_held
    require_equal(*modules)


def test_the_same_values_in_other_bags_or_of_other_features_are_other_ids():
    tiered = pair(SGD(lr=0.5))[1]
    values = torch.arange(6)
    one_hot = JaggedIds.from_one_hot(FEATURES, values.reshape(3, 2))
    others = [
        JaggedIds(FEATURES, values, torch.tensor([0, 2, 2, 3, 4, 5, 6])),
        JaggedIds.from_one_hot(FEATURES[::-1], values.reshape(3, 2)),
    ]
    claim = tiered.prefetch(one_hot)

    for other in others:
        tiered(other)

    assert claim.is_held
    tiered(one_hot)
    assert not claim.is_held


class GatedStore:
    """A cold store that waits while its gate is closed, and fails when told so."""

    def __init__(self, store):
        self._store = store
        self.gate = threading.Event()
        self.gate.set()
        self.num_faults = 0

    def fetch(self, hot, rows, slots):
        self.gate.wait()
        if self.num_faults:
            self.num_faults -= 1
            raise OSError("the disk is gone")
        self._store.fetch(hot, rows, slots)

    def write_back(self, hot, rows, slots):
        self.gate.wait()
        self._store.write_back(hot, rows, slots)


def gated(module):
    """Its stores, which wait and fail as a test says."""
    stores = []
    for tiers in module.tiers():
        stores.append(GatedStore(tiers.residency._cold))
        tiers.residency._cold = stores[-1]
    return stores


def test_a_fetch_that_fails_ahead_is_raised_by_the_next_use_and_by_every_later_one():
    module = build(Adagrad(lr=0.5), 24_000)
    stores = gated(module)
    step(module, some_ids(1))
    stores[0].num_faults = 1
    stores[0].gate.clear()
    failing = module.prefetch(some_ids(2))
    stores[0].gate.set()
    for tiers in module.tiers():
        tiers.residency.queue.settle()

    with pytest.raises(TiersFailed, match=r"the disk is gone.*load a checkpoint") as raised:
        module(some_ids(1))

    cause = raised.value.__cause__
    assert any(entry.name == "fetch" for entry in traceback.extract_tb(cause.__traceback__))
    uses = (
        lambda: module(some_ids(2)),
        lambda: module.prefetch(some_ids(3)),
        lambda: module.table_weights()[0] * 2,
        lambda: module.load_state_dict(module.state_dict()),
        lambda: copy.deepcopy(module),
    )
    for use in uses:
        with pytest.raises(TiersFailed, match="OSError: the disk is gone"):
            use()
    with torch.no_grad(), pytest.raises(TiersFailed, match="OSError: the disk is gone"):
        module(some_ids(1))
    module.settle()
    assert not failing.is_held


def test_rows_on_their_way_out_go_to_the_table_that_they_are_of():
    modules = pair(SGD(lr=0.5), budget=8000)
    other = {name: table * 0.5 for name, table in build(SGD(lr=0.5)).state_dict().items()}
    stores = gated(modules[1])
    for number in range(20):
        for module in modules:
            step(module, some_ids(number))
    for store in stores:
        store.gate.clear()
    before = [tiers.residency.counts.num_written_back for tiers in modules[1].tiers()]
    modules[1].prefetch(some_ids(100))
    after = [tiers.residency.counts.num_written_back for tiers in modules[1].tiers()]
    assert max(new - old for old, new in zip(before, after, strict=True)) > 0

    timer = threading.Timer(0.05, lambda: [store.gate.set() for store in stores])
    timer.start()
    for module in modules:
        for weight, rows in zip(module.table_weights(), other.values(), strict=True):
            weight.data = rows.clone()
    losses = [step(module, some_ids(100)) for module in modules]

    timer.join()
    assert losses[0] == losses[1]
    require_equal(*modules)


def test_tables_that_cannot_be_read_again_after_a_write_are_a_failed_transfer():
    module = build(Adagrad(lr=0.5), 24_000)
    stores = gated(module)
    step(module, some_ids(1))
    module.prefetch(some_ids(2))
    with torch.no_grad():
        module.table_weights()[0].mul_(0.5)
    stores[0].num_faults = 1

    for _ in range(2):
        with pytest.raises(TiersFailed, match="the disk is gone"):
            module(some_ids(2))


def users(size, **options):
    """One table, and what its slots take beside the row map."""
    tables = [TableConfig(name="users", num_embeddings=size, embedding_dim=4)]
    return build(SGD(lr=0.1), tables=tables, **options)


def of_users(*rows):
    return JaggedIds.from_one_hot(["users"], torch.tensor([rows]))


def test_where_there_is_no_room_nothing_is_claimed_and_later_lookups_are_right():
    module = users(400, budget=4 * 400 + 24 * 10)
    first = module.prefetch(of_users(*range(6)))

    second = module.prefetch(of_users(*range(10, 16)))

    assert first.is_held
    assert (second.is_held, second.has_room) == (False, False)
    assert num_claimed(module) == 6
    step(module, of_users(*range(10, 16)))  # for which there is room if the first gives up its own
    assert first.is_given_up


def test_the_claim_made_last_is_given_up_first_and_no_more_than_needed():
    module = users(400, budget=4 * 400 + 24 * 12)
    claims = [module.prefetch(of_users(*range(start, start + 4))) for start in (0, 4, 8)]

    step(module, of_users(20, 21, 22))

    assert [claim.is_held for claim in claims] == [True, True, False]


def test_a_claim_of_every_dim_or_none():
    modules = pair(SGD(lr=0.1))
    small = [each for each in modules[1].tiers() if each.hot.rows.shape[1] == 8]
    [taken] = small
    held = taken.hot.num_slots - 2
    taken_rows = JaggedIds(
        FEATURES, torch.arange(held), torch.tensor([0] * 2 + [0] + [held] * (held > 0))
    )
    modules[1].prefetch(taken_rows)
    before = num_claimed(modules[1])

    refused = modules[1].prefetch(
        JaggedIds(FEATURES, torch.arange(200, 206), torch.tensor([0, 0, 0, 6]))
    )

    assert not refused.has_room
    assert num_claimed(modules[1]) == before


def test_rows_of_a_plan_are_given_up_after_claims_that_were_made_ahead():
    tables = [TableConfig(name="users", num_embeddings=400, embedding_dim=4)]
    profile = PopularityProfile({"users": 400})
    profile.add(of_users(*range(6)))
    plan = plan_hot_rows(profile, tables, 4 * 400 + 24 * 14, SGD(lr=0.1), window_lookups=8)
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), plan=plan)
    assert plan.num_pinned == 6
    claim = module.prefetch(of_users(*range(10, 15)))

    assert not module.prefetch(of_users(*range(20, 24))).has_room
    step(module, of_users(*range(30, 38)))

    assert claim.is_given_up  # and no warning of a plan's rows that are not kept


def test_a_mini_batch_that_does_not_fit_alone_is_refused_when_its_lookup_comes():
    module = users(400, budget=4 * 400 + 24 * 10)
    ids = of_users(*range(11))

    assert not module.prefetch(ids).has_room

    with pytest.raises(BudgetTooSmall, match="take 1864 bytes, and the budget is 1840"):
        module(ids)

    module(of_users(*range(10)))


def test_claims_give_way_where_the_budget_has_to_be_shared_again():
    tables = [
        TableConfig(name="small", num_embeddings=100, embedding_dim=4),
        TableConfig(name="large", num_embeddings=3000, embedding_dim=8),
    ]
    modules = [
        build(SGD(lr=0.1), budget, tables) for budget in (None, 4 * 3100 + 60 * 24 + 40 * 40)
    ]
    few = JaggedIds.from_one_hot(["small", "large"], torch.zeros(2, 1, dtype=torch.int64))
    values = torch.cat([torch.arange(70), torch.arange(20)])
    wide = JaggedIds(["small", "large"], values, torch.tensor([0, 70, 90]))
    claim = modules[1].prefetch(few)

    losses = [[step(module, wide), step(module, few)] for module in modules]

    assert losses[0] == losses[1]
    assert claim.is_given_up
    require_equal(*modules)


def test_nothing_is_claimed_of_resident_rows_or_of_frozen_ones():
    resident, tiered = pair(SGD(lr=0.5))
    for table in tiered.table_weights():
        table.requires_grad_(False)

    for module in (resident, tiered, HotColdEmbeddingBagCollection(TABLES)):
        claim = module.prefetch(some_ids(1))
        assert (claim.is_held, claim.has_room, claim.is_given_up) == (False, True, False)


OURS = str(Path(recsys.embeddings.__file__).parent)


class Preempted(Exception):
    """What the handler of a signal raises, where a scheduler of jobs sends one."""


def raise_preempted(*_):
    raise Preempted


class InterruptedAt:
    """A signal at the n-th moment, while it lasts, at which Python looks for one in this package.

    That is where a function begins, and where a call of one that is not Python's has returned.
    """

    def __init__(self, number, signal_number):
        self.left, self.signal_number = number, signal_number

    def __enter__(self):
        sys.setprofile(self._notice)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _notice(self, frame, event, _):
        is_ours = frame.f_code.co_filename.startswith(OURS)
        if event in ("call", "c_return") and is_ours:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self.signal_number)


@pytest.fixture(scope="module")
def preemptible():
    before = signal.signal(signal.SIGTERM, raise_preempted)
    yield
    signal.signal(signal.SIGTERM, before)


# What comes while an object goes is printed, and interrupts nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(max_examples=min(100, 2 * settings().max_examples))
@given(
    st.sampled_from(OPTIMIZERS),
    st.integers(1, 1500),
    st.booleans(),
    st.booleans(),
    st.sampled_from([signal.SIGINT, signal.SIGTERM]),
)
def test_whenever_it_is_interrupted_a_module_can_be_trained_on(
    preemptible, optimizer, number, is_held, is_in_files, signal_number
):
    with tempfile.TemporaryDirectory() as folder:
        in_files = {"cold_tier": "file", "cold_path": f"{folder}/rows"} if is_in_files else {}
        tiered = build(optimizer, 10_000 + state_bytes(optimizer), **in_files)
        interrupt_and_train_on(tiered, optimizer, number, signal_number, is_held=is_held)


def interrupt_and_train_on(tiered, optimizer, number, signal_number, *, is_held):
    for seed in range(6):
        step(tiered, some_ids(seed))
    if is_held:
        tiered.prefetch(some_ids(6))
    try:
        with InterruptedAt(number, signal_number):
            tiered.prefetch(some_ids(7))
            step(tiered, some_ids(6))
            step(tiered, some_ids(7))
    except (KeyboardInterrupt, Preempted):
        pass
    found = [table.detach().clone() for table in tiered.table_weights()]
    for tiers in tiered.tiers():
        tiers.settle()
    tiered.row_optimizer.zero_grad()  # what an interrupted backward has left
    assert num_claimed(tiered) == 0
    assert torch._C._is_torch_function_enabled()

    resident = build(optimizer)
    resident.load_state_dict(tiered.state_dict())
    resident.row_optimizer.load_state_dict(copy.deepcopy(tiered.row_optimizer.state_dict()))
    for seed in range(8, 14):
        tiered.prefetch(some_ids(seed + 1))
        assert step(tiered, some_ids(seed)) == step(resident, some_ids(seed))

    assert all(table.isfinite().all() for table in found)
    require_equal(resident, tiered)


def test_the_default_device_is_not_asked_for_ids_of_the_cpu():
    resident, tiered = pair(Adagrad(lr=0.1))
    batches = [some_ids(seed) for seed in range(3)]

    losses = []
    for module in (resident, tiered):
        with torch.device("meta"):
            for ids in batches:
                module.prefetch(ids)
                losses.append(step(module, ids))

    assert losses[:3] == losses[3:]
