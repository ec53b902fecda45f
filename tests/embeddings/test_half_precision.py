"""Tables of bfloat16: pooled and moved in float32, rounded as they are written."""

import copy

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBagCollection,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.train.build import TorchEmbeddingBags

TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4, data_type="bf16"),
    TableConfig(name="goods", num_embeddings=5, embedding_dim=4, data_type="bf16"),
    TableConfig(name="shops", num_embeddings=3, embedding_dim=4),
    TableConfig(name="towns", num_embeddings=9, embedding_dim=4, data_type="bf16", pooling="mean"),
]
DTYPES = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
IDS = JaggedIds.from_one_hot(
    [table.name for table in TABLES],
    torch.tensor([[0, 8, 3, 3], [4, 4, 0, 2], [2, 2, 1, 2], [0, 8, 3, 3]]),
)
OPTIMIZERS = [
    SGD(lr=0.01),
    Adagrad(lr=0.01),
    RowWiseAdagrad(lr=0.01),
    Adam(lr=0.01),
    PartialRowWiseAdam(lr=0.01),
]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
AT_WILL = {"auto_apply": False}
# Of the sparse tensors that torch itself makes.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def build(optimizer, tables=TABLES, **settings):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **settings)


def step(module):
    pooled = module(IDS).values()
    (pooled * torch.arange(1.0, pooled.numel() + 1).view_as(pooled).sin()).sum().backward()


def same_rows(one, other):
    pairs = zip(one.table_weights(), other.table_weights(), strict=True)
    return [torch.equal(mine, theirs) for mine, theirs in pairs]


def test_tables_have_the_data_type_of_their_config_and_are_pooled_in_float32():
    module = build(None)

    pooled = module(IDS)

    assert [weight.dtype for weight in module.table_weights()] == DTYPES
    assert [value.dtype for value in module.state_dict().values()] == DTYPES
    assert pooled.values().dtype == torch.float32
    for table, weight in zip(TABLES, module.table_weights(), strict=True):
        assert torch.equal(pooled[table.name], weight.detach().float()[IDS[table.name].values()])


def test_a_data_type_may_be_torchrecs():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.types import DataType

    ours = TableConfig(name="a", num_embeddings=2, embedding_dim=4, data_type=DataType.BF16)
    theirs = torchrec.EmbeddingBagConfig(
        name="b", num_embeddings=2, embedding_dim=4, feature_names=["b"], data_type=DataType.FP32
    )

    module = HotColdEmbeddingBagCollection([ours, theirs])

    assert ours.data_type == "bf16"
    assert [weight.dtype for weight in module.table_weights()] == [torch.bfloat16, torch.float32]


def test_a_provider_that_has_float32_rows_alone_says_so():
    with pytest.raises(ValueError, match=r"one of \['fp32'\] with TorchEmbeddingBags, got 'bf16'"):
        TorchEmbeddingBags(TABLES[:1])


@each_optimizer
def test_a_seed_repeats_a_run_and_another_makes_another(optimizer):
    modules = [build(optimizer, rounding_seed=seed) for seed in (3, 3, 4)]

    for module in modules:
        for _ in range(4):
            step(module)

    assert same_rows(modules[0], modules[1]) == [True] * 4
    assert same_rows(modules[0], modules[2])[0] is False
    assert same_rows(modules[0], modules[2])[2] is True  # of float32: nothing is rounded


@each_optimizer
@pytest.mark.parametrize("is_stochastic", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(optimizer, is_stochastic):
    module = build(optimizer, rounding_seed=7, stochastic_rounding=is_stochastic)
    for _ in range(3):
        step(module)
    resumed = build(optimizer)  # the seed and the switch are part of the state
    resumed.load_state_dict(module.state_dict())
    resumed.row_optimizer.load_state_dict(copy.deepcopy(module.row_optimizer.state_dict()))

    for each in (module, resumed):
        for _ in range(2):
            step(each)

    assert same_rows(module, resumed) == [True] * 4


def test_gradients_that_are_shown_have_the_dtype_of_their_table_and_add_up():
    module = build(SGD(lr=1.0), **AT_WILL)

    for _ in range(2):
        module(IDS).values().sum().backward()
        gradients = [weight.grad for weight in module.table_weights()]  # looking changes nothing

    assert [gradient.dtype for gradient in gradients] == DTYPES
    counts = torch.bincount(IDS["goods"].values(), minlength=5).unsqueeze(1)
    assert torch.equal(gradients[1].to_dense(), (2 * counts).bfloat16().expand(5, 4))


def test_a_gradient_that_somebody_looked_at_moves_rows_in_float32():
    looked, other = (build(Adagrad(lr=0.1), **AT_WILL) for _ in range(2))
    for module in (looked, other):
        module(IDS).values().sum().backward()  # gradients that 16 bits hold exactly

    assert looked.table_weights()[0].grad.dtype == torch.bfloat16
    for module in (looked, other):
        module.row_optimizer.step()

    assert same_rows(looked, other) == [True] * 4
