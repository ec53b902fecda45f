"""What tables may not be where a recsys optimizer updates their rows."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbedding, HotColdEmbeddingBag, TableConfig

OPTIMIZED = {"optimizer": SGD(lr=0.1)}


def set_later(name, value):
    module = HotColdEmbeddingBag(9, 4, mode="sum", **OPTIMIZED)
    setattr(module, name, value)
    module(torch.tensor([[1, 2]]))


def look_up_after(convert):
    module = HotColdEmbeddingBag(9, 4, mode="sum", **OPTIMIZED)
    convert(module)(torch.tensor([[1, 2]]))


REFUSALS = [
    ("mode", lambda: HotColdEmbeddingBag(9, 4, mode="max", **OPTIMIZED), "mode"),
    ("max_norm", lambda: HotColdEmbeddingBag(9, 4, max_norm=1.0, **OPTIMIZED), "max_norm"),
    ("max_norm, embedding", lambda: HotColdEmbedding(9, 4, max_norm=1.0, **OPTIMIZED), "max_norm"),
    (
        "scale_grad_by_freq",
        lambda: HotColdEmbedding(9, 4, scale_grad_by_freq=True, **OPTIMIZED),
        "scale_grad_by_freq",
    ),
    (
        "from_torch",
        lambda: HotColdEmbedding.from_torch(nn.Embedding(9, 4, max_norm=1.0), **OPTIMIZED),
        "max_norm",
    ),
    ("mode, set later", lambda: set_later("mode", "max"), "mode"),
    ("max_norm, set later", lambda: set_later("max_norm", 0.5), "max_norm"),
    ("scaled, set later", lambda: set_later("scale_grad_by_freq", True), "scale_grad_by_freq"),
    ("float16", lambda: HotColdEmbeddingBag(9, 4, dtype=torch.float16, **OPTIMIZED), "float16"),
    ("float16 later", lambda: look_up_after(nn.Module.half), "float16"),
    (
        "float16 of a collection",
        lambda: TableConfig(name="a", num_embeddings=9, embedding_dim=4, data_type="fp16"),
        "data_type",
    ),
]


@pytest.mark.parametrize(
    ("use", "name"), [each[1:] for each in REFUSALS], ids=[each[0] for each in REFUSALS]
)
def test_a_setting_that_no_recsys_optimizer_supports_is_refused(use, name):
    with pytest.raises(ValueError, match=name):
        use()


LEFT = {
    "mode": nn.EmbeddingBag(9, 4, mode="max"),
    "max_norm": nn.Embedding(9, 4, max_norm=1.0),
    "scale_grad_by_freq": nn.EmbeddingBag(9, 4, mode="sum", scale_grad_by_freq=True),
    "float16": nn.EmbeddingBag(9, 4, mode="sum", dtype=torch.float16),
}


@pytest.mark.filterwarnings("ignore:.* is not replaced")
@pytest.mark.parametrize("setting", LEFT)
def test_accelerate_leaves_such_a_module_to_torch_and_says_why(setting):
    model = nn.ModuleDict({"left": LEFT[setting], "taken": nn.EmbeddingBag(9, 4, mode="sum")})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = recsys.accelerate(model, optimizer=optimizer, always=True)

    assert model["left"] is LEFT[setting]
    assert isinstance(model["taken"], HotColdEmbeddingBag)
    [left] = result.left_alone
    assert setting in left.reason
