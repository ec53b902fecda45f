"""Configurations in examples/ of which a comment makes claims."""

from pathlib import Path

import pytest
import torch

from recsys.ablate import load_ablation
from recsys.config import load_config
from recsys.datasets import SyntheticCriteo
from recsys.train.parts.models import build_network
from recsys.train.parts.providers import TorchEmbeddingBags
from recsys.train.parts.tables import tables_of

MODELS = sorted((Path(__file__).parents[2] / "examples" / "models").glob("*.toml"))


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_each_model_has_a_configuration(file):
    model = load_config(file).model

    assert file.stem in (model.name, model.interaction.kind)


def num_dense_parameters(model):
    source = SyntheticCriteo(num_samples=14, table_sizes=[1] * 26)
    tables = TorchEmbeddingBags(tables_of(source, model))
    network = build_network(model, source, tables, torch.device("cpu"))
    return sum(
        value.numel() for key, value in network.named_parameters() if "embedding_bags" not in key
    )


def test_models_compared_under_drift_have_as_many_dense_parameters_as_their_file_says(
    pytestconfig,
):
    file = pytestconfig.rootpath / "examples" / "ablation" / "models_drift.toml"
    cells = load_ablation(file).cells

    found = {cell.variation: num_dense_parameters(cell.config.model) for cell in cells}

    assert list(found) == ["dot", "dcn_v2", "masked_transformer"]
    assert max(found.values()) < 1.01 * min(found.values())
    for number in found.values():
        assert f"{number:,}" in file.read_text()
