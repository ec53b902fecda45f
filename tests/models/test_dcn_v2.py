import pytest
import torch

from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.models import DCNv2
from recsys.models.dcn_v2 import LowRankCrossNet


def make_model(formulas):
    return DCNv2(TorchEmbeddingBags(formulas.make_tables()), 5, [8, 4], [16, 8, 1], 2, 3)


@pytest.fixture
def torchrec_pair(formulas):
    """Our DCNv2 and TorchRec's DLRM_DCN with the same weights."""
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM_DCN

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
        )
        for table in formulas.make_tables()
    ]
    theirs = DLRM_DCN(EmbeddingBagCollection(tables=configs), 5, [8, 4], [16, 8, 1], 2, 3)
    formulas.draw_parameters(theirs)
    ours = make_model(formulas)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_state_dict_keys_and_shapes_are_torchrecs(torchrec_pair):
    ours, theirs = (
        {key: tuple(value.shape) for key, value in model.state_dict().items()}
        for model in torchrec_pair
    )

    assert ours == theirs
    assert ours["inter_arch.crossnet.W_kernels.0"] == (16, 3)


def test_logits_and_gradients_are_torchrecs(torchrec_pair, formulas):
    ours, theirs = torchrec_pair
    batch = formulas.make_batch()
    dense = batch.dense_features.float()

    our_logits = ours(dense, batch.sparse_features)
    their_logits = theirs(dense, batch.sparse_features.to_torchrec())
    our_logits.square().sum().backward()
    their_logits.square().sum().backward()

    torch.testing.assert_close(our_logits, their_logits, rtol=1e-6, atol=1e-6)
    their_gradients = {name: value.grad for name, value in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad.to_dense()
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-5, atol=1e-6, msg=name)


def test_initial_matrices_have_xaviers_variance_and_biases_are_zero():
    torch.manual_seed(0)
    net = LowRankCrossNet(400, 2, 100)

    expected = (2 / (400 + 100)) ** 0.5
    for matrix in (*net.W_kernels, *net.V_kernels):
        assert matrix.std().item() == pytest.approx(expected, rel=0.02)
    assert all(not bias.any() for bias in net.bias)


def test_the_cross_network_names_its_sizes():
    assert repr(LowRankCrossNet(6, 2, 3)).startswith(
        "LowRankCrossNet(\n  in_features=6, num_layers=2, low_rank=3\n"
    )


@pytest.mark.parametrize("sizes", [(6, 0, 3), (6, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match=rf"at least 1, got {sizes[0]}, {sizes[1]} and {sizes[2]}"):
        LowRankCrossNet(*sizes)
