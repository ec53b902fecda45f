"""Weights to and from the classic DLRM_Net, written here from its public description."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from recsys import DLRM, JaggedIds
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.table import TableConfig
from recsys.errors import WeightsError
from recsys.models.convert import from_classic, to_classic

# Ten features, so that cat_10 and cat_9 tell the order of columns from that of names.
FEATURES = [f"cat_{column}" for column in range(2, 12)]
SIZES = [3, 11, 1, 7, 20, 5, 9, 4, 13, 6]
DIM, NUM_DENSE, BATCH_SIZE = 4, 5, 32


class ClassicNet(nn.Module):
    """The dot interaction of facebookresearch/dlrm; one lookup per feature and sample."""

    def __init__(self):
        super().__init__()
        num_vectors = len(SIZES) + 1
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in SIZES
        )
        self.bot_l = self.mlp([NUM_DENSE, 8, DIM], nn.ReLU())
        self.top_l = self.mlp([DIM + num_vectors * (num_vectors - 1) // 2, 16, 8, 1], nn.Sigmoid())
        self.rows = [row for row in range(num_vectors) for _ in range(row)]
        self.columns = [column for row in range(num_vectors) for column in range(row)]

    @staticmethod
    def mlp(sizes, last):
        layers = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1], last)

    def forward(self, dense, rows_FB):
        dense = self.bot_l(dense)
        offsets = torch.arange(len(dense))
        sparse = [bag(rows, offsets) for bag, rows in zip(self.emb_l, rows_FB, strict=True)]
        vectors = torch.stack([dense, *sparse], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top_l(torch.cat([dense, products[:, self.rows, self.columns]], dim=1))

    def logits(self, dense, rows_FB):
        logits = []
        hook = self.top_l[-2].register_forward_hook(lambda *call: logits.append(call[2]))
        self(dense, rows_FB)
        hook.remove()
        return logits[0]


def make_dlrm():
    tables = [
        TableConfig(name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=(name,))
        for name, size in zip(FEATURES, SIZES, strict=True)
    ]
    return DLRM(TorchEmbeddingBags(tables), NUM_DENSE, [8, DIM], [16, 8, 1])


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack(
        [torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in SIZES]
    )
    return torch.rand(BATCH_SIZE, NUM_DENSE, generator=generator), rows


@pytest.fixture
def classic():
    torch.manual_seed(0)
    net = ClassicNet()
    with torch.no_grad():
        for table in net.emb_l:
            table.weight.normal_()
    return net


def assert_equal(found, expected):
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_classic_models_logits_are_ours(classic, inputs):
    dense, rows = inputs
    ours = make_dlrm()

    ours.load_state_dict(from_classic(classic.state_dict(), FEATURES))

    assert_equal(ours(dense, JaggedIds.from_one_hot(FEATURES, rows)), classic.logits(dense, rows))


def test_our_logits_are_a_classic_models_whatever_the_order_of_keys(classic, inputs):
    dense, rows = inputs
    torch.manual_seed(2)
    ours = make_dlrm()
    with torch.no_grad():
        for table in ours.sparse_arch.embedding_bag_collection.table_weights():
            table.normal_()
    sorted_by_name = dict(sorted(ours.state_dict().items()))

    classic.load_state_dict(to_classic(sorted_by_name, FEATURES))

    expected = ours(dense, JaggedIds.from_one_hot(FEATURES, rows))
    assert_equal(classic.logits(dense, rows), expected)
    assert_equal(classic(dense, rows), expected.sigmoid())


def test_a_classic_models_logits_are_torchrecs_and_back(classic, inputs):
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models import dlrm as torchrec_dlrm

    dense, rows = inputs
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=[name]
        )
        for name, size in zip(FEATURES, SIZES, strict=True)
    ]
    theirs = torchrec_dlrm.DLRM(
        EmbeddingBagCollection(tables=configs), NUM_DENSE, [8, DIM], [16, 8, 1]
    )
    expected = classic.logits(dense, rows)

    theirs.load_state_dict(from_classic(classic.state_dict(), FEATURES))
    back = ClassicNet()
    back.load_state_dict(to_classic(theirs.state_dict(), FEATURES))

    features = JaggedIds.from_one_hot(FEATURES, rows).to_torchrec()
    assert_equal(theirs(dense, features), expected)
    assert_equal(back.logits(dense, rows), expected)


def test_there_and_back_is_the_same_bits_and_copies_no_table(classic):
    state = classic.state_dict()

    back = to_classic(from_classic(state, FEATURES), FEATURES)

    assert list(back) == list(state)
    for key, value in state.items():
        assert torch.equal(back[key], value), key
    assert back["emb_l.4.weight"].data_ptr() == state["emb_l.4.weight"].data_ptr()


def without(key):
    return lambda state: state.pop(key)


def with_tensor(key, *shape):
    return lambda state: state.update({key: torch.zeros(shape)})


def without_last_bottom_layer(state):
    del state["bot_l.2.weight"], state["bot_l.2.bias"]


def without_all_but_one_top_layer(state):
    for key in [key for key in state if key.startswith(("top_l.2", "top_l.4"))]:
        del state[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("top_l.2.bias"),
            "key 'top_l.2.bias' is missing; .* pass the whole state_dict of the model",
        ),
        (without("bot_l.2.weight"), "key 'bot_l.2.weight' is missing"),
        (without("emb_l.4.weight"), "must name its 9 tables, got 10 names"),
        (with_tensor("emb_l.3.weight_q", 3, 4), "key 'emb_l.3.weight_q' is not one of a DLRM_Net"),
        (with_tensor("emb_l.10.weight", 3, 4), "must name its 11 tables, got 10 names"),
        (with_tensor("bot_l.1.weight", 8, 8), "must have even numbers .* got bot_l.1"),
        (with_tensor("bot_l.6.weight", 4, 4), "key 'bot_l.4.weight' is missing"),
        (with_tensor("emb_l.3.weight", 7, 5), r"emb_l.3.weight must be \(E, 4\) .* got \(7, 5\)"),
        (with_tensor("emb_l.0.weight", 7), r"emb_l.0.weight must be \(E, D\), got \(7,\)"),
        (with_tensor("bot_l.0.bias", 7), r"bot_l.0.bias must be .*8.*, got \(7,\)"),
        (with_tensor("bot_l.2.weight", 4, 9), r"bot_l.2.weight must be \(outputs, 8\)"),
        (without_last_bottom_layer, r"bot_l.0.weight must be \(4, inputs\), as wide as the tables"),
        (without_all_but_one_top_layer, "top_l must have at least two layers"),
        (with_tensor("top_l.0.weight", 16, 70), r"must be \(outputs, 59\), .* without self terms"),
    ],
)
def test_weights_that_are_not_a_classic_models_are_refused_by_key(classic, change, message):
    state = dict(classic.state_dict())
    change(state)

    with pytest.raises(WeightsError, match=message):
        from_classic(state, FEATURES)


TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("over_arch.model.1.bias"), "'over_arch.model.1.bias' is missing"),
        (
            without(TABLE.format("cat_5")),
            "t_cat_5.weight' is missing; pass all tables, and name",
        ),
        (
            with_tensor(TABLE.format("cat_99"), 3, 4),
            "t_cat_99.weight' is unexpected: .*; name all features",
        ),
        (with_tensor("inter_arch.crossnet.bias.0", 3), "is not one of a DLRM's; pass .* bare"),
        (with_tensor("dense_arch.model._mlp.1._linear.bias", 6), r"must be \(4,\), got \(6,\)"),
    ],
)
def test_weights_that_are_not_our_models_are_refused_by_key(change, message):
    state = dict(make_dlrm().state_dict())
    change(state)

    with pytest.raises(WeightsError, match=message):
        to_classic(state, FEATURES)


def test_a_training_modules_weights_and_empty_ones_are_refused():
    with pytest.raises(WeightsError, match=r"'model.dense_arch.* pass the state_dict of the bare"):
        to_classic({"model.dense_arch.model._mlp.0._linear.weight": torch.zeros(2, 2)}, FEATURES)
    with pytest.raises(
        WeightsError, match="it has no key of a DLRM_Net's table part; pass the whole state_dict"
    ):
        from_classic({}, FEATURES)
    with pytest.raises(
        WeightsError, match=r"must be a dict of tensors, got DLRM; call .*state_dict"
    ):
        to_classic(make_dlrm(), FEATURES)
    with pytest.raises(WeightsError, match="key 0 is not one of a DLRM's"):
        to_classic({0: torch.zeros(1)}, FEATURES)
    with pytest.raises(WeightsError, match="must be distinct"):
        to_classic(make_dlrm().state_dict(), ["cat_2", *FEATURES[:-1]])


def test_arrays_are_refused_by_key_with_the_way_to_tensors(classic):
    theirs = {key: value.numpy() for key, value in classic.state_dict().items()}
    ours = dict(make_dlrm().state_dict())
    ours["over_arch.model.1.bias"] = ours["over_arch.model.1.bias"].numpy()

    with pytest.raises(WeightsError, match=r"emb_l.0.weight must be a torch.Tensor, got ndarray"):
        from_classic(theirs, FEATURES)
    with pytest.raises(WeightsError, match=r"over_arch.model.1.bias must .* torch.from_numpy"):
        to_classic(ours, FEATURES)
