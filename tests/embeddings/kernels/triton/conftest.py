"""What tests of Triton kernels share; `triton_device` is in `tests/conftest.py`."""

import pytest
import torch

from recsys.embeddings.kernels.torch.errors import errors_on

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _forget_errors():
    yield
    errors_on(torch.device("cuda" if torch.cuda.is_available() else "cpu")).forget()
