"""The same collection twice, resident and tiered."""

import torch

from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.table import TableConfig

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
# A feature looked up in three tables, a table by two features; two dims.
TABLES = [
    TableConfig(name="users", num_embeddings=300, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=260, embedding_dim=4, feature_names=("goods", "seen")),
    TableConfig(name="pages", num_embeddings=270, embedding_dim=8, feature_names=("seen",)),
    TableConfig(name="likes", num_embeddings=250, embedding_dim=4, feature_names=("seen",)),
]
FEATURES = ["users", "goods", "seen"]
BUDGET = 12_000  # of 21 KiB of rows, without state


def build(optimizer, budget=None, tables=TABLES, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, budget=budget, **options)


def state_bytes(optimizer):
    return {Adagrad: 8000, Adam: 16_000, PartialRowWiseAdam: 10_000}.get(type(optimizer), 2000)


def pair(optimizer, budget=BUDGET, **options):
    return build(optimizer, **options), build(optimizer, budget + state_bytes(optimizer), **options)


def require_equal(resident, tiered):
    for expected, found in zip(resident.table_weights(), tiered.table_weights(), strict=True):
        assert torch.equal(found.cpu(), expected.cpu())
    states = [module.row_optimizer.state_dict()["state"] for module in (resident, tiered)]
    for table, expected in states[0].items():
        for name, value in expected.items():
            found = torch.as_tensor(states[1][table][name])
            assert torch.equal(found, torch.as_tensor(value).cpu())
