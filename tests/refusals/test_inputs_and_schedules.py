"""Inputs and schedules that are refused: what is done, the error, and the name that it gives."""

import pytest
import torch

from recsys.batch import Batch, JaggedIds
from recsys.config import load_config
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.table import TableConfig
from recsys.errors import ConfigError, MalformedBags
from recsys.pipeline import Hotline, TrainPipeline


def look_up(make=HotColdEmbeddingBagCollection, **parts):
    """Look up two features of a `KeyedJaggedTensor`, made of its keys, values and `parts`."""
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    table = TableConfig(
        name="users", num_embeddings=9, embedding_dim=4, feature_names=("user", "friend")
    )
    features = torchrec.KeyedJaggedTensor(["user", "friend"], torch.arange(3), **parts)
    make([table], optimizer=SGD(lr=1.0))(features)


class LossOfEachSample(torch.nn.Module):
    """A model of one bag, whose loss has a number for each sample."""

    def __init__(self):
        super().__init__()
        table = TableConfig(
            name="users", num_embeddings=99, embedding_dim=4, feature_names=("user",)
        )
        self.users = HotColdEmbeddingBagCollection([table], optimizer=SGD(lr=1.0), budget=700)

    def forward(self, batch):
        loss = self.users(batch.sparse_features).values().sum(1)
        return loss, loss.detach()


def train_by_hotline():
    """Train on mini-batches of which half of the samples look up new rows."""
    pipeline = TrainPipeline(LossOfEachSample(), None, schedule=Hotline(learning_steps=0))
    rows = [torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 8, 9]])]
    for each in rows:
        ids = JaggedIds.from_one_hot(["user"], each)
        pipeline.progress(iter([Batch(torch.zeros(4, 0), ids, torch.zeros(4))]))


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
    ("hotline, a loss of each sample", train_by_hotline, ValueError, "loss"),
    ("hotline with a depth", lambda: Hotline(depth=2), TypeError, "depth"),
    (
        "hotline with a depth, by its key",
        lambda: load_config(None, ["schedule.name=hotline", "schedule.depth=2"], data="store"),
        ConfigError,
        "depth",
    ),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)
