"""Collections of bags and of sequences, beside TorchRec's and without TorchRec."""

import copy

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds, PooledEmbeddings
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)
from recsys.errors import IdOutOfRange, MalformedBags

pytestmark = pytest.mark.filterwarnings("ignore:tables .* were used in the cold tier")
KEYS = ["item", "unused", "user", "friend"]
LENGTHS = torch.tensor([2, 1, 0, 1, 0, 0, 1, 1, 3, 0, 2, 1])
VALUES = torch.tensor([0, 4, 4, 99, 3, 4, 2, 2, 1, 8, 6, 0])
WEIGHTS = torch.linspace(0.5, 1.5, 12)
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])


def tables(dims=(4, 4, 4), poolings=("sum", "mean", "sum")):
    sizes = {"users": 9, "goods": 7, "more": 5}
    features = ("user", "friend"), ("item",), ("item", "user")
    return [
        TableConfig(
            name=name, num_embeddings=size, embedding_dim=dim, feature_names=of, pooling=pooling
        )
        for (name, size), of, dim, pooling in zip(
            sizes.items(), features, dims, poolings, strict=True
        )
    ]


def of_torchrec(tables, *, is_pooled=True, **options):
    """TorchRec's collection of the same tables."""
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    make, config = torchrec.EmbeddingCollection, torchrec.EmbeddingConfig
    if is_pooled:
        make, config = torchrec.EmbeddingBagCollection, torchrec.EmbeddingBagConfig
    configs = []
    for table in tables:
        configs.append(
            config(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
        )
        if is_pooled:
            configs[-1].pooling = torchrec.PoolingType[table.pooling.upper()]
    return make(tables=configs, **options)


def light(weights=None, values=VALUES, offsets=OFFSETS):
    return JaggedIds(KEYS, values, offsets, weights)


def keyed(weights=None, values=VALUES, keys=KEYS, **parts):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    return torchrec.KeyedJaggedTensor(keys, values, weights, **(parts or {"lengths": LENGTHS}))


def fill(module, plain):
    module.load_state_dict({name: rows.clone() for name, rows in plain.state_dict().items()})


def wave(values):
    return torch.arange(1.0, values.numel() + 1).view_as(values).sin()


@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)], ids=["torchs", "ours"])
@pytest.mark.parametrize("offsets", [OFFSETS, torch.arange(13)], ids=["several ids", "one id"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dims", [(4, 4, 4), (8, 4, 8)])
@pytest.mark.parametrize("read", [light, keyed])
def test_a_collection_of_bags_trains_as_torchrecs(read, dims, is_weighted, offsets, optimizer):
    configs = tables(dims, ("sum",) * 3 if is_weighted else ("sum", "mean", "sum"))
    plain = of_torchrec(configs, is_weighted=is_weighted)
    ours = HotColdEmbeddingBagCollection(
        plain.embedding_bag_configs(), is_weighted, optimizer=optimizer
    )
    fill(ours, plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    theirs = torch.optim.Adagrad([*plain.parameters(), *ours.parameters()], lr=0.1)
    given = {"weights": WEIGHTS if is_weighted else None, "offsets": offsets}
    for number in range(3):
        found, expected = ours(read(**given)), plain(keyed(**given))
        assert type(found) is (PooledEmbeddings if read is light else type(expected))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values())
        torch.testing.assert_close(found["item@goods"], expected["item@goods"])
        for result in (found, expected):
            (result.values() * (wave(result.values()) + number)).sum().backward()
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(ours.table_weights(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach())


@pytest.mark.parametrize("read", [light, keyed])
def test_a_collection_without_pooling_trains_as_torchrecs(read):
    plain = of_torchrec(tables(), is_pooled=False, need_indices=True)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    ours = HotColdEmbeddingCollection(
        plain.embedding_configs(), need_indices=True, optimizer=Adagrad(lr=0.1)
    )
    fill(ours, plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for name in ("embedding_dim", "embedding_names_by_table", "need_indices"):
        assert getattr(ours, name)() == getattr(plain, name)()
    for number in range(3):
        both, losses = (ours(read()), plain(keyed())), []
        assert list(both[0]) == list(both[1])
        for result in both:
            assert result["user@more"].weights_or_none().tolist() == [3, 4, 2, 2, 1]
            assert result["user@more"].lengths().tolist() == [1, 1, 3]
            assert [len(each) for each in result["user@more"].to_dense()] == [1, 1, 3]
            rows = [each.values() * (number + n) for n, each in enumerate(result.values())]
            losses.append(sum(each.square().sum() for each in rows))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(ours.table_weights(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach())


@pytest.mark.parametrize("is_pooled", [False, True])
def test_collections_share_the_parameters_of_torchrecs(is_pooled):
    plain = of_torchrec(tables(), is_pooled=is_pooled)
    kind = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
    ours = kind.from_torchrec(plain, optimizer=SGD(lr=1.0))
    assert list(map(id, ours.parameters())) == list(map(id, plain.parameters()))
    before = next(ours.parameters()).detach().clone()
    found = ours(light())
    (found.values() if is_pooled else found["item@goods"].values()).sum().backward()
    assert torch.equal(before, next(ours.parameters())) != is_pooled


def test_accelerate_exchanges_a_collection_without_pooling_and_restore_puts_it_back():
    model = nn.ModuleDict({"sequences": of_torchrec(tables(), is_pooled=False)})
    plain, theirs = copy.deepcopy(model), model["sequences"]
    ours, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    recsys.accelerate(model, optimizer=ours, always=True)
    for each, optimizer in ((model, ours), (plain, others)):
        for _ in range(2):
            optimizer.zero_grad()
            found = each["sequences"](keyed()).values()
            sum(rows.values().sin().square().sum() for rows in found).backward()
            optimizer.step()
    assert type(model["sequences"]) is HotColdEmbeddingCollection
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    recsys.restore(model)
    assert model["sequences"] is theirs


@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)])
@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_a_collection_without_memory_is_filled_by_loading_and_trained(kind, optimizer):
    how = {"optimizer": optimizer, "auto_apply": False}
    plain, ours = kind(tables(), **how), kind(tables(), device="meta", **how)
    assert all(weight.is_meta for weight in ours.table_weights())

    def train(module):
        found = module(light())
        parts = [found] if isinstance(found, PooledEmbeddings) else list(found.values())
        sum(part.values().square().sum() for part in parts).backward()
        if optimizer is not None:
            module.row_optimizer.step()

    train(plain)
    ours.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    if optimizer is not None:
        ours.row_optimizer.load_state_dict(plain.row_optimizer.state_dict())
    for module in (plain, ours):
        train(module)
    for mine, other in zip(ours.table_weights(), plain.table_weights(), strict=True):
        assert torch.equal(mine, other)
        if optimizer is not None:
            states = ours.row_optimizer.state[mine], plain.row_optimizer.state[other]
            assert torch.equal(*(state["momentum1"] for state in states))


@pytest.mark.parametrize("name", ["DLRM", "DLRM_DCN", "SimpleDeepFMNN"])
def test_torchrecs_models_run_unmodified(name):
    theirs = of_torchrec(tables((8, 8, 8))[:2])  # their models know no features of two tables
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    def build(collection):
        torch.manual_seed(0)
        if name == "SimpleDeepFMNN":
            sizes = {"hidden_layer_size": 6, "deep_fm_dimension": 5}
            return SimpleDeepFMNN(
                num_dense_features=3, embedding_bag_collection=collection, **sizes
            )
        more = {"dcn_num_layers": 2, "dcn_low_rank_dim": 3} if name == "DLRM_DCN" else {}
        return {"DLRM": DLRM, "DLRM_DCN": DLRM_DCN}[name](collection, 3, [6, 8], [5, 1], **more)

    ours = build(HotColdEmbeddingBagCollection(theirs.embedding_bag_configs()))
    theirs, dense = build(theirs), torch.rand(3, 3)
    ours.load_state_dict(theirs.state_dict())
    results = [model(dense, keyed()) for model in (ours, theirs)]
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), other.grad, rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "whole": lambda gradient: gradient.contiguous(),
    "part of a larger one": lambda gradient: torch.cat([gradient, gradient], dim=1)[:, 1:6],
    "columns of larger ones": lambda gradient: torch.cat([gradient, gradient], dim=2)[..., 2:6],
    "features outside": lambda gradient: gradient.transpose(0, 1).contiguous().transpose(0, 1),
    "columns outside": lambda gradient: gradient.mT.contiguous().mT,
    "one for all": lambda gradient: gradient[:1, :1].expand_as(gradient),
    "one for all samples": lambda gradient: gradient[:1].expand_as(gradient),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("auto_apply", [True, False], ids=["updated", "collected"])
def test_a_gradient_of_stacked_vectors_may_lie_anyhow(layout, auto_apply):
    module = HotColdEmbeddingBagCollection(tables(), optimizer=SGD(lr=0.5), auto_apply=auto_apply)
    plain = HotColdEmbeddingBagCollection(tables())
    plain.load_state_dict(module.state_dict())
    gradient = layout(torch.rand(3, 5, 4))
    for _ in range(1 if auto_apply else 2):
        found, expected = module(light(), stacked=True), plain(light()).values()
        assert torch.equal(found.flatten(1), expected)
        found.backward(gradient)
        expected.backward(gradient.flatten(1))
    for found, expected in zip(module.table_weights(), plain.table_weights(), strict=True):
        if not auto_apply:
            torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense())
    if not auto_apply:
        module.row_optimizer.step()
    for found, expected in zip(module.table_weights(), plain.table_weights(), strict=True):
        updated = expected - 0.5 * expected.grad.to_dense()
        torch.testing.assert_close(found, updated, rtol=1e-6, atol=1e-6)


