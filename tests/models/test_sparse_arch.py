"""Tables of different dims: what is projected, trained and saved."""

import pytest
import torch

from recsys import DLRM
from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.models.dlrm import SparseArch
from recsys.train.build import TorchEmbeddingBags

DIMS = (4, 2, 3)


def test_vectors_of_other_dims_are_projected_and_the_rest_are_the_lookups(formulas):
    collection = HotColdEmbeddingBagCollection(formulas.make_tables(DIMS))
    arch, ids = SparseArch(collection, 4), formulas.make_batch().sparse_features

    found = arch(ids)

    pooled = collection(ids)
    assert arch.interaction_dim == 4
    assert found.shape == (6, 3, 4)
    assert torch.equal(found[:, 0], pooled["cat_0"])
    for column, name in ((1, "cat_1"), (2, "cat_2")):
        expected = pooled[name] @ arch.projections[f"t_{name}"].weight.T
        torch.testing.assert_close(found[:, column], expected, rtol=1e-6, atol=1e-6)


def test_features_of_one_table_share_its_projection_and_may_share_their_name_with_another():
    tables = [
        TableConfig(name="goods", num_embeddings=9, embedding_dim=2, feature_names=("item", "ad")),
        TableConfig(name="clicks", num_embeddings=9, embedding_dim=4, feature_names=("item",)),
    ]
    arch = SparseArch(HotColdEmbeddingBagCollection(tables), 4)

    assert arch.sparse_feature_names == ["item@goods", "ad", "item@clicks"]
    assert list(arch.projections) == ["goods"]


@pytest.mark.parametrize(
    ("dims", "projected"), [((4, 4, 4), []), (DIMS, ["t_cat_1", "t_cat_2"])], ids=["one", "three"]
)
def test_only_tables_of_other_dims_add_keys(dims, projected, formulas):
    model = DLRM(TorchEmbeddingBags(formulas.make_tables(dims)), 5, [8, 4], [8, 1])

    keys = [key for key in model.sparse_arch.state_dict() if "embedding_bags" not in key]

    assert keys == [f"projections.{name}.weight" for name in projected]


def test_torchrecs_jagged_tensors_and_tables_give_the_same_vectors(formulas):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    tables = formulas.make_tables(DIMS)
    theirs = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
            for table in tables
        ]
    )
    over_theirs, ours = (
        SparseArch(each, 4) for each in (theirs, HotColdEmbeddingBagCollection(tables))
    )
    ours.load_state_dict(over_theirs.state_dict())
    ids = formulas.make_batch().sparse_features

    expected = ours(ids)

    torch.testing.assert_close(over_theirs(ids.to_torchrec()), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours(ids.to_torchrec()), expected)
