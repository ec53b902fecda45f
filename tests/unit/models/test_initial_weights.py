"""How models draw their first weights."""

from math import sqrt

import pytest
import torch

from recsys import DLRM
from recsys.embeddings import HotColdEmbeddingBagCollection
from recsys.models import DIN
from recsys.models.dcn_v2 import LowRankCrossNet
from recsys.models.dlrm import initialize_classic
from tests.models import formulas
from tests.models.sequence_data import HISTORIES, make_collection


def test_matrices_of_a_cross_network_have_xaviers_variance_and_biases_are_zero():
    torch.manual_seed(0)
    net = LowRankCrossNet(400, 2, 100)

    for matrix in (*net.W_kernels, *net.V_kernels):
        assert matrix.std().item() == pytest.approx(sqrt(2 / 500), rel=0.02)
    assert all(not bias.any() for bias in net.bias)


def test_classic_initialisation_has_the_variances_of_the_classic_script():
    torch.manual_seed(0)
    layer = torch.nn.Linear(400, 600)

    initialize_classic(layer)

    assert layer.weight.std().item() == pytest.approx(sqrt(2 / 1000), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(sqrt(1 / 600), rel=0.1)
    assert abs(layer.weight.mean().item()) < 1e-3


@pytest.mark.parametrize(
    ("model", "drawn"),
    [
        (DIN(make_collection(), 3, HISTORIES, [7, 5, 1]), ("over_arch",)),
        (
            DLRM(HotColdEmbeddingBagCollection(formulas.make_tables((4, 2, 3))), 5, [8, 4], [8, 1]),
            ("over_arch", "dense_arch", "sparse_arch.projections"),
        ),
    ],
    ids=["din", "dlrm"],
)
def test_classic_initialisation_draws_mlps_and_projections_alone(model, drawn):
    before = {name: value.clone() for name, value in model.named_parameters()}

    initialize_classic(model)

    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == (not name.startswith(drawn)), name
