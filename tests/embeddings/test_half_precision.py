"""Tables of bfloat16: what `tests/exact/twins.py`, which trains them, does not see."""

import copy

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig

TABLES = [
    TableConfig(name="users", num_embeddings=9, embedding_dim=4, data_type="bf16"),
    TableConfig(name="shops", num_embeddings=9, embedding_dim=4),
]
DTYPES = [torch.bfloat16, torch.float32]
IDS = JaggedIds.from_one_hot(["users", "shops"], torch.tensor([[0, 8, 3, 3], [2, 2, 1, 2]]))


def build(optimizer, tables=TABLES, **settings):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **settings)


def train(module, num_steps):
    for _ in range(num_steps):
        pooled = module(IDS).values()
        (pooled * torch.arange(1.0, pooled.numel() + 1).view_as(pooled).sin()).sum().backward()


def same_rows(one, other):
    pairs = zip(one.table_weights(), other.table_weights(), strict=True)
    return [torch.equal(mine, theirs) for mine, theirs in pairs]


def test_a_data_type_may_be_torchrecs():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.types import DataType

    ours = TableConfig(name="a", num_embeddings=2, embedding_dim=4, data_type=DataType.BF16)
    theirs = torchrec.EmbeddingBagConfig(
        name="b", num_embeddings=2, embedding_dim=4, feature_names=["b"], data_type=DataType.FP32
    )

    module = HotColdEmbeddingBagCollection([ours, theirs])

    assert ours.data_type == "bf16"
    assert [weight.dtype for weight in module.table_weights()] == DTYPES


def test_a_seed_repeats_a_run_also_a_resumed_one_and_another_makes_another(optimizer):
    module, again, other = (build(optimizer, rounding_seed=seed) for seed in (3, 3, 4))
    resumed = build(optimizer)  # the seed is part of the state
    for each in (module, again, other):
        train(each, 3)
    resumed.load_state_dict(module.state_dict())
    resumed.row_optimizer.load_state_dict(copy.deepcopy(module.row_optimizer.state_dict()))

    for each in (module, again, other, resumed):
        train(each, 2)

    assert same_rows(module, again) == same_rows(module, resumed) == [True, True]
    assert same_rows(module, other) == [False, True]  # of float32 nothing is rounded


def test_gradients_that_are_shown_have_the_dtype_of_their_table_and_add_up():
    module = build(SGD(lr=1.0), auto_apply=False)

    for _ in range(2):
        module(IDS).values().sum().backward()
        gradients = [weight.grad for weight in module.table_weights()]  # looking changes nothing

    assert [gradient.dtype for gradient in gradients] == DTYPES
    counts = torch.bincount(IDS["users"].values(), minlength=9).unsqueeze(1)
    assert torch.equal(gradients[0].to_dense(), (2 * counts).bfloat16().expand(9, 4))
