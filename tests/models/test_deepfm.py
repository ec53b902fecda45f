import pytest
import torch

from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.models import DeepFM
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


def test_a_row_is_a_first_order_weight_and_then_its_factors(formulas):
    model = DeepFM(TorchEmbeddingBags(formulas.make_tables()), 5, [8, 4], [16, 8, 1])
    with torch.no_grad():
        for parameter in model.over_arch.parameters():
            parameter.zero_()
    dense, sparse = torch.zeros(1, 4), torch.zeros(1, 3, 4)
    sparse[0, :2] = torch.tensor([[5.0, 1, 2, 0], [7.0, 3, 4, 0]])

    assert model.head(dense, sparse).item() == 5 + 7 + (1 * 3 + 2 * 4)


@pytest.mark.parametrize(
    ("dim", "over_arch", "rule"),
    [(1, [8, 1], "must end in 2 or more"), (4, [8, 2], r"must end in 1, got \[8, 2\]")],
)
def test_sizes_that_do_not_fit_are_refused(dim, over_arch, rule, formulas):
    tables = TorchEmbeddingBags(formulas.make_tables((dim, dim, dim)))

    with pytest.raises(ValueError, match=rule):
        DeepFM(tables, 5, [8, dim], over_arch)
