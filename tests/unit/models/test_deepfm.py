import pytest
import torch

from recsys.models.deepfm import factorization_machine


def test_the_second_order_term_is_torchrecs_factor_by_factor():
    pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.modules.deepfm import FactorizationMachine

    torch.manual_seed(0)
    factors = torch.randn(5, 4, 3, dtype=torch.float64)

    found = factorization_machine(factors)

    # TorchRec's multiplies all pairs of numbers, also those of different factors.
    expected = sum(FactorizationMachine()([factors[:, :, k : k + 1]]) for k in range(3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
