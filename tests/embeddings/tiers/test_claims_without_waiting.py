"""A device that reaches the cold store: the host queues claims and transfers, and waits for none.

The CPU stands in for a device. One test interprets the kernels that do it on a real one.
"""

import itertools
from contextlib import contextmanager

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.saved_tables import SavedTables
from recsys.embeddings.tiers.ahead import InputIds
from recsys.embeddings.tiers.cold import device_copies
from recsys.embeddings.update.changed_rows import rows_of
from recsys.errors import IdOutOfRange, TiersFailed
from recsys.pipeline.tiers_state import load_tiers_state, tiers_state
from tests.host_copies import HOST_COPIES, reach_host, use_triton
from tests.torch_kernels import TorchSlotMap

TritonSlotMap = pytest.importorskip("recsys.embeddings.kernels.triton.slots").TritonSlotMap

TABLES = [
    TableConfig(name="users", num_embeddings=300, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=260, embedding_dim=4, feature_names=("goods", "seen")),
]
FEATURES = ["users", "goods", "seen"]
BUDGET = 4 * 560 + 60 * (16 + 16 + 8)  # 60 slots


@pytest.fixture(autouse=True)
def _reaches_the_host(monkeypatch, device):
    reach_host(monkeypatch)


@pytest.fixture
def never_waits(monkeypatch, no_round_trips):
    """A context in which neither a claim nor another operation may wait for a device."""

    def refuse(*arguments):
        raise AssertionError("this waits for the device")

    @contextmanager
    def context():
        with monkeypatch.context() as patch, no_round_trips:
            for kind in (TorchSlotMap, TritonSlotMap):
                patch.setattr(kind, "claim", refuse)
            for name in ("cpu", "tolist"):
                patch.setattr(torch.Tensor, name, refuse)
            yield

    return context()


def make_module(device, budget=BUDGET, optimizer=None):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(
        TABLES, device=device, optimizer=optimizer or Adagrad(lr=0.1), budget=budget
    )


def noted_claims(monkeypatch, slot_map):
    """Gets an entry for every claim that waits."""
    waited, kind, claim = [], type(slot_map), type(slot_map).claim
    monkeypatch.setattr(kind, "claim", lambda *arguments: waited.append(1) or claim(*arguments))
    return waited


