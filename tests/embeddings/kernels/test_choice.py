import subprocess
import sys

import pytest
import torch

from recsys.embeddings.kernels import choice


def test_triton_kernels_are_those_of_cuda():
    by_triton = pytest.importorskip("recsys.embeddings.kernels.triton.pooled_lookup")
    updating = pytest.importorskip("recsys.embeddings.kernels.triton.row_update")

    kernels = choice.DEVICE_KERNELS["cuda"](torch.device("cpu"))

    assert kernels.pooled_lookup is by_triton.pooled_lookup
    assert kernels.row_gradient_dots is by_triton.row_gradient_dots
    assert kernels.row_update is updating.row_update


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
