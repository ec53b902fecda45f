"""Inputs and schedules that are refused: what is done, the error, and the name that it gives."""

import pytest
import torch

from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.table import TableConfig
from recsys.errors import MalformedBags


def look_up(make=HotColdEmbeddingBagCollection, **parts):
    """Look up two features of a `KeyedJaggedTensor`, made of its keys, values and `parts`."""
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    table = TableConfig(
        name="users", num_embeddings=9, embedding_dim=4, feature_names=("user", "friend")
    )
    features = torchrec.KeyedJaggedTensor(["user", "friend"], torch.arange(3), **parts)
    make([table], optimizer=SGD(lr=1.0))(features)


LENGTHS = torch.tensor([1, 1, 1])
OFFSETS = torch.tensor([0, 1, 2, 2, 3])
SHARED = {
    "lengths": LENGTHS,
    "stride_per_key_per_rank": [[2], [1]],
    "inverse_indices": (["user", "friend"], torch.tensor([[0, 1], [0, 0]])),
}
REFUSALS = [
    ("features of several batch sizes", lambda: look_up(**SHARED), ValueError, "inverse_indices"),
    (
        "features of several batch sizes, not pooled",
        lambda: look_up(
            HotColdEmbeddingCollection, lengths=LENGTHS, stride_per_key_per_rank=[[2], [1]]
        ),
        ValueError,
        "stride_per_key_per_rank",
    ),
    (
        "lengths and offsets that differ",
        lambda: look_up(lengths=torch.tensor([1, 1, 1, 0]), offsets=OFFSETS),
        MalformedBags,
        "lengths and offsets",
    ),
    (
        "lengths of features that differ",
        lambda: look_up(offsets=OFFSETS, length_per_key=[1, 2]),
        MalformedBags,
        "length_per_key",
    ),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)
