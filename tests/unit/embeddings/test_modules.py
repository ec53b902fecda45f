"""The engine's drop-ins for `nn.EmbeddingBag` and `nn.Embedding`, beside those of torch."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.lookup.lookup import Nodes
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.tables_module import group_tables
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.errors import BudgetTooSmall, ConfigError, MalformedBags
from tests.unit.embeddings.model import TOO_MANY_ROWS

pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")

IDS, OFFSETS = torch.tensor([1, 2, 1, 0, 3, 3, 6, 1]), torch.tensor([0, 2, 4, 4, 7])
TIERS = {
    "resident": {},
    "host": {"budget": 7 * 4 + 2 * (16 * 2 + 11)},
    "files": {"budget": 7 * 4 + 2 * (16 * 2 + 11), "cold_tier": "file"},
}
ARGUMENTS = {
    "offsets": ({"mode": "sum"}, (IDS, OFFSETS)),
    "last offset": (
        {"mode": "mean", "include_last_offset": True},
        (IDS, torch.tensor([0, 2, 4, 4, 8])),
    ),
    "rows": ({"mode": "mean"}, (IDS.view(4, 2).int(),)),
    "padding": ({"mode": "mean", "padding_idx": 1}, (IDS, OFFSETS)),
    "weights": ({"mode": "sum"}, (IDS, OFFSETS, torch.linspace(0.1, 1, 8))),
}


def step(module, arguments, factor=1.0):
    result = module(*arguments)
    (result * torch.arange(1.0, result.numel() + 1).view(result.shape) * factor).sum().backward()
    return result.detach()


def own(kind, plain, tiers, tmp_path, **settings):
    """A module of ours with the rows of one of torch."""
    if tiers.get("cold_tier") == "file":
        tiers = tiers | {"cold_path": tmp_path}
    module = kind(7, 4, optimizer=Adagrad(lr=0.1), **tiers, **settings)
    module.load_state_dict(plain.state_dict())
    return module


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize(("settings", "arguments"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_bag_trains_as_torchs(settings, arguments, tiers, tmp_path):
    plain = nn.EmbeddingBag(7, 4, **settings)
    ours = own(HotColdEmbeddingBag, plain, tiers, tmp_path, **settings)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for factor in (1.0, -0.5, 2.0):
        torch.testing.assert_close(step(ours, arguments, factor), step(plain, arguments, factor))
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(ours.weight.detach().clone(), plain.weight.detach())
    state = ours.row_optimizer.state_dict()["state"]["weight"]["momentum1"]
    torch.testing.assert_close(state, theirs.state[plain.weight]["sum"])


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("shape", [(), (8,), (4, 2), (2, 2, 2)])
def test_an_embedding_trains_as_torchs(shape, padding_idx, tiers, tmp_path):
    plain = nn.Embedding(7, 4, padding_idx=padding_idx)
    ours = own(HotColdEmbedding, plain, tiers, tmp_path, padding_idx=padding_idx)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    ids = (IDS.view(shape) if shape else IDS[0],)
    for _ in range(3):
        torch.testing.assert_close(step(ours, ids), step(plain, ids))
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(ours.weight.detach().clone(), plain.weight.detach())


def test_modules_of_one_model_share_groups_and_an_optimizer():
    bags = [HotColdEmbeddingBag(7, dim, mode="sum") for dim in (4, 8, 4)]
    before = [bag.weight.detach().clone() for bag in bags]
    places = group_tables([table for bag in bags for table in bag.tables()])
    groups = list(dict.fromkeys(place.group for place in places))
    keyed = {str(number): (bag.weight, "") for number, bag in enumerate(bags)}
    optimizer = FusedOptimizer(keyed, groups, SGD(lr=1.0))
    nodes = {group: Nodes() for group in groups}
    for bag, place in zip(bags, places, strict=True):
        bag.attach([place], nodes[place.group])
    for _ in range(2):
        sum(bag(IDS, OFFSETS).sum() for bag in bags).backward()
        optimizer.step()
    assert len(groups) == 2
    counts = torch.bincount(IDS, minlength=7).unsqueeze(1)
    for bag, rows in zip(bags, before, strict=True):
        torch.testing.assert_close(bag.weight.detach(), rows - 2 * counts)


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_converted_module_goes_on_with_its_state(has_weights):
    found = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=Adagrad(lr=0.1))
        for number in range(2):
            weights = torch.linspace(0, 1, 8, dtype=bag.weight.dtype) if has_weights else None
            step(bag, (IDS, OFFSETS, weights))
            if is_converted and not number:
                bag.double()
        found.append(bag)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0].weight.double(), found[1].weight, **tolerance)
    states = [bag.row_optimizer.state[bag.weight]["momentum1"] for bag in found]
    assert states[1].dtype == torch.float64
    torch.testing.assert_close(states[0].double(), states[1], **tolerance)


@pytest.mark.parametrize("auto_apply", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_may_be_recomputed_in_backward(use_reentrant, has_weights, auto_apply):
    found = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=1e-3), auto_apply=auto_apply)
        linear = nn.Linear(4, 4)

        weights = nn.Parameter(torch.ones(8))

        def block(hidden, bag=bag, linear=linear, weights=weights if has_weights else None):
            return linear(hidden + bag(IDS, OFFSETS, weights)) * bag(IDS.flip(0), OFFSETS, weights)

        for _ in range(3):
            hidden = bag(IDS, OFFSETS)
            for _ in range(2):
                if is_recomputed:
                    hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
                else:
                    hidden = block(hidden)
            hidden.square().sum().backward()
            bag.row_optimizer.step()
        found.append(bag.weight.detach().clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_plain_tables_with_the_newest_rows(make):
    ours = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=Adagrad(lr=0.1), **TIERS["host"])
    step(ours, (IDS, OFFSETS))
    found = make(ours)
    assert type(found.weight) is nn.Parameter
    assert found.row_optimizer is None
    assert torch.equal(found.weight.detach(), ours.weight.detach().clone())
    assert step(found, (IDS, OFFSETS)).shape == (5, 4)
    assert found.weight.grad is not None


@pytest.mark.parametrize("auto_apply", [False, True])
def test_results_of_one_pass_may_have_backwards_of_their_own(auto_apply):
    bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=1.0), auto_apply=auto_apply)
    before = bag.weight.detach().clone()
    for _ in range(2):
        first, second = bag(IDS[:1], OFFSETS[:1]), bag(IDS[1:2], OFFSETS[:1])
        first.sum().backward()
        second.sum().backward()
        bag.row_optimizer.step()
    assert (before - bag.weight)[:3, 0].tolist() == pytest.approx([0, 2, 2])


def test_a_gradient_of_weights_alone_updates_no_row():
    bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=1.0), auto_apply=False)
    weights = torch.ones(8, requires_grad=True)
    before = bag.weight.detach().clone()
    torch.autograd.grad(bag(IDS, OFFSETS, weights).sum(), [weights])
    bag.row_optimizer.step()
    assert torch.equal(bag.weight.detach(), before)


def test_a_replaced_parameter_is_refused():
    bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=1.0))
    bag.load_state_dict({"weight": torch.ones(7, 4)}, assign=True)
    with pytest.raises(ValueError, match="'weight'"):
        bag(IDS, OFFSETS)


@pytest.mark.parametrize("moment", ["before backward", "before step"])
def test_a_module_may_be_converted_within_a_step(moment):
    bag = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=1.0), auto_apply=False)
    before = bag.weight.detach().double()
    result = bag(IDS[:1], OFFSETS[:1]).sum()
    if moment == "before step":
        result.backward()
    bag.double()
    if moment == "before backward":
        result.backward()
    bag.row_optimizer.step()
    assert (before - bag.weight)[:3, 0].tolist() == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("offsets", [[0, 100], [-5, 2], [1, 2], [2, 1]])
def test_offsets_that_lie_are_refused_with_padding_too(offsets):
    bag = HotColdEmbeddingBag(7, 4, padding_idx=1, optimizer=SGD(lr=1.0))
    with pytest.raises(MalformedBags):
        bag(IDS[:3], torch.tensor(offsets))


def test_a_deleted_module_leaves_nothing_behind():
    ours = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=Adagrad(lr=0.1), **TIERS["host"])
    step(ours, (IDS, OFFSETS))
    ours.prefetch(IDS, OFFSETS)
    group = weakref.ref(ours.groups()[0])
    del ours
    gc.collect()
    assert group() is None


def test_a_deleted_resident_module_frees_its_memory_at_once():
    ours = HotColdEmbeddingBag(7, 4, mode="sum", optimizer=Adagrad(lr=0.1))
    step(ours, (IDS, OFFSETS))
    table = weakref.ref(ours.weight)
    gc.collect()
    gc.disable()
    try:
        del ours
        assert table() is None
    finally:
        gc.enable()


def test_a_budget_that_is_too_small_for_loaded_tables_says_so_each_time():
    ours = HotColdEmbeddingBag(7, 4, device="meta", optimizer=SGD(lr=1.0), budget=10)
    ours.load_state_dict({"weight": torch.ones(7, 4)}, assign=True)
    for _ in range(2):
        with pytest.raises(BudgetTooSmall):
            ours(IDS, OFFSETS)


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"budget": 100}, ValueError, "budget="),
        ({"optimizer": "sgd"}, TypeError, "optimizer"),
        ({"optimizer": SGD(lr=1.0), "plan": "plan.npz"}, TypeError, "plan"),
        ({"optimizer": SGD(lr=1.0), "mode": "max"}, ValueError, "'max'"),
        ({"optimizer": SGD(lr=1.0), "max_norm": 1.0}, ValueError, "max_norm"),
        ({"optimizer": SGD(lr=1.0), "scale_grad_by_freq": True}, ValueError, "scale_grad_by_freq"),
        ({"optimizer": SGD(lr=1.0), "cold_tier": "disk"}, ConfigError, "'disk'"),
        ({"optimizer": SGD(lr=1.0), "cold_tier": "file"}, ConfigError, "cold_path"),
        (
            {
                "optimizer": SGD(lr=1.0),
                "device": "cuda",
                "budget": 900,
                "cold_tier": "file",
                "cold_path": "unused",
            },
            ConfigError,
            "'cuda'",
        ),
        ({"optimizer": SGD(lr=1.0), "dtype": torch.float16}, ValueError, "float16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, error, name):
    with pytest.raises(error, match=name):
        HotColdEmbeddingBag(7, 4, **settings)
