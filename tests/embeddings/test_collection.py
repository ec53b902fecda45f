import dataclasses

import pytest
import torch
from torch.nn.functional import embedding_bag

from recsys.batch import JaggedIds, PooledEmbeddings
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad
from recsys.embeddings.table import TableConfig
from recsys.errors import IdOutOfRange, MalformedBags

TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4, feature_names=("user", "friend")),
    TableConfig(name="goods", num_embeddings=5, embedding_dim=8, feature_names=("item",)),
]
# user: [0, 8], [], [3]   friend: [3], [3, 3, 1], []   item: [4], [0], [2, 2]
IDS = JaggedIds(
    ["user", "friend", "item"],
    torch.tensor([0, 8, 3, 3, 3, 3, 1, 4, 0, 2, 2]),
    torch.tensor([0, 2, 2, 3, 4, 7, 7, 8, 9, 11]),
)


def torchrec_configs(pooling="SUM", dim=8):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    return [
        torchrec.EmbeddingBagConfig(
            name=name,
            num_embeddings=size,
            embedding_dim=dim,
            feature_names=features,
            pooling=getattr(torchrec.PoolingType, pooling),
        )
        for name, size, features in (
            ("users", 9, ["user", "friend"]),
            ("goods", 5, ["item"]),
            ("friends", 9, ["friend"]),
        )
    ]


def kjt(weights=None):
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(IDS.keys(), IDS.values(), weights, offsets=IDS.offsets())


def weighting(values):
    return torch.arange(1.0, values.numel() + 1).view_as(values).sin()


@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [("SUM", False), ("SUM", True), ("MEAN", False)]
)
def test_outputs_gradients_and_keys_are_those_of_torchrecs_collection(pooling, is_weighted):
    configs = torchrec_configs(pooling)
    from torchrec import EmbeddingBagCollection

    theirs = EmbeddingBagCollection(configs, is_weighted=is_weighted)
    ours = HotColdEmbeddingBagCollection(configs, is_weighted)
    ours.load_state_dict(theirs.state_dict())
    results = []

    for module in (theirs, ours):
        weights = torch.linspace(0.5, 2, 11).requires_grad_() if is_weighted else None
        pooled = module(kjt(weights))
        (pooled.values() * weighting(pooled.values())).sum().backward()
        results.append((pooled, weights))

    (expected, their_weights), (found, our_weights) = results
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-6)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for (key, ours_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        dense = ours_p.grad.to_dense()
        torch.testing.assert_close(dense, theirs_p.grad, rtol=1e-6, atol=1e-6, msg=key)
    if is_weighted:
        torch.testing.assert_close(our_weights.grad, their_weights.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["DLRM", "DLRM_DCN", "SimpleDeepFMNN"])
def test_torchrecs_models_run_unmodified(name):
    configs = torchrec_configs()[:2]  # their models do not know features shared by tables
    from torchrec import EmbeddingBagCollection
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    def build(collection):
        torch.manual_seed(0)
        if name == "SimpleDeepFMNN":
            return SimpleDeepFMNN(
                num_dense_features=3,
                embedding_bag_collection=collection,
                hidden_layer_size=6,
                deep_fm_dimension=5,
            )
        more = {"dcn_num_layers": 2, "dcn_low_rank_dim": 3} if name == "DLRM_DCN" else {}
        return {"DLRM": DLRM, "DLRM_DCN": DLRM_DCN}[name](collection, 3, [6, 8], [5, 1], **more)

    collection = EmbeddingBagCollection(configs)
    theirs, ours = build(collection), build(HotColdEmbeddingBagCollection(configs))
    ours.load_state_dict(theirs.state_dict())
    dense = torch.rand(3, 3)

    expected, found = theirs(dense, kjt()), ours(dense, kjt())
    expected.sum().backward()
    found.sum().backward()

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        gradient = mine.grad.to_dense() if mine.grad.is_sparse else mine.grad
        torch.testing.assert_close(gradient, other.grad, rtol=1e-5, atol=1e-6)


def test_light_ids_give_light_vectors():
    assert isinstance(HotColdEmbeddingBagCollection(TABLES)(IDS), PooledEmbeddings)


@pytest.mark.parametrize("budget", [None, 400], ids=["resident", "tiered"])
@pytest.mark.parametrize("kind", [JaggedIds, "KeyedJaggedTensor"], ids=["light", "torchrec's"])
def test_stacked_vectors_are_those_that_stand_side_by_side(kind, budget):
    if kind != JaggedIds:
        pytest.importorskip("torchrec", exc_type=ImportError)
    features = IDS if kind is JaggedIds else kjt()
    tables = [dataclasses.replace(table, embedding_dim=8) for table in TABLES]
    side_by_side, stacked = (
        HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.5), budget=budget)
        for _ in range(2)
    )
    stacked.load_state_dict(side_by_side.state_dict())

    for _ in range(2):
        expected = side_by_side(features).values().view(3, 3, 8)
        found = stacked(features, stacked=True)
        assert torch.equal(found, expected)
        (expected * weighting(expected)).sum().backward()
        (found * weighting(found)).sum().backward()
    with torch.no_grad():
        assert torch.equal(
            stacked(features, stacked=True).flatten(1), side_by_side(features).values()
        )

    for found, expected in zip(stacked.table_weights(), side_by_side.table_weights(), strict=True):
        assert torch.equal(found, expected)