def test_weights_of_averaged_bags_get_their_share_of_the_gradient():
    table = TableConfig(name="a", num_embeddings=9, embedding_dim=4, pooling="mean")
    module = HotColdEmbeddingBagCollection([table], is_weighted=True)
    [rows] = [weight.detach() for weight in module.table_weights()]
    ids, weights = torch.tensor([1, 2, 3, 4, 5]), torch.rand(5, requires_grad=True)
    module(JaggedIds(["a"], ids, torch.tensor([0, 2, 5]), weights)).values().sum().backward()
    expected = rows[ids].sum(1) / torch.tensor([2, 2, 3, 3, 3])
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("optimizer", [None, SGD(lr=1.0)])
def test_rows_whose_memory_was_exchanged_are_found_again(optimizer):
    memory = torch.arange(60.0).view(60, 1).repeat(1, 4)
    module = HotColdEmbeddingBagCollection(tables(), optimizer=optimizer)
    users, goods, more = module.table_weights()
    for weight, first in ((users, 20), (goods, 30), (more, 40)):
        weight.data = memory[first : first + len(weight)]
    assert module(light())["item@goods"][1].tolist() == [34] * 4
    goods.data = memory[:7]  # before all others
    found = module(light())
    assert found["item@goods"][1].tolist() == [4] * 4
    assert found["user@users"][:, 0].tolist() == [23, 24, 22 + 22 + 21]
    found["item@goods"].sum().backward()
    step = 1.5  # the means of [0, 4], [4] and []
    moved = goods[4] if optimizer is not None else goods[4] - goods.grad[4]
    assert moved.tolist() == [4 - step] * 4


