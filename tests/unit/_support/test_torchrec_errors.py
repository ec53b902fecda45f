"""What is said if TorchRec or FBGEMM is not installed, or was built for another torch."""

import importlib
import sys

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import TableConfig
from recsys.errors import MissingDependency

PACKAGES = ("torchrec", "fbgemm_gpu")
TABLE = TableConfig(name="a", num_embeddings=4, embedding_dim=4, feature_names=("a",))
USERS = {
    "recsys.distributed": lambda: importlib.import_module("recsys.distributed"),
    "JaggedIds.to_torchrec": lambda: JaggedIds(
        ["a"], torch.tensor([1]), torch.tensor([0, 1])
    ).to_torchrec(),
}


class Raising:
    """Refuses to import TorchRec and FBGEMM."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise self.error


@pytest.fixture
def imports_raise(monkeypatch):
    """Makes imports of TorchRec and FBGEMM, which nothing has imported yet, raise an error."""

    def make(error):
        for name in list(sys.modules):
            if name.startswith(("torchrec", "fbgemm_gpu", "recsys.distributed")):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Raising(error), *sys.meta_path])

    return make


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ModuleNotFoundError("No module named 'torchrec'"),
            "which is not installed (No module named 'torchrec'); install it by pip install "
            "'recsys[torchrec]'",
        ),
        (
            OSError("Could not load this library: fbgemm_gpu_py.so"),
            f"and its FBGEMM does not load beside torch {torch.__version__} (Could not load this "
            "library: fbgemm_gpu_py.so); install releases of torch, torchrec and fbgemm-gpu that "
            "belong together: README, 'Installing'",
        ),
    ],
)
def test_what_needs_torchrec_names_the_way_out(imports_raise, user, error, told):
    imports_raise(error)

    with pytest.raises(MissingDependency) as caught:
        USERS[user]()

    assert str(caught.value) == f"{user} needs TorchRec, {told}"
