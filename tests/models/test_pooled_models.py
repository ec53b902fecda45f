"""Every model over pooled embeddings against its formula, written out sample by sample."""

import pytest
import torch

from recsys.embeddings import HotColdEmbeddingBagCollection
from recsys.models import DLRM, DCNv2, DeepFM
from recsys.models.dlrm import initialize_classic
from recsys.train.build import TorchEmbeddingBags

DENSE_ARCH, OVER_ARCH = [8, 4], [16, 8, 1]
KINDS = pytest.mark.parametrize("kind", ["dlrm", "dcn_v2", "deepfm"])
DIMS = pytest.mark.parametrize("dims", [(4, 4, 4), (4, 2, 3)], ids=["one dim", "three dims"])


def make_model(kind, tables, num_dense=5):
    """With a cross network of two layers of rank 3."""
    sizes = tables, num_dense, DENSE_ARCH, OVER_ARCH
    if kind == "dcn_v2":
        return DCNv2(*sizes, dcn_num_layers=2, dcn_low_rank_dim=3)
    return {"dlrm": DLRM, "deepfm": DeepFM}[kind](*sizes)


@pytest.fixture
def formula_of(formulas):
    """The logit of one sample by name of the model, from its weights and vectors."""

    def dlrm(weights, vectors):
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

    return {"dlrm": dlrm, "dcn_v2": dcn_v2, "deepfm": deepfm}


@KINDS
@pytest.mark.parametrize("bags", ["bags", "one-hot"])
@DIMS
def test_logits_and_gradients_are_the_formulas(kind, bags, dims, formulas, formula_of):
    model = make_model(kind, TorchEmbeddingBags(formulas.make_tables(dims))).double()
    formulas.draw_parameters(model)

    formulas.require_formula(model, formulas.make_batch(bags), formula_of[kind])


@KINDS
@pytest.mark.parametrize("bags", ["bags", "one-hot"])
@DIMS
def test_over_recsys_tables_they_are_the_formulas_within_float32(
    kind, bags, dims, formulas, formula_of
):
    model = make_model(kind, HotColdEmbeddingBagCollection(formulas.make_tables(dims)))
    formulas.draw_parameters(model)
    batch = formulas.make_batch(bags)

    formulas.require_formula(model, batch, formula_of[kind], tolerance=1e-6)


@KINDS
def test_without_dense_features_they_are_the_formulas_too(kind, formulas, formula_of):
    model = make_model(kind, TorchEmbeddingBags(formulas.make_tables()), num_dense=0).double()
    formulas.draw_parameters(model)

    formulas.require_formula(model, formulas.make_batch(num_dense=0), formula_of[kind])


@KINDS
def test_logits_follow_from_the_vectors_of_dense_and_sparse_features(kind, formulas):
    model = make_model(kind, TorchEmbeddingBags(formulas.make_tables((4, 2, 3)))).double()
    batch = formulas.make_batch()

    vectors = model.dense_arch(batch.dense_features), model.sparse_arch(batch.sparse_features)

    assert [each.shape for each in vectors] == [(6, 4), (6, 3, 4)]
    assert torch.equal(model.head(*vectors), model(batch.dense_features, batch.sparse_features))


@KINDS
def test_a_mini_batch_of_no_sample_has_no_logit(kind, formulas):
    model = make_model(kind, TorchEmbeddingBags(formulas.make_tables()))

    assert model.head(torch.empty(0, 4), torch.empty(0, 3, 4)).shape == (0, 1)


@KINDS
@DIMS
def test_autocast_computes_close_logits_in_float32(kind, dims, formulas):
    model = make_model(kind, HotColdEmbeddingBagCollection(formulas.make_tables(dims)))
    formulas.draw_parameters(model)
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
def test_a_model_made_on_the_meta_device_can_be_filled_and_run(kind, dims, formulas):
    tables, batch = formulas.make_tables(dims), formulas.make_batch()
    plain = make_model(kind, TorchEmbeddingBags(tables))
    with torch.device("meta"):
        model = make_model(kind, TorchEmbeddingBags(tables))

    model.load_state_dict(plain.state_dict(), assign=True)

    inputs = batch.dense_features.float(), batch.sparse_features
    assert torch.equal(model(*inputs), plain(*inputs))


def test_classic_initialisation_draws_projections_too(formulas):
    model = make_model("dlrm", TorchEmbeddingBags(formulas.make_tables((4, 2, 3))))
    before = model.sparse_arch.projections["t_cat_1"].weight.detach().clone()

    initialize_classic(model)

    assert not torch.equal(model.sparse_arch.projections["t_cat_1"].weight, before)