def make_batches(count, device, longest=None, batch_size=4, seed=0):
    """Ids of three features; one-hot if `longest` is None."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        if longest is None:
            values = torch.randint(0, 250, (len(FEATURES), batch_size), generator=generator)
            found.append(JaggedIds.from_one_hot(FEATURES, values.to(device)))
            continue
        shape = (len(FEATURES) * batch_size,)
        lengths = torch.randint(0, longest + 1, shape, generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        values = torch.randint(0, 250, (int(lengths.sum()),), generator=generator)
        found.append(JaggedIds(FEATURES, values, offsets).to(device))
    return found


def train(module, batches, *, is_ahead=True):
    """A step for each mini-batch but the last; looks one mini-batch ahead."""
    if is_ahead:
        module.prefetch(batches[0])
    for ids, following in itertools.pairwise(batches):
        claim = module.prefetch(following) if is_ahead else None
        module(ids).values().square().sum().backward()
        assert claim is None or claim.is_held
    if is_ahead:
        claim.cancel()


@pytest.mark.in_ci("cuda", "False-False", "cpu-2")
@pytest.mark.parametrize(
    ("longest", "is_ahead", "is_frozen", "by_triton"),
    [
        (None, True, False, False),
        (None, False, False, False),
        (2, True, False, False),
        (2, False, True, False),
        (None, True, False, True),
    ],
)
def test_steps_do_nothing_that_would_wait_for_a_device(
    device, never_waits, monkeypatch, longest, is_ahead, is_frozen, by_triton
):
    if by_triton:
        use_triton(monkeypatch)
    modules = [make_module(device, None), make_module(device)]
    modules[1].load_state_dict(modules[0].state_dict())
    batches = make_batches(12, device, longest)
    for module in modules:
        module.table_weights()[1].requires_grad_(not is_frozen)
        train(module, batches[:3], is_ahead=False)  # makes state, and compiles kernels

    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with never_waits:
            train(modules[1], batches, is_ahead=is_ahead)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    train(modules[0], batches, is_ahead=False)
    assert all(each.residency.counts.num_written_back > 0 for each in modules[1].tiers())
    for expected, found in zip(*(each.table_weights() for each in modules), strict=True):
        assert torch.equal(found, expected.cpu())


@pytest.mark.parametrize("by_triton", [False, True])
@pytest.mark.parametrize("longest", [None, 2])
def test_evaluation_does_nothing_that_would_wait_for_a_device(
    device, never_waits, monkeypatch, longest, by_triton
):
    if by_triton:
        use_triton(monkeypatch)
    modules = [make_module(device, None), make_module(device)]
    modules[1].load_state_dict(modules[0].state_dict())
    batches = make_batches(4, device, longest)
    for module in modules:
        train(module, batches, is_ahead=False)
    others = make_batches(4, device, longest, seed=1)
    expected = [modules[0](ids).values().detach() for ids in others]
    with torch.no_grad():
        modules[1](others[0])  # compiles kernels

    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with never_waits, torch.no_grad():
            found = [modules[1](ids).values() for ids in others]
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", ["2-D", "1-D", "1-D with the last offset"])
def test_bags_find_their_claims_without_waiting(device, never_waits, shape):
    bag = HotColdEmbeddingBag(
        300,
        4,
        mode="sum",
        padding_idx=7,
        include_last_offset=shape.endswith("last offset"),
        device=device,
        optimizer=SGD(lr=0.5),
        budget=4 * 300 + 60 * 24,
    )
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 300, (12,), generator=generator).to(device) for _ in range(5)]
    offsets = torch.tensor([0, 3, 3, 9], device=device)
    inputs = [(each.view(4, 3),) if shape == "2-D" else (each, offsets) for each in ids]
    bag(*inputs[0]).sum().backward()

    with never_waits:
        claim = bag.prefetch(*inputs[0])
        for now, following in itertools.pairwise(inputs):
            coming = bag.prefetch(*following)
            bag(*now).sum().backward()
            assert not claim.is_held
            claim = coming

    assert claim.is_held


def test_a_claim_without_a_row_for_padding_is_for_lookups_with_this_padding():
    bags = TorchBags(torch.tensor([1, 3]), None, None, 2, is_mean=False, padding=3)
    ids = InputIds.copy(bags)

    assert ids.are_given_by(bags)
    assert ids.are_of(bags)
    assert not ids.are_given_by(bags._replace(padding=None))
    assert not ids.are_of(bags._replace(padding=None))


@pytest.mark.parametrize("longest", [None, 2], ids=["one-hot", "jagged"])
def test_counts_and_changed_rows_are_those_of_claims_that_wait(device, monkeypatch, longest):
    batches = make_batches(10, device, longest)
    found = []
    for copies in (None, HOST_COPIES):
        reach_host(monkeypatch, copies)
        module = make_module(device)
        saved = SavedTables(module)
        saved.track()
        train(module, batches)
        [tiers] = module.tiers()
        counts = tiers.residency.counts
        saved.flush()
        found.append((counts, [rows_of(bits).tolist() for bits in saved.take_changed()]))

    assert found[0] == found[1]
    counts, changed = found[0]
    assert counts.num_written_back > 0
    assert all(map(len, changed))


@pytest.mark.parametrize("copies", [None, HOST_COPIES], ids=["waits", "queued"])
def test_claims_that_a_resumed_run_repeats_count_their_lookups_once(device, monkeypatch, copies):
    reach_host(monkeypatch, copies)
    batches = make_batches(3, device)
    whole, stopped, resumed = (make_module(device) for _ in range(3))
    for ids in batches:
        whole.prefetch(ids)
    for ids in batches[:2]:
        stopped.prefetch(ids)

    load_tiers_state(resumed.tiers(), tiers_state(stopped.tiers()))
    for ids in batches:
        resumed.prefetch(ids)

    expected, before, found = (
        module.tiers()[0].residency.counts for module in (whole, stopped, resumed)
    )
    assert found[:4] == expected[:4]
    assert found.num_fetched == expected.num_fetched + before.num_fetched


def test_a_claim_that_may_not_fit_is_waited_for_unless_two_are_ahead(device, monkeypatch):
    module = make_module(device)
    [tiers] = module.tiers()
    assert tiers.hot.num_slots == 60
    waited = noted_claims(monkeypatch, tiers.hot.map)
    few, more = make_batches(1, device)[0], make_batches(1, device, batch_size=19)[0]

    held = [module.prefetch(few) for _ in range(5)]
    assert not waited
    for each in held:
        each.cancel()
    held = [module.prefetch(each) for each in (few, more, few)]

    assert len(waited) == 1  # 60 lookups may be as many rows; they turn out to be fewer
    assert [each.is_held for each in held] == [True, True, False]
    assert not held[2].has_room


def test_rows_that_are_pinned_leave_fewer_slots_to_claims(device, monkeypatch):
    module = make_module(device)
    [tiers] = module.tiers()
    batches = make_batches(3, device)
    for ids in (batches[0], batches[0]):
        module(ids).values().sum().backward()
    num_pinned, _ = tiers.residency.pin_popular(1.0, 0)
    assert num_pinned
    waited = noted_claims(monkeypatch, tiers.hot.map)

    losses = [module(batches[1]).values().sum() for _ in range((60 - num_pinned) // 12)]
    assert not waited
    losses.append(module(batches[2]).values().sum())

    assert waited
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize("waits", [False, True])
def test_a_claim_that_fails_half_way_fails_the_tiers(device, monkeypatch, waits):
    module = make_module(device)
    [tiers] = module.tiers()
    batches = make_batches(2, device)
    module(batches[0]).values().sum().backward()

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    if waits:
        monkeypatch.setattr(tiers.residency._holds, "leave", lambda *_: False)
        monkeypatch.setattr(tiers.hot, "claim", fail)
    else:
        monkeypatch.setattr(tiers.residency._copies, "launch", fail)
    with pytest.raises(TiersFailed, match="out of memory"):
        module.prefetch(batches[1])
    with pytest.raises(TiersFailed):  # its rows have slots, and were not copied there
        module(batches[1])


def test_a_mini_batch_without_samples_is_claimed(device):
    module = make_module(device)
    ids = JaggedIds.from_one_hot(FEATURES, torch.zeros(len(FEATURES), 0, dtype=torch.long))

    claim = module.prefetch(ids.to(device))

    assert claim.has_room
    assert module(ids.to(device)).values().shape[0] == 0


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_an_id_that_is_no_row_is_named_later_and_no_row_is_updated(device, is_ahead, padding_idx):
    bag = HotColdEmbeddingBag(
        300,
        4,
        mode="sum",
        padding_idx=padding_idx,
        device=device,
        optimizer=SGD(lr=0.5),
        budget=4 * 300 + 60 * 24,
    )
    good = torch.tensor([[1, 3], [5, 9]], device=device)
    bag(good).sum().backward()
    before = bag.weight.detach().clone()
    bad = torch.tensor([[5, 3], [300, 7]], device=device)

    if is_ahead:
        assert bag.prefetch(bad).is_held
        bag(good)  # does not report what a later lookup does wrong
    bag(bad).sum()

    with pytest.raises(IdOutOfRange, match=r"sample 1: id 300 is not in \[0, 300\)"):
        bag.check_input()
    assert torch.equal(bag.weight, before)
    bag(good).sum().backward()
    assert not torch.equal(bag.weight, before)


def test_no_row_is_updated_from_a_bad_mini_batch_on(device):
    module = make_module(device, optimizer=SGD(lr=0.5))
    before = [table.detach().clone() for table in module.table_weights()]
    values = torch.tensor([[1, 2], [3, 4], [5, 999]], device=device)

    loss = module(JaggedIds.from_one_hot(FEATURES, values)).values().sum()

    with pytest.raises(
        IdOutOfRange, match=r"feature 'seen', sample 1: id 999 is not in \[0, 260\)"
    ):
        loss.backward()
    assert all(map(torch.equal, module.table_weights(), before))


class Buffer:
    """Ids that a loader writes into the same memory."""

    def __init__(self, device):
        self.values = torch.zeros(len(FEATURES), 4, dtype=torch.int64, device=device)

    def fill(self, first, *, is_unseen):
        values = torch.arange(12, device=self.values.device).view(3, 4) + first
        (self.values.data if is_unseen else self.values).copy_(values)
        return JaggedIds.from_one_hot(FEATURES, self.values.data if is_unseen else self.values)


@pytest.mark.parametrize("is_unseen", [True, False])
def test_ids_that_were_overwritten_do_not_take_the_claim(device, is_unseen):
    module, buffer = make_module(device), Buffer(device)
    expected = module.table_weights()[0].detach().clone()[40:44]

    claim = module.prefetch(buffer.fill(0, is_unseen=is_unseen))
    found = module(buffer.fill(40, is_unseen=is_unseen))["users"]

    assert claim.is_held
    assert torch.equal(found.cpu(), expected.cpu())


def test_samples_whose_rows_are_fetched_are_known(device):
    module = make_module(device)
    module(make_batches(1, device)[0]).values().sum().backward()
    values = make_batches(1, device)[0].values().clone().view(3, 4)
    values[0, 1], values[2, 3] = 251, 252
    claim = module.prefetch(JaggedIds.from_one_hot(FEATURES, values))

    assert [each.tolist() for each in claim.missing_samples()] == [[False, True, False, True]]


def test_padding_is_not_fetched(device):
    bag = HotColdEmbeddingBag(
        300,
        4,
        mode="sum",
        padding_idx=3,
        device=device,
        optimizer=SGD(lr=0.5),
        budget=4 * 300 + 60 * 24,
    )
    bag(torch.tensor([[1, 2]], device=device)).sum().backward()

    claim = bag.prefetch(torch.tensor([[1, 3], [2, 50]], device=device))

    assert [each.tolist() for each in claim.missing_samples()] == [[False, True]]


def test_memory_that_cannot_be_locked_is_copied_through_staging(device, monkeypatch):
    def refuse(tensors, device):
        raise OSError("CUDA cannot page-lock 4096 bytes of memory (out of memory)")

    monkeypatch.setattr(device_copies, "_NEED_LOCKS", {"cuda", "cpu"})
    monkeypatch.setattr(device_copies, "PageLocks", refuse)
    modules = [make_module(device, None), make_module(device)]
    modules[1].load_state_dict(modules[0].state_dict())
    batches = make_batches(8, device)

    with pytest.warns(UserWarning, match=r"out of memory\), so .* waits for the list") as said:
        train(modules[1], batches)

    train(modules[0], batches, is_ahead=False)
    assert len(said) == 1
    for expected, found in zip(*(each.table_weights() for each in modules), strict=True):
        assert torch.equal(found, expected.cpu())


def test_state_is_locked_when_an_update_makes_it(device, monkeypatch):
    locked, make_locks = [], device_copies.PageLocks

    def lock(tensors, device):
        locked.append([tuple(tensor.shape) for tensor in tensors])
        return make_locks(tensors if device.type == "cuda" else [], device)

    monkeypatch.setattr(device_copies, "_NEED_LOCKS", {"cuda", "cpu"})
    monkeypatch.setattr(device_copies, "PageLocks", lock)
    module = make_module(device)

    train(module, make_batches(4, device))

    rows = [(300, 4), (260, 4)]
    assert locked == [[*rows, (0, 4), (0, 4)], [*rows, *rows]]


@pytest.mark.parametrize("read", [torch.Tensor.detach, lambda table: table.data])
def test_tables_are_given_out_once_the_device_has_read_them(device, monkeypatch, read):
    """A caller may write to them, and a lookup that comes before must not see it."""
    waited, wait = [], device_copies.DeviceCopies.wait
    monkeypatch.setattr(
        device_copies.DeviceCopies, "wait", lambda copies: waited.append(copies) or wait(copies)
    )
    module = make_module(device)
    module.table_weights()
    pooled = module(make_batches(1, device)[0])  # no row was updated, so none is written back
    waited.clear()

    read(next(module.parameters()))

    assert pooled is not None
    assert waited