def test_rows_are_drawn_as_torchrecs_config_says():
    [config, *_] = of_torchrec(tables()).embedding_bag_configs()
    config.init_fn = lambda weight: weight.fill_(7.0)
    module = HotColdEmbeddingBagCollection([config])
    assert torch.equal(module.table_weights()[0], torch.full((9, 4), 7.0))


def with_value(value):
    values = VALUES.clone()
    values[8] = value
    return values


@pytest.mark.parametrize("budget", [None, 180])
@pytest.mark.parametrize("value", [9, -1])
@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_an_id_out_of_range_names_table_feature_sample_and_value(kind, value, budget):
    module = kind(tables()[:2], optimizer=SGD(lr=1.0), budget=budget)
    ids = light(values=with_value(value))
    module.prefetch(ids)
    with pytest.raises(IdOutOfRange, match=f"'users', feature 'user', sample 2: id {value}"):
        module(ids)


BAD_WEIGHTS = torch.ones(12).index_fill(0, torch.tensor(8), torch.nan)
WRONG = {
    "offsets fall": (keyed, {"offsets": OFFSETS + OFFSETS % 3}, "'item', sample 2"),
    "offsets beyond the ids": (keyed, {"offsets": OFFSETS + OFFSETS // 12}, "13"),
    "values after the last bag": (light, {"values": torch.cat([VALUES, VALUES])}, "12"),
    "a late start": (keyed, {"offsets": OFFSETS.clamp(min=1)}, "'item', sample 0"),
    "ids of numbers": (keyed, {"values": VALUES.double()}, "float64"),
    "a weight that is no number": (light, {"weights": BAD_WEIGHTS}, "sample 2: the weight of id 1"),
    "no weights": (light, {}, "is_weighted"),
}


@pytest.mark.parametrize(("read", "parts", "name"), WRONG.values(), ids=WRONG)
def test_input_that_does_not_fit_together_is_refused(read, parts, name):
    module = HotColdEmbeddingBagCollection(tables(), is_weighted=True)
    given = parts if name == "is_weighted" else {"weights": WEIGHTS} | parts
    with pytest.raises(MalformedBags, match=name):
        module(read(**given))


def test_tables_of_different_dtypes_and_stacked_dims_are_refused():
    module = HotColdEmbeddingBagCollection(tables())
    module.embedding_bags["users"].double()
    with pytest.raises(ValueError, match="convert the whole module"):
        module(light())
    with pytest.raises(ValueError, match=r"must have one embedding_dim, got \[8, 8, 4"):
        HotColdEmbeddingBagCollection(tables((8, 4, 8)))(light(), stacked=True)


@pytest.mark.parametrize("budget", [None, 100])
@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_a_feature_that_the_input_has_twice_is_refused_by_name(kind, budget):
    module = kind(tables()[:1], optimizer=SGD(lr=1.0), budget=budget)

    def features(*keys):
        ones = torch.ones(len(keys), dtype=torch.int64)
        return keyed(values=torch.arange(len(keys)), keys=list(keys), lengths=ones)

    module(features("user", "friend"))
    for look_up in (module.forward, module.prefetch) if budget else (module.forward,):
        for _ in range(2):
            with pytest.raises(MalformedBags, match=r"features \['user'\] must be in the batch"):
                look_up(features("user", "user", "friend"))
    module(features("else", "else", "user", "friend"))  # not looked up
