"""The engine's drop-ins for TorchRec's collections, beside TorchRec's."""

import copy

import pytest
import torch
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.popularity.counts import PopularityProfile
from recsys.embeddings.popularity.plan import plan_hot_rows
from recsys.errors import IdOutOfRange, MalformedBags, ProfileError
from tests.unit.embeddings.model import TOO_MANY_ROWS

torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")

SIZES = {"users": (9, ["user", "friend"]), "goods": (7, ["item"]), "more": (5, ["item", "user"])}
KEYS = ["item", "unused", "user", "friend"]
LENGTHS = torch.tensor([2, 1, 0, 1, 0, 0, 1, 1, 3, 0, 2, 1])
VALUES = torch.tensor([0, 4, 4, 99, 3, 4, 2, 2, 1, 8, 6, 0])
WEIGHTS = torch.linspace(0.5, 1.5, 12)
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
MAPS = 21 * 4
TIERS = {
    "resident": {},
    "host": {"budget": MAPS + 5 * (16 * 2 + 11)},
    "files": {"budget": MAPS + 5 * (16 * 2 + 11), "cold_tier": "file"},
}


def configs(dims=(4, 4, 4)):
    pooling = torchrec.PoolingType.SUM, torchrec.PoolingType.MEAN, torchrec.PoolingType.SUM
    return [
        torchrec.EmbeddingBagConfig(
            name=name,
            num_embeddings=size,
            embedding_dim=dim,
            feature_names=features,
            pooling=kind,
        )
        for (name, (size, features)), dim, kind in zip(SIZES.items(), dims, pooling, strict=True)
    ]


def unpooled_configs():
    return [
        torchrec.EmbeddingConfig(
            name=name, num_embeddings=size, embedding_dim=4, feature_names=features
        )
        for name, (size, features) in SIZES.items()
    ]


def light(weights=None):
    return JaggedIds(KEYS, VALUES, OFFSETS, weights)


def keyed(weights=None):
    return torchrec.KeyedJaggedTensor(KEYS, VALUES, weights, lengths=LENGTHS)


def of_tiers(tiers, tmp_path):
    return tiers | {"cold_path": tmp_path} if tiers.get("cold_tier") == "file" else tiers


