import pytest
import torch

from recsys.models.dcn_v2 import LowRankCrossNet


def test_initial_matrices_have_xaviers_variance_and_biases_are_zero():
    torch.manual_seed(0)
    net = LowRankCrossNet(400, 2, 100)

    expected = (2 / (400 + 100)) ** 0.5
    for matrix in (*net.W_kernels, *net.V_kernels):
        assert matrix.std().item() == pytest.approx(expected, rel=0.02)
    assert all(not bias.any() for bias in net.bias)
