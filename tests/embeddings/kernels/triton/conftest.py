"""Where Triton kernels are tested: on a GPU, or on the CPU, which interprets them."""

import pytest
import torch

from recsys.embeddings.kernels.torch.errors import errors_on

pytest.importorskip("triton")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request):
    """A device whose tensors kernels can be launched with."""
    has_gpu = torch.cuda.is_available()
    if has_gpu != (request.param == "cuda"):
        pytest.skip("kernels are compiled here" if has_gpu else "torch sees no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _forget_errors():
    yield
    errors_on(torch.device("cuda" if torch.cuda.is_available() else "cpu")).forget()
