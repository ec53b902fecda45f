"""Every model over pooled embeddings against its formula, written out sample by sample."""

import pytest
import torch

from recsys.embeddings import HotColdEmbeddingBagCollection, TableConfig
from recsys.models import DLRM, DCNv2, DeepFM
from tests.models import formulas

DENSE_ARCH, OVER_ARCH = [8, 4], [16, 8, 1]
DIMS = pytest.mark.parametrize("dims", [(4, 4, 4), (4, 2, 3)], ids=["one dim", "three dims"])


def make_model(kind, dims=(4, 4, 4), num_dense=5):
    """With a cross network of two layers of rank 3."""
    tables = HotColdEmbeddingBagCollection(formulas.make_tables(dims))
    sizes = tables, num_dense, DENSE_ARCH, OVER_ARCH
    if kind == "dcn_v2":
        return DCNv2(*sizes, dcn_num_layers=2, dcn_low_rank_dim=3)
    return {"dlrm": DLRM, "deepfm": DeepFM}[kind](*sizes)


def dlrm(weights, vectors):
    """The logit of one sample, from the weights of the model and the sample's vectors."""
    products = formulas.products_of_pairs(vectors)
    return formulas.over_arch(weights, torch.cat([vectors[0], torch.stack(products)]))


def dcn_v2(weights, vectors):
    first = crossed = torch.cat(vectors)
    for layer in range(2):
        prefix = "inter_arch.crossnet"
        W, V = (weights[f"{prefix}.{name}_kernels.{layer}"] for name in "WV")
        crossed = first * (W @ (V @ crossed) + weights[f"{prefix}.bias.{layer}"]) + crossed
    return formulas.over_arch(weights, crossed)


def deepfm(weights, vectors):
    first_order = sum(vector[0] for vector in vectors)
    second_order = sum(formulas.products_of_pairs([vector[1:] for vector in vectors]))
    return formulas.over_arch(weights, torch.cat(vectors)) + first_order + second_order


FORMULAS = {"dlrm": dlrm, "dcn_v2": dcn_v2, "deepfm": deepfm}
KINDS = pytest.mark.parametrize("kind", FORMULAS)


@KINDS
@pytest.mark.parametrize("bags", ["bags", "one-hot"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 3e-6)], ids=["64", "32"]
)
@pytest.mark.parametrize(
    ("dims", "num_dense"),
    [((4, 4, 4), 5), ((4, 2, 3), 5), ((4, 4, 4), 0)],
    ids=["one dim", "three dims", "no dense features"],
)
def test_logits_and_gradients_are_the_formulas(kind, bags, dtype, tolerance, dims, num_dense):
    model = formulas.draw_parameters(make_model(kind, dims, num_dense).to(dtype))
    batch = formulas.make_batch(bags, num_dense)

    def formula(weights, sample):
        return FORMULAS[kind](weights, formulas.vectors_of(weights, batch, sample))

    formulas.require_formula(model, batch, formula, tolerance)


@KINDS
def test_logits_follow_from_the_vectors_of_dense_and_sparse_features(kind):
    model = make_model(kind, (4, 2, 3)).double()
    batch = formulas.make_batch()

    vectors = model.dense_arch(batch.dense_features), model.sparse_arch(batch.sparse_features)

    assert [each.shape for each in vectors] == [(6, 4), (6, 3, 4)]
    assert torch.equal(model.head(*vectors), model(batch.dense_features, batch.sparse_features))
    assert model.head(*(each[:0] for each in vectors)).shape == (0, 1)


@KINDS
@DIMS
def test_autocast_computes_close_logits_in_float32(kind, dims):
    model = formulas.draw_parameters(make_model(kind, dims))
    batch = formulas.make_batch()
    dense = batch.dense_features.float()
    expected = model(dense, batch.sparse_features)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(dense, batch.sparse_features)
    found.sum().backward()

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert {value.grad.dtype for value in model.parameters()} == {torch.float32}


@KINDS
@DIMS
def test_a_model_made_on_the_meta_device_can_be_filled_and_run(kind, dims):
    plain, batch = make_model(kind, dims), formulas.make_batch()
    with torch.device("meta"):
        model = make_model(kind, dims)

    model.load_state_dict(plain.state_dict(), assign=True)

    inputs = batch.dense_features.float(), batch.sparse_features
    assert torch.equal(model(*inputs), plain(*inputs))


def test_only_tables_of_other_dims_are_projected_and_features_share_the_projection():
    tables = [
        TableConfig(name="goods", num_embeddings=9, embedding_dim=2, feature_names=("item", "ad")),
        TableConfig(name="clicks", num_embeddings=9, embedding_dim=4, feature_names=("item",)),
    ]
    model = DLRM(HotColdEmbeddingBagCollection(tables), 5, DENSE_ARCH, OVER_ARCH)

    assert model.sparse_arch.sparse_feature_names == ["item@goods", "ad", "item@clicks"]
    assert list(model.sparse_arch.projections) == ["goods"]
    assert make_model("dlrm").sparse_arch.projections is None
