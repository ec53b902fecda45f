import pytest
import torch
from torch import nn

from recsys.pipeline import Hotline
from recsys.pipeline.hotline import is_loss_a_sum

HALVES = Hotline(learning_steps=3)


def measure(losses, dtype):
    """Of the whole, of 1 of its 4 samples, and of the other 3."""
    parts = iter([(torch.tensor(loss, dtype=dtype), None) for loss in losses])
    return is_loss_a_sum(HALVES, nn.Linear(1, 1), lambda _: next(parts), None, [None] * 2, [1, 3])


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 9e-4), (torch.float32, 9e-4), (torch.bfloat16, 0.01)]
)
def test_rounding_is_no_difference(dtype, error):
    assert measure([2.5 * (1 + error), 1.0, 3.0], dtype) is False
    assert measure([4.0 * (1 - error), 1.0, 3.0], dtype) is True
    with pytest.raises(ValueError, match="it is 3 of 4 samples, 1 of 1 of them and 3 of the other"):
        measure([3.0, 1.0, 3.0], dtype)
