"""What tests of embeddings share."""

import pytest

from recsys.embeddings import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]


@pytest.fixture(params=OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def optimizer(request):
    """Each of our optimizers in turn, for tests that name none."""
    return request.param


@pytest.fixture(params=OPTIMIZERS[1:], ids=lambda optimizer: type(optimizer).__name__)
def optimizer_with_state(request):
    """Each that keeps state by the row."""
    return request.param