LAYOUTS = {
    "whole": lambda gradient: gradient.contiguous(),
    "part of a larger one": lambda gradient: torch.cat([gradient, gradient], dim=1)[:, 1:4],
    "columns of larger ones": lambda gradient: torch.cat([gradient, gradient], dim=2)[..., 2:10],
    "features outside": lambda gradient: gradient.transpose(0, 1).contiguous().transpose(0, 1),
    "columns outside": lambda gradient: gradient.mT.contiguous().mT,
    "one for all": lambda gradient: gradient[:1, :1].expand_as(gradient),
    "one for all samples": lambda gradient: gradient[:1].expand_as(gradient),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("auto_apply", [True, False], ids=["moved", "collected"])
def test_a_gradient_of_stacked_vectors_may_lie_anyhow(layout, auto_apply):
    tables = [dataclasses.replace(table, embedding_dim=8) for table in TABLES]
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.5), auto_apply=auto_apply)
    plain = HotColdEmbeddingBagCollection(tables)
    plain.load_state_dict(module.state_dict())
    gradient = layout(torch.rand(3, 3, 8))

    for _ in range(1 if auto_apply else 2):
        module(IDS, stacked=True).backward(gradient)
        plain(IDS).values().backward(gradient.flatten(1))

    for found, expected in zip(module.table_weights(), plain.table_weights(), strict=True):
        if not auto_apply:
            torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense())
    if not auto_apply:
        module.row_optimizer.step()
    for found, expected in zip(module.table_weights(), plain.table_weights(), strict=True):
        moved = expected - 0.5 * expected.grad.to_dense()
        torch.testing.assert_close(found, moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["users", "goods"])
def test_tables_that_are_computed_in_different_dtypes_are_refused(name):
    module = HotColdEmbeddingBagCollection(TABLES)
    module.embedding_bags[name].double()

    with pytest.raises(ValueError, match="convert the whole module"):
        module(IDS)


def test_vectors_of_different_dims_cannot_be_stacked():
    module = HotColdEmbeddingBagCollection(TABLES)

    with pytest.raises(ValueError, match=r"must have one embedding_dim, got \[4, 4, 8\]"):
        module(IDS, stacked=True)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.5), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_two_towers_in_one_backward_are_one_update(optimizer):
    torch.manual_seed(0)
    once = HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer)
    twice = HotColdEmbeddingBagCollection(TABLES, optimizer=optimizer)
    twice.load_state_dict(once.state_dict())

    pooled = once(IDS).values()
    (3 * pooled.square()).sum().backward()
    first, second = twice(IDS).values(), twice(IDS).values()
    (first.square().sum() + 2 * second.square().sum()).backward()

    for expected, found in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_several_backward_passes_are_one_update_where_it_is_left_to_the_user():
    torch.manual_seed(0)
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=Adagrad(lr=0.1), auto_apply=False)
    before = module.state_dict()["embedding_bags.goods.weight"].clone()

    for gradient in (1.0, -9.0):
        (gradient * module(IDS)["item"][0]).sum().backward()
    untouched = module.table_weights()[1].detach().clone()
    module.row_optimizer.step()

    assert torch.equal(untouched, before)
    # Adagrad's first step is lr times the sign of the summed gradient, here that of 1 - 9.
    torch.testing.assert_close(module.table_weights()[1][4], before[4] + 0.1)


def test_gradients_are_forgotten_where_the_user_says_so():
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=1.0), auto_apply=False)
    before = [weight.detach().clone() for weight in module.table_weights()]

    module(IDS).values().sum().backward()
    module.row_optimizer.zero_grad()
    module.row_optimizer.step()

    for old, new in zip(before, module.table_weights(), strict=True):
        assert torch.equal(new, old)


def test_an_optimizer_of_torchs_steps_sparse_gradients():
    torch.manual_seed(0)
    fused = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.5))
    plain = HotColdEmbeddingBagCollection(TABLES)
    plain.load_state_dict(fused.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    for module in (fused, plain):
        values = module(IDS).values()
        (values * weighting(values)).sum().backward()
    optimizer.step()

    for expected, found in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [9, -1])
