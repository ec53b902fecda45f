import subprocess
import sys
import warnings

import pytest
import torch

from recsys._support.cuda.triton_support import has_triton
from recsys.embeddings.kernels import choice
from recsys.embeddings.kernels.torch import pooled_lookup as by_torch
from recsys.embeddings.kernels.torch.row_update import row_update

CPU = torch.device("cpu")


@pytest.fixture
def _as_on_cuda(monkeypatch):
    monkeypatch.setattr(choice, "_BY_TORCH", {"cpu"})
    monkeypatch.setattr(choice, "_BY_TRITON", {"cpu"})
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


@pytest.mark.usefixtures("_as_on_cuda")
def test_triton_kernels_are_taken_where_there_are_any():
    by_triton = pytest.importorskip("recsys.embeddings.kernels.triton.pooled_lookup")
    updating = pytest.importorskip("recsys.embeddings.kernels.triton.row_update")

    kernels = choice.kernels_on(CPU)

    assert kernels.pooled_lookup is by_triton.pooled_lookup
    assert kernels.row_gradient_dots is by_triton.row_gradient_dots
    assert kernels.row_update is updating.row_update


@pytest.mark.usefixtures("_as_on_cuda")
def test_without_triton_torch_operations_are_taken_and_one_warning_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)

    with pytest.warns(UserWarning, match="triton cannot be imported .* slower; install"):
        kernels = choice.kernels_on(CPU)
    with warnings.catch_warnings(action="error"):
        choice.kernels_on(CPU)

    assert kernels.pooled_lookup is by_torch.pooled_lookup
    assert kernels.row_gradient_dots is by_torch.row_gradient_dots
    assert kernels.row_update is row_update


def test_tables_on_a_cpu_need_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, warnings\n"
        "from recsys.embeddings import HotColdEmbeddingBag\n"
        "from recsys.models.interaction import InteractionArch\n"
        "warnings.simplefilter('error')\n"
        "pooled = HotColdEmbeddingBag(9, 4, mode='sum')(torch.tensor([[1, 2]]))\n"
        "InteractionArch(1)(pooled, pooled.unsqueeze(1)).sum().backward()\n"
        "assert not [name for name in sys.modules if name.startswith('recsys.') and "
        "name.split('.')[-2] == 'triton']\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True)
