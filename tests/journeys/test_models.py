"""Journey 9: every model trains, in two tiers too, and is evaluated from its file."""

import json

import pyarrow.csv
import pytest
import torch
from torch import nn

from tests.commands import options, recsys
from tests.journeys.journey import SMALL, SYNTHETIC, auc_of, record_of, require_equal, sessions


class Wide(nn.Module):
    """A model of one's own: linear in the pooled vectors and the dense features."""

    def __init__(self, embeddings, num_dense):
        super().__init__()
        self.embeddings = embeddings
        self.top = nn.Linear(num_dense + 4 * len(embeddings.output_keys()), 1)

    def forward(self, batch):
        """Logits (B, 1)."""
        vectors = self.embeddings(batch.sparse_features).values()
        return self.top(torch.cat([batch.dense_features, vectors], 1))


POOLED = {
    "dlrm": [],
    "dcn_v2": ["model.name=dcn_v2", "model.dcn_v2.low_rank_dim=4"],
    "deepfm": ["model.name=deepfm"],
    "masked_transformer": [
        "model.interaction=masked_transformer",
        "model.interaction.masked_transformer.kept=3",
    ],
    "of one's own": [f"model.name={__name__}:Wide"],
}
WITHOUT_DENSE = [setting for setting in SMALL if not setting.startswith("model.dense_arch")]
SMALL_BATCHES = ("batch_size=16",)  # whose rows fit a budget
WITH_HISTORIES = {
    "din": [*WITHOUT_DENSE, *SMALL_BATCHES, "model.name=din", "model.din.attention=[8]"],
    "tbsm": [
        *SMALL,
        *SMALL_BATCHES,
        "model.name=tbsm",
        "model.tbsm.num_steps=6",
        "model.tbsm.tower=[4, 4]",
    ],
}


def train_in_both_ways(folder, data, *settings, budget):
    """Every row resident, and on a budget; returns the run."""
    run, tiered = folder / "run", folder / "tiered"
    recsys("train", data, "--run", run, *options(*settings))
    hot = (f"budget={budget}", "schedule=sequential")
    recsys("train", data, "--run", tiered, *options(*settings, *hot))
    require_equal(tiered, run)
    return run


def evaluated(run):
    """The test metrics of the saved model."""
    file = run.parent / "metrics.json"
    recsys("evaluate", run, "--json", file)
    return json.loads(file.read_text())["metrics"]["test"]


@pytest.mark.parametrize("name", POOLED)
def test_a_model_of_pooled_vectors_learns(tmp_path, name):
    settings = [
        *(setting for setting in SYNTHETIC if name != "of one's own" or "_arch" not in setting),
        *POOLED[name],
        "epochs=4",
    ]

    run = train_in_both_ways(tmp_path, "synthetic:criteo-kaggle", *settings, budget="30KiB")

    assert auc_of(run) > 0.6
    assert evaluated(run)["auc"] == pytest.approx(auc_of(run), abs=1e-6)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    pyarrow.csv.write_csv(sessions(0), folder / "sessions.csv")
    words = ("--schema", "session_clicks", "--out", folder / "store")
    recsys("prepare", "table", folder / "sessions.csv", *words)
    return folder / "store"


@pytest.mark.parametrize("name", WITH_HISTORIES)
def test_a_model_with_attention_to_histories_ranks_items(store, tmp_path, name):
    run = train_in_both_ways(tmp_path, store, *WITH_HISTORIES[name], budget="5KiB")

    found = record_of(run)["metrics"]["test"]
    assert 20 / 200 < found["recall_at_k"] <= 1  # that of chance
    assert evaluated(run)["recall_at_k"] == pytest.approx(found["recall_at_k"], abs=1e-6)