def test_an_id_out_of_range_names_feature_sample_and_value(value):
    module = HotColdEmbeddingBagCollection(TABLES)
    values = IDS.values().clone()
    values[4] = value

    with pytest.raises(
        IdOutOfRange, match=rf"feature 'friend', sample 1: id {value} is not in \[0, 9\)"
    ):
        module(JaggedIds(IDS.keys(), values, IDS.offsets()))


def test_rows_whose_memory_was_exchanged_are_found_again():
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=1.0))
    module(IDS)
    table = module.table_weights()[1]
    table.data = torch.zeros_like(table)

    module(IDS)["item"].sum().backward()

    assert table[2].tolist() == [-2.0] * 8
    assert module(IDS)["item"][1].tolist() == [-1.0] * 8


def test_a_backward_pass_that_fails_leaves_nothing_for_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in the middle")

    module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=1.0))
    before = module.table_weights()[1].detach().clone()
    early = Fails.apply(torch.ones(3, 16, requires_grad=True))
    with pytest.raises(ArithmeticError):
        (module(IDS).values() * 100 + early).sum().backward()

    module(IDS)["item"][1].sum().backward()

    expected = before.clone()
    expected[0] -= 1
    assert torch.equal(module.table_weights()[1], expected)


def test_a_weight_that_is_no_number_names_feature_sample_and_id():
    module = HotColdEmbeddingBagCollection(TABLES, is_weighted=True)
    weights = torch.ones(11)
    weights[6] = torch.nan
    ids = JaggedIds(IDS.keys(), IDS.values(), IDS.offsets(), weights)

    with pytest.raises(ValueError, match="feature 'friend', sample 1: the weight of id 1 is nan"):
        module(ids)


def test_weights_of_averaged_bags_get_their_share_of_the_gradient():
    table = TableConfig(name="a", num_embeddings=9, embedding_dim=4, pooling="mean")
    module = HotColdEmbeddingBagCollection([table], is_weighted=True)
    [rows] = [weight.detach() for weight in module.table_weights()]
    weights = torch.rand(5, requires_grad=True)
    ids = torch.tensor([1, 2, 3, 4, 5])

    module(JaggedIds(["a"], ids, torch.tensor([0, 2, 5]), weights)).values().sum().backward()

    expected = rows[ids].sum(1) / torch.tensor([2, 2, 3, 3, 3])
    torch.testing.assert_close(weights.grad, expected)


def test_sums_and_means_stand_side_by_side():
    torch.manual_seed(0)
    tables = [*TABLES, dataclasses.replace(TABLES[0], name="averages", pooling="mean")]
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=1.0))
    before = [weight.detach().clone() for weight in module.table_weights()]

    pooled = module(IDS)
    pooled.values().sum().backward()

    bags = IDS["friend"]
    expected = embedding_bag(bags.values(), before[2], bags.offsets()[:-1], mode="mean")
    torch.testing.assert_close(pooled["friend@averages"], expected, rtol=1e-6, atol=1e-6)
    # Row 3 is in bags of one, one and three of the averaged features, there twice.
    moved = (before[0] - module.table_weights()[0])[3]
    averaged = (before[2] - module.table_weights()[2])[3]
    torch.testing.assert_close(moved, torch.full((4,), 4.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(averaged, torch.full((4,), 2 + 2 / 3), rtol=1e-5, atol=0)


def test_rows_are_drawn_as_torchrecs_config_says():
    [config, *_] = torchrec_configs()
    config.init_fn = lambda weight: weight.fill_(7.0)

    module = HotColdEmbeddingBagCollection([config])

    assert torch.equal(module.table_weights()[0], torch.full((9, 8), 7.0))


def test_a_frozen_table_rests():
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=1.0))
    module.table_weights()[0].requires_grad_(False)
    before = [weight.detach().clone() for weight in module.table_weights()]

    module(IDS).values().sum().backward()

    assert torch.equal(module.table_weights()[0], before[0])
    assert not torch.equal(module.table_weights()[1], before[1])


def test_frozen_tables_ask_for_no_gradient():
    module = HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=1.0))
    for weight in module.table_weights():
        weight.requires_grad_(False)

    assert not module(IDS).values().requires_grad


