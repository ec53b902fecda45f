"""Modules on a device, whose kernels are operations of torch; here the CPU stands in for one."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.kernels import choice as kernel_choice
from recsys.embeddings.lookup.abstract_tables import check_input
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.errors import IdOutOfRange, MalformedBags
from tests.torch_kernels import BY_NUMBA

OPTIMIZERS = [
    SGD(lr=0.3),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.05),
    PartialRowWiseAdam(lr=0.05),
]
each_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__
)
# Two dims, two poolings, a feature looked up in two tables, a table by two features.
TABLES = [
    TableConfig(name="a", num_embeddings=11, embedding_dim=4, feature_names=("f", "g")),
    TableConfig(name="b", num_embeddings=5, embedding_dim=4, feature_names=("h",)),
    TableConfig(name="c", num_embeddings=9, embedding_dim=4, feature_names=("g",)),
    TableConfig(name="d", num_embeddings=7, embedding_dim=6, feature_names=("k",), pooling="mean"),
]
FEATURES = {"g": 9, "f": 11, "k": 7, "h": 5}  # and how many rows all of their tables have


def by_numba(monkeypatch):
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_NUMBA)


def make_ids(seed, *, longest=None, batch_size=8, device="cpu", has_weights=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.ones(4 * batch_size, dtype=torch.int64)
    if longest is not None:
        lengths = torch.randint(0, longest + 1, (4 * batch_size,), generator=generator)
    highs = torch.tensor(list(FEATURES.values()))
    highs = highs.repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(highs), generator=generator) * highs).long()
    if longest is None:
        return JaggedIds.from_one_hot(list(FEATURES), values.view(4, -1).to(device))
    weights = torch.rand(len(values), generator=generator) if has_weights else None
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return JaggedIds(list(FEATURES), values, offsets, weights).to(device)


def make_pair(monkeypatch, device, optimizer, **others):
    """The same collection on the device, and by kernels for the CPU."""
    ours = HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=optimizer, **others)
    with monkeypatch.context() as context:
        by_numba(context)
        theirs = HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer, **others)
        theirs.load_state_dict({name: rows.cpu() for name, rows in ours.state_dict().items()})
    assert ours._layouts[0].group.kernels is not theirs._layouts[0].group.kernels
    return ours, theirs


def loss_of(module, ids):
    pooled = module(ids).values()
    return (pooled * torch.linspace(-1, 2, pooled.shape[1], device=pooled.device)).square().sum()


def assert_same(ours, theirs):
    for (name, found), expected in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.in_ci(
    "torch-cpu", "cuda", "triton-cpu-jagged-RowWiseAdagrad", "triton-cpu-one-hot-Adam"
)
@pytest.mark.usefixtures("each_way")
@each_optimizer
@pytest.mark.parametrize("longest", [None, 3], ids=["one-hot", "jagged"])
def test_a_collection_trains_as_by_the_kernels_for_the_cpu(monkeypatch, device, optimizer, longest):
    ours, theirs = make_pair(monkeypatch, device, optimizer)

    for step in range(4):
        ids = make_ids(step, longest=longest)
        losses = [loss_of(ours, ids.to(device)), loss_of(theirs, ids)]
        torch.testing.assert_close(losses[0].cpu(), losses[1])
        for loss in losses:
            loss.backward()

    assert_same(ours, theirs)
    found, expected = (each.row_optimizer.state_dict()["state"] for each in (ours, theirs))
    for table in expected:
        assert found[table].keys() == expected[table].keys()
        for name, state in expected[table].items():
            of_ours = torch.as_tensor(found[table][name]).cpu()
            torch.testing.assert_close(of_ours, torch.as_tensor(state))


@pytest.mark.in_ci("torch-cpu", "cuda", "triton-cpu-mean-SparseAdam-jagged")
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("longest", [None, 3], ids=["one-hot", "jagged"])
@pytest.mark.parametrize(
    ("optimizer", "of_torch"),
    [
        (SGD(lr=0.3), lambda table: torch.optim.SGD([table], lr=0.3)),
        (Adagrad(lr=0.1), lambda table: torch.optim.Adagrad([table], lr=0.1)),
        (Adam(lr=0.1), lambda table: torch.optim.SparseAdam([table], lr=0.1)),
    ],
    ids=["SGD", "Adagrad", "SparseAdam"],
)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_takes_the_steps_of_embedding_bag_and_torchs_optimizer(
    device, longest, optimizer, of_torch, mode
):
    plain = nn.EmbeddingBag(20, 4, mode=mode, sparse=True, device=device)
    ours = HotColdEmbeddingBag(20, 4, mode=mode, device=device, optimizer=optimizer)
    ours.load_state_dict(plain.state_dict())
    step = of_torch(plain.weight)

    for number in range(3):
        ids = make_ids(number, longest=longest, batch_size=10, device=device)
        for module in (ours, plain):
            module(ids.values(), ids.offsets()[:-1]).square().sum().backward()
        step.step()
        step.zero_grad()

    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-4, atol=1e-5)


def test_what_torchrec_gives_is_looked_up_too(monkeypatch, device):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    ours, theirs = make_pair(monkeypatch, device, Adagrad(lr=0.1))
    ids = make_ids(0, longest=3)
    features = ids.to_torchrec()

    for module, where in ((ours, device), (theirs, "cpu")):
        assert isinstance(module(features.to(where)), torchrec.KeyedTensor)
        loss_of(module, features.to(where)).backward()

    assert_same(ours, theirs)


def test_gradients_accumulate_until_the_step(monkeypatch, device):
    ours, theirs = make_pair(monkeypatch, device, Adagrad(lr=0.1), auto_apply=False)

    for step in range(3):
        for half, longest in enumerate((None, 2, 4)):
            ids = make_ids(10 * step + half, longest=longest)
            loss_of(ours, ids.to(device)).backward()
            loss_of(theirs, ids).backward()
        ours.row_optimizer.step()
        theirs.row_optimizer.step()

    assert_same(ours, theirs)


def test_two_towers_over_one_table_are_one_update(device):
    plain = nn.EmbeddingBag(20, 4, mode="sum", sparse=True, device=device)
    ours = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=Adagrad(lr=0.1))
    ours.load_state_dict(plain.state_dict())
    users, items = torch.randint(0, 20, (2, 6, 3), device=device)

    for module in (ours, plain):
        (module(users) * module(items)).sum().backward()
    torch.optim.Adagrad([plain.weight], lr=0.1).step()

    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.in_ci("torch-cpu", "cuda", "triton-cpu-jagged")
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("longest", [None, 4], ids=["one-hot", "jagged"])
def test_stacked_vectors_are_those_that_stand_side_by_side(device, longest):
    tables = [dataclasses.replace(table, embedding_dim=4) for table in TABLES]
    stacked = HotColdEmbeddingBagCollection(tables, device=device, optimizer=SGD(lr=0.1))
    side_by_side = HotColdEmbeddingBagCollection(tables, device=device, optimizer=SGD(lr=0.1))
    side_by_side.load_state_dict(stacked.state_dict())
    ids = make_ids(0, longest=longest, device=device)

    found, expected = stacked(ids, stacked=True), side_by_side(ids).values()
    assert torch.equal(found, expected.view_as(found))
    assert found.shape[2] == 4
    found.square().sum().backward()
    expected.square().sum().backward()

    assert_same(stacked, side_by_side.cpu())


@pytest.mark.usefixtures("each_way")
def test_weights_of_lookups_get_a_gradient(device):
    plain = nn.EmbeddingBag(20, 4, mode="sum", sparse=True, device=device)
    ours = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))
    ours.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 20, (5, 3), device=device)
    weights = [torch.linspace(0, 1, 15, device=device).view(5, 3).requires_grad_() for _ in "ab"]

    for module, factors in zip((ours, plain), weights, strict=True):
        module(ids, per_sample_weights=factors).square().sum().backward()
    torch.optim.SGD([plain.weight], lr=0.1).step()

    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("how", [{}, {"is_weighted": True}], ids=["plain", "weighted"])
def test_a_weighted_collection_is_that_of_the_kernels_for_the_cpu(monkeypatch, device, how):
    ours, theirs = make_pair(monkeypatch, device, RowWiseAdagrad(lr=0.1), **how)
    ids = make_ids(0, longest=4, has_weights=True)

    loss_of(ours, ids.to(device)).backward()
    loss_of(theirs, ids).backward()

    assert_same(ours, theirs)


@pytest.mark.in_ci(
    "torch-cpu",
    "cuda",
    "triton-cpu-padding_idx mode",
)
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    "settings",
    [
        {"padding_idx": 3},
        {"padding_idx": 3, "mode": "mean"},
    ],
    ids=" ".join,
)
def test_a_bag_has_the_settings_that_it_has_on_the_cpu(monkeypatch, device, settings):
    settings = {"mode": "sum", "optimizer": SGD(lr=0.2), **settings}
    ours = HotColdEmbeddingBag(9, 4, device=device, **settings)
    with monkeypatch.context() as context:
        by_numba(context)
        theirs = HotColdEmbeddingBag(9, 4, **settings)
        theirs.load_state_dict(ours.state_dict())

    for seed in range(3):
        ids = make_ids(seed, longest=4)
        results = [
            module(ids.values().to(where) % 9, ids.offsets()[:-1].to(where))
            for module, where in ((ours, device), (theirs, "cpu"))
        ]
        torch.testing.assert_close(results[0].cpu(), results[1])
        for result in results:
            result.square().sum().backward()

    assert_same(ours, theirs)


def test_a_grad_that_somebody_looks_at_and_clips_is_what_moves_rows(device):
    plain = nn.EmbeddingBag(20, 4, mode="mean", sparse=True, device=device)
    ours = HotColdEmbeddingBag(
        20, 4, sparse=True, device=device, optimizer=SGD(lr=0.1), auto_apply=False
    )
    ours.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 20, (5, 3), device=device)

    for module in (ours, plain):
        module(ids).square().sum().backward()
        assert module.weight.grad.is_sparse
        module.weight.grad = module.weight.grad.coalesce() * 0.25
    ours.row_optimizer.step()
    torch.optim.SGD([plain.weight], lr=0.1).step()

    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.parametrize("longest", [None, 3], ids=["one-hot", "jagged"])
def test_without_an_optimizer_of_ours_gradients_are_sparse_and_torch_steps(
    monkeypatch, device, longest
):
    modules = make_pair(monkeypatch, device, None)
    ids = make_ids(0, longest=longest)

    for module in modules:
        steps = torch.optim.SGD(module.parameters(), lr=0.1)
        loss_of(module, ids.to(module.device)).backward()
        assert all(table.grad.is_sparse for table in module.parameters())
        steps.step()

    assert_same(*modules)


@pytest.mark.usefixtures("each_way")
def test_an_id_that_is_no_row_is_raised_by_the_next_call_and_no_row_has_moved(device):
    module = HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=Adam(lr=0.1))
    loss_of(module, make_ids(0, device=device)).backward()
    before = {name: rows.clone() for name, rows in module.state_dict().items()}
    bad = make_ids(1, device=device)
    bad.values()[8 * 3 + 2] = 5  # of "h"

    def train_and_check():
        loss_of(module, bad).backward()
        module.check_input()

    with pytest.raises(IdOutOfRange, match=r"feature 'h', sample 2: id 5 is not in \[0, 5\)"):
        train_and_check()

    assert all(torch.equal(rows, before[name]) for name, rows in module.state_dict().items())
    module.check_input()
    loss_of(module, make_ids(2, device=device)).backward()
    assert not torch.equal(module.table_weights()[0], before["embedding_bags.a.weight"])


@pytest.mark.parametrize("values", [[1, 99, 2], [-1, 1, 2]], ids=str)
def test_a_bag_says_later_which_id_was_no_row(device, values):
    module = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))
    ids = torch.tensor(values, device=device)
    bad = next(value for value in values if not 0 <= value < 20)

    module(ids, torch.tensor([0, 1, 2], device=device))

    with pytest.raises(IdOutOfRange, match=rf"sample {values.index(bad)}: id {bad} is not in"):
        module.check_input()


@pytest.mark.usefixtures("each_way")
def test_offsets_that_make_no_bags_are_said_later(device):
    module = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))

    module(torch.tensor([1, 2, 3], device=device), torch.tensor([0, 3, 1], device=device))

    with pytest.raises(MalformedBags, match="number 2 does not"):
        module.check_input()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_behind_the_last_offset_belong_to_no_bag(device, mode):
    settings = {"mode": mode, "include_last_offset": True}
    plain = nn.EmbeddingBag(20, 4, device=device, **settings)
    ours = HotColdEmbeddingBag(20, 4, device=device, optimizer=SGD(lr=0.1), **settings)
    ours.load_state_dict(plain.state_dict())
    ids, offsets = torch.tensor([3, 5, 7, 9], device=device), torch.tensor([0, 1, 3], device=device)

    for module, values in ((ours, ids), (plain, ids[:3])):
        module(values, offsets).square().sum().backward()
    torch.optim.SGD([plain.weight], lr=0.1).step()

    torch.testing.assert_close(ours.weight, plain.weight)


def test_offsets_without_an_end_are_refused(device):
    module = HotColdEmbeddingBag(
        20, 4, device=device, optimizer=SGD(lr=0.1), include_last_offset=True
    )
    nothing = torch.empty(0, dtype=torch.int64, device=device)

    with pytest.raises(MalformedBags, match="offsets must not be empty"):
        module(nothing, nothing)


def test_state_is_saved_and_loaded(device):
    first, second = (
        HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=Adagrad(lr=0.1))
        for _ in range(2)
    )
    loss_of(first, make_ids(0, device=device)).backward()
    second.load_state_dict(first.state_dict())
    second.row_optimizer.load_state_dict(first.row_optimizer.state_dict())

    for module in (first, second):
        loss_of(module, make_ids(1, device=device)).backward()

    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_tables_of_one_group_lie_in_one_piece_from_the_start(device):
    module = HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=SGD(lr=0.1))
    addresses = [table.data_ptr() for table in module.table_weights()]

    loss_of(module, make_ids(0, device=device)).backward()

    assert [table.data_ptr() for table in module.table_weights()] == addresses
    ends = [table.data_ptr() + table.nbytes for table in module.table_weights()]
    assert ends[:2] == addresses[1:3]


def test_adopted_tables_stay_the_parameters_that_they_are(device):
    rows = nn.Parameter(torch.randn(20, 4, device=device))
    plain = nn.EmbeddingBag(20, 4, mode="sum", _weight=rows)
    plain.weight = rows

    module = HotColdEmbeddingBag.from_torch(plain, optimizer=SGD(lr=0.5))
    module(torch.tensor([[3]], device=device)).sum().backward()

    assert module.weight is rows
    assert plain(torch.tensor([[3]], device=device)).sum() == rows[3].sum()


def test_a_module_changes_its_dtype_and_its_state_goes_along(device):
    module = HotColdEmbeddingBagCollection(TABLES[:2], device=device, optimizer=Adagrad(lr=0.1))
    ids = make_ids(0, device=device)
    loss_of(module, ids).backward()

    module.double()
    loss_of(module, ids).backward()

    [state, *_] = module.row_optimizer.state_dict()["state"].values()
    assert (module.table_weights()[0].dtype, state["a.momentum1"].dtype) == (torch.float64,) * 2


def test_a_module_without_memory_gets_it_on_the_device(device):
    with torch.device("meta"):
        module = HotColdEmbeddingBagCollection(TABLES, optimizer=Adagrad(lr=0.1))

    module.to_empty(device=device).reset_parameters()
    before = [table.detach().clone() for table in module.table_weights()]
    loss_of(module, make_ids(0, device=device)).backward()

    assert not any(map(torch.equal, module.table_weights(), before))


def test_an_evaluation_ends_with_what_was_wrong_in_it(device):
    model = nn.Sequential(
        HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))
    )
    with torch.no_grad():
        model(torch.tensor([[3], [20]], device=device))

    with pytest.raises(IdOutOfRange, match="sample 1: id 20"):
        check_input(model)


@pytest.mark.parametrize("is_collection", [False, True], ids=["bag", "collection"])
def test_what_is_yet_to_be_said_of_a_lookup_keeps_no_table_alive(device, is_collection):
    if is_collection:
        module = HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=SGD(lr=0.1))
        module(make_ids(0, device=device))
        gone = weakref.ref(module.table_weights()[0])
    else:
        module = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))
        module(torch.tensor([[3]], device=device))
        gone = weakref.ref(module.weight)

    del module
    gc.collect()

    assert gone() is None


def test_ids_elsewhere_than_the_tables_are_refused(device):
    module = HotColdEmbeddingBag(20, 4, mode="sum", device=device, optimizer=SGD(lr=0.1))

    with pytest.raises(
        ValueError, match=r"ids must be on the device where rows are looked up, .* got meta"
    ):
        module(torch.zeros(2, 1, dtype=torch.int64, device="meta"))


@pytest.mark.gpu
def test_a_trained_module_moves_to_the_device_and_back(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    ours = HotColdEmbeddingBagCollection(TABLES, optimizer=Adam(lr=0.1))
    theirs = HotColdEmbeddingBagCollection(TABLES, optimizer=Adam(lr=0.1))
    theirs.load_state_dict(ours.state_dict())

    for step, device in enumerate(["cpu", "cuda", "cuda", "cpu"]):
        ours.to(device)
        ids = make_ids(step, longest=2)
        loss_of(ours, ids.to(device)).backward()
        loss_of(theirs, ids).backward()

    assert_same(ours, theirs)


@pytest.mark.gpu
def test_a_kernel_on_the_device_does_not_wait_for_it():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    module = HotColdEmbeddingBagCollection(TABLES, device="cuda", optimizer=Adam(lr=0.1))
    batches = [
        make_ids(seed, longest=longest, device="cuda") for seed in (0, 1) for longest in (None, 3)
    ]
    for ids in batches:
        loss_of(module, ids).backward()

    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in batches:
            loss_of(module, ids).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.in_ci("torch-", "triton-cpu-jagged-PartialRowWiseAdam")
@pytest.mark.usefixtures("each_way")
@each_optimizer
@pytest.mark.parametrize("longest", [None, 3], ids=["one-hot", "jagged"])
def test_a_step_does_nothing_that_would_wait_for_a_device(no_round_trips, optimizer, longest):
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer)
    ids = make_ids(0, longest=longest)
    before = [table.detach().clone() for table in module.table_weights()]

    with no_round_trips:
        for _ in range(2):
            loss_of(module, ids).backward()

    assert not any(map(torch.equal, module.table_weights(), before))
    with pytest.raises(AssertionError, match="nonzero"), no_round_trips:
        ids.values().nonzero()
