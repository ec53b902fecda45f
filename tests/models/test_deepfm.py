import torch

from recsys.models import DeepFM
from recsys.train.build import TorchEmbeddingBags


def test_a_row_is_a_first_order_weight_and_then_its_factors(formulas):
    model = DeepFM(TorchEmbeddingBags(formulas.make_tables()), 5, [8, 4], [16, 8, 1])
    with torch.no_grad():
        for parameter in model.over_arch.parameters():
            parameter.zero_()
    dense, sparse = torch.zeros(1, 4), torch.zeros(1, 3, 4)
    sparse[0, :2] = torch.tensor([[5.0, 1, 2, 0], [7.0, 3, 4, 0]])

    assert model.head(dense, sparse).item() == 5 + 7 + (1 * 3 + 2 * 4)
