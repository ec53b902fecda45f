from math import inf

import torch

from recsys.models.masked_transformer import keep_highest


def test_a_kept_score_has_its_logits_gradient_and_a_dropped_one_comes_back():
    scores = torch.tensor([[3.0, 2.0, 1.0]], requires_grad=True)

    mask = keep_highest(scores, 2)
    (mask[:, :2] * torch.tensor([5.0, -7.0])).sum().backward()

    assert mask.tolist() == [[0, 0, -inf]]
    assert scores.grad.tolist() == [[5, -7, 0]]
    assert keep_highest(scores - scores.grad, 2).tolist() == [[-inf, 0, 0]]