def fill(module, plain):
    module.load_state_dict({name: rows.clone() for name, rows in plain.state_dict().items()})


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dims", [(4, 4, 4), (8, 4, 8)])
@pytest.mark.parametrize("read", [light, keyed])
def test_a_collection_of_bags_trains_as_torchrecs(read, dims, is_weighted, tiers, tmp_path):
    tables = configs(dims)
    for config in tables if is_weighted else ():
        config.pooling = torchrec.PoolingType.SUM
    plain = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    settings = of_tiers(tiers, tmp_path)
    if dims[0] == 8 and settings:
        settings = settings | {"budget": MAPS + 900}
    ours = HotColdEmbeddingBagCollection(tables, is_weighted, optimizer=Adagrad(lr=0.1), **settings)
    fill(ours, plain)
    weights = WEIGHTS if is_weighted else None
    for number in range(3):
        found, expected = ours(read(weights)), plain(keyed(weights))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values())
        torch.testing.assert_close(found["item@goods"], expected["item@goods"])
        factor = torch.linspace(-1, 1, found.values().numel()).view(found.values().shape)
        for result in (found, expected):
            (result.values() * (factor + number)).sum().backward()
        theirs.step()
        theirs.zero_grad()
        if number < 2:
            ours.prefetch(read(weights))
    for mine, other in zip(ours.table_weights(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().clone(), other.detach())


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("read", [light, keyed])
def test_a_collection_without_pooling_trains_as_torchrecs(read, tiers, tmp_path):
    plain = torchrec.EmbeddingCollection(tables=unpooled_configs(), need_indices=True)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    ours = HotColdEmbeddingCollection(
        unpooled_configs(),
        need_indices=True,
        optimizer=Adagrad(lr=0.1),
        **of_tiers(tiers, tmp_path),
    )
    fill(ours, plain)
    for number in range(3):
        losses = []
        for result in (ours(read()), plain(keyed())):
            assert result["user@more"].weights_or_none().tolist() == [3, 4, 2, 2, 1]
            assert result["user@more"].lengths().tolist() == [1, 1, 3]
            losses.append(
                sum(
                    (rows.values() * (number + place)).square().sum()
                    for place, rows in enumerate(result.values())
                )
            )
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        theirs.step()
        theirs.zero_grad()
        if number < 2:
            ours.prefetch(read())
    for mine, other in zip(ours.table_weights(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().clone(), other.detach())


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_without_an_optimizer_are_torchs(is_sparse):
    plain = torchrec.EmbeddingBagCollection(tables=configs())
    ours = HotColdEmbeddingBagCollection(configs())
    fill(ours, plain)
    for bag in ours.embedding_bags.values():
        bag.sparse = is_sparse
    for module, ids in ((ours, light()), (plain, keyed())):
        found = module(ids).values()
        (found * torch.arange(found.numel()).view(found.shape)).sum().backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad.is_sparse == is_sparse
        torch.testing.assert_close(mine.grad.to_dense(), other.grad)


def test_collections_share_the_parameters_of_torchrecs():
    plain = torchrec.EmbeddingBagCollection(tables=configs())
    ours = HotColdEmbeddingBagCollection.from_torchrec(plain, optimizer=SGD(lr=1.0))
    before = plain(keyed()).values().detach()
    ours(light()).values().sum().backward()
    assert not torch.equal(plain(keyed()).values(), before)
    torch.testing.assert_close(plain(keyed()).values(), ours(light()).values())
    rows = torchrec.EmbeddingCollection(tables=unpooled_configs())
    ours = HotColdEmbeddingCollection.from_torchrec(rows, optimizer=SGD(lr=1.0))
    assert all(mine is other for mine, other in zip(ours.parameters(), rows.parameters()))  # noqa: B905


def test_tables_may_be_one_parameter_and_results_one_tensor():
    ours = HotColdEmbeddingBagCollection(configs())
    ours.embedding_bags["goods"].weight = ours.embedding_bags["more"].weight
    plain = [
        nn.EmbeddingBag.from_pretrained(bag.weight.detach().clone(), mode=bag.mode)
        for bag in ours.embedding_bags.values()
    ]
    bags = light()["item"]
    found = ours(light(), stacked=True)
    assert found.shape == (3, 5, 4)
    torch.testing.assert_close(found[:, 2], plain[1](bags.values(), bags.offsets()[:-1]))


def test_a_backward_that_fails_leaves_nothing_for_the_next():
    ours = HotColdEmbeddingBagCollection(configs(), optimizer=SGD(lr=1.0))
    before = [rows.detach().clone() for rows in ours.table_weights()]

    def fail(gradient):
        raise ArithmeticError

    early = torch.ones(3, 20, requires_grad=True)
    late = early * 2
    late.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (ours(light()).values() * 100 + late).sum().backward()
    ours(light())["user@more"][1].sum().backward()
    before[2][4] -= 1
    assert all(map(torch.equal, before, ours.table_weights()))


@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_collection_without_memory_is_filled_by_loading_and_trained(is_pooled, optimizer):
    kind = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
    tables = configs() if is_pooled else unpooled_configs()
    plain = kind(tables, optimizer=optimizer, auto_apply=False)
    ours = kind(tables, device="meta", optimizer=optimizer, auto_apply=False)
    for module in (plain, ours, plain, ours):
        if module is ours and ours.table_weights()[0].is_meta:
            ours.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
            if optimizer is not None:
                ours.row_optimizer.load_state_dict(plain.row_optimizer.state_dict())
            assert len(ours.updates()) == len(ours.groups()) == len(plain.updates())
            continue
        found = module(light())
        parts = [found] if is_pooled else list(found.values())
        sum(part.values().square().sum() for part in parts).backward()
        if optimizer is not None:
            module.row_optimizer.step()
        assert bool(module.places()) == (optimizer is not None)
    for mine, other in zip(ours.table_weights(), plain.table_weights(), strict=True):
        assert torch.equal(mine, other)
        if optimizer is not None:
            states = [
                each.row_optimizer.state[weight]["momentum1"]
                for each, weight in ((ours, mine), (plain, other))
            ]
            assert torch.equal(*states)


@pytest.mark.parametrize(
    ("ids", "error", "names"),
    [
        (JaggedIds(["item", "user"], VALUES[:4], OFFSETS[:7]), KeyError, ["friend"]),
        (JaggedIds(KEYS, VALUES - 1, OFFSETS), IdOutOfRange, ["'goods'", "'item', sample 0", "-1"]),
        (keyed(torch.full((12,), torch.nan)), MalformedBags, ["'item', sample 0", "id 0"]),
        (keyed(), MalformedBags, ["is_weighted"]),
        (
            torchrec.KeyedJaggedTensor(KEYS, VALUES, WEIGHTS, offsets=OFFSETS + OFFSETS % 3),
            MalformedBags,
            ["offsets[2]", "'item', sample 2", "3 after 4"],
        ),
    ],
)
def test_input_that_does_not_fit_is_refused_by_name(ids, error, names):
    tables = configs()
    for config in tables:
        config.pooling = torchrec.PoolingType.SUM
    ours = HotColdEmbeddingBagCollection(tables, error is not IdOutOfRange, optimizer=SGD(lr=1.0))
    with pytest.raises(error) as raised:
        ours(ids)
    assert all(name in str(raised.value) for name in names)


def test_a_row_that_does_not_exist_is_named_without_pooling_too():
    ours = HotColdEmbeddingCollection(unpooled_configs(), optimizer=SGD(lr=1.0))
    ids = JaggedIds(KEYS, torch.where(VALUES == 8, 9, VALUES), OFFSETS)
    with pytest.raises(IdOutOfRange, match="'users', feature 'friend', sample 1: id 9"):
        ours(ids)


def planned(tables, *batches, budget=21 * 4 + 8 * (16 * 2 + 11)):
    profile = PopularityProfile(tables)
    for batch in batches:
        profile.add(batch)
    return plan_hot_rows(profile, tables, budget, Adagrad(lr=0.1), window_lookups=1, small_share=0)


def pinned_rows(module):
    marks = module.groups()[0].fetcher.marks
    return sorted(marks.row_of_slot[marks.pins > 0].tolist())


def test_a_plan_gives_the_budget_and_the_rows_that_stay():
    plan = planned(configs(), light())
    ours = HotColdEmbeddingBagCollection(configs(), optimizer=Adagrad(lr=0.1), plan=plan)
    ours(light())
    firsts = zip(plan.pinned_by_table(), (0, 9, 16), strict=True)
    assert pinned_rows(ours) == [row + first for (rows, _), first in firsts for row in rows] != []


def test_a_plan_of_a_bag_may_have_any_name(tmp_path):
    ids = torch.tensor([5, 5, 3, 1])
    tables = configs()[:1]
    plan = planned(tables, JaggedIds(["user", "friend"], ids, torch.arange(5)), budget=300)
    bag = HotColdEmbeddingBag(
        9, 4, optimizer=Adagrad(lr=0.1), plan=plan, cold_tier="file", cold_path=tmp_path
    )
    bag(ids, torch.tensor([0]))
    assert pinned_rows(bag) == [1, 3, 5]
    for wrong in ({"num_embeddings": 8}, {"embedding_dim": 2}):
        shape = {"num_embeddings": 9, "embedding_dim": 4} | wrong
        with pytest.raises(ProfileError, match="'users'"):
            HotColdEmbeddingBag(**shape, optimizer=Adagrad(lr=0.1), plan=plan)