# torch.compile looks at `grad` of every tensor, and hides the warning that this gives.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_looks_up_between_its_graphs():
    module, twin = (HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.5)) for _ in range(2))
    twin.load_state_dict(module.state_dict())

    def model(collection):
        return (2 * collection(IDS).values()).tanh().sum()

    expected = model(module)
    expected.backward()
    found = torch.compile(model, backend="eager")(twin)
    found.backward()

    assert torch.equal(found, expected)
    for mine, other in zip(module.table_weights(), twin.table_weights(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"offsets": [0, 2, 2, 3, 4, 3, 7, 8, 9, 11]}, "'friend', sample 2"),
        ({"offsets": [0, 2, 2, 3, 4, 7, 7, 8, 9, 12]}, "12"),
        ({"offsets": [1, 2, 2, 3, 4, 7, 7, 8, 9, 11]}, "'user', sample 0"),
        ({"offsets": [0, 2, 2, 3, 4, 7, 7, 8, 9]}, "offsets"),
        ({"values": IDS.values().double()}, "float64"),
        ({"weights": torch.ones(10)}, "weights"),
    ],
)
def test_a_keyed_jagged_tensor_that_does_not_fit_together_is_refused(change, name):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    parts = {"values": IDS.values(), "offsets": IDS.offsets(), "weights": torch.ones(11)} | change
    features = torchrec.KeyedJaggedTensor(
        IDS.keys(),
        parts["values"],
        parts["weights"],
        offsets=torch.as_tensor(parts["offsets"]),
        stride=3,
    )
    module = HotColdEmbeddingBagCollection(torchrec_configs(), is_weighted=True)

    with pytest.raises(MalformedBags, match=name):
        module(features)


@pytest.mark.parametrize("make", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_values_after_the_last_bag_are_refused_as_torchrec_refuses_them(make):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    module = make(TABLES[:1])
    lengths = torch.tensor([1, 0, 2, 1])

    def features(num_values):
        return torchrec.KeyedJaggedTensor(
            ["user", "friend"], torch.arange(num_values), lengths=lengths
        )

    with pytest.raises(RuntimeError):
        features(6).to_dict()
    with pytest.raises(MalformedBags, match=r"values, 6, got 4; .*\[:4\]"):
        module(features(6))
    module(features(4))


@pytest.mark.parametrize("kind", ["pooled", "pooled, tiered", "sequence", "sequence, tiered"])
def test_a_feature_that_the_input_has_twice_is_refused_by_name(kind):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    make = HotColdEmbeddingBagCollection if "pooled" in kind else HotColdEmbeddingCollection
    is_tiered = "tiered" in kind
    table = TableConfig(
        name="users", num_embeddings=400, embedding_dim=4, feature_names=("user", "friend")
    )
    module = make([table], optimizer=SGD(lr=1.0), budget="4KiB" if is_tiered else None)

    def features(*keys):
        lengths = torch.ones(len(keys), dtype=torch.int64)
        return torchrec.KeyedJaggedTensor(list(keys), torch.arange(len(keys)), lengths=lengths)

    known, other = features("user", "friend"), features("user", "user", "friend")
    module(known)
    for look_up in (module.forward, module.prefetch) if is_tiered else (module.forward,):
        for _ in range(2):
            with pytest.raises(
                MalformedBags, match=r"features \['user'\] must be in the batch once"
            ):
                look_up(other)

    module(known)
    module(features("else", "else", "user", "friend"))  # not looked up


def test_a_gradient_of_the_weights_alone_moves_no_rows():
    module = HotColdEmbeddingBagCollection(TABLES, is_weighted=True, optimizer=SGD(lr=1.0))
    before = [weight.detach().clone() for weight in module.table_weights()]
    weights = torch.ones(11, requires_grad=True)
    ids = JaggedIds(IDS.keys(), IDS.values(), IDS.offsets(), weights)

    [gradient] = torch.autograd.grad(module(ids).values().sum(), [weights])

    assert gradient.shape == (11,)
    for old, new in zip(before, module.table_weights(), strict=True):
        assert torch.equal(new, old)


def test_a_collection_without_tables_is_refused():
    with pytest.raises(ValueError, match="must have at least one table"):
        HotColdEmbeddingBagCollection([])


def test_features_of_nothing_lack_every_feature():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    module = HotColdEmbeddingBagCollection(TABLES)

    with pytest.raises(KeyError, match=r"\['user', 'friend', 'item'\] are missing"):
        module(torchrec.KeyedJaggedTensor.empty())


@pytest.mark.parametrize("is_trained", [False, True])
def test_ids_of_bags_may_be_a_column_of_a_matrix(is_trained):
    table = TableConfig(name="t", num_embeddings=50, embedding_dim=16, feature_names=("f",))
    collection = HotColdEmbeddingBagCollection([table], optimizer=SGD(lr=1.0))
    column, offsets = torch.randint(0, 50, (60, 3))[:, 1], torch.arange(0, 61, 3)
    rows = collection.embedding_bags["t"].weight.detach().clone()

    with torch.set_grad_enabled(is_trained):
        found = collection(JaggedIds(["f"], column, offsets)).values()

    torch.testing.assert_close(found, rows[column].view(20, 3, 16).sum(1))
    if is_trained:
        found.sum().backward()
        expected = rows - torch.bincount(column, minlength=50).unsqueeze(1)
        torch.testing.assert_close(collection.embedding_bags["t"].weight.detach(), expected)
