"""Configurations in examples/ of which a comment makes claims."""

import tomllib
from pathlib import Path

import pytest

from recsys.config import ModelConfig, load_config
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.table import TableConfig
from recsys.models import DLRM, DCNv2, MaskedTransformerArch

MODELS = sorted((Path(__file__).parents[2] / "examples" / "models").glob("*.toml"))


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_each_model_has_a_configuration(file):
    model = load_config(file).model

    assert file.stem in (model.name, model.interaction)


def num_dense_parameters(name, over_arch):
    tables = [TableConfig(name=f"t_{n}", num_embeddings=1, embedding_dim=16) for n in range(26)]
    sizes = TorchEmbeddingBags(tables), 13, ModelConfig().dense_arch, over_arch
    if name == "dcn_v2":
        model = DCNv2(*sizes, dcn_num_layers=3, dcn_low_rank_dim=64)
    else:
        transformer = MaskedTransformerArch(26, 16) if name == "masked_transformer" else None
        model = DLRM(*sizes, interaction=transformer)
    return sum(
        value.numel() for key, value in model.named_parameters() if "embedding_bags" not in key
    )


def test_models_compared_under_drift_have_as_many_dense_parameters_as_their_file_says(
    pytestconfig,
):
    text = (pytestconfig.rootpath / "examples" / "ablation" / "models_drift.toml").read_text()
    variations = tomllib.loads(text)["ablate"]["variations"]

    found = {
        each["name"]: num_dense_parameters(
            each["name"], each["model"].get("over_arch", ModelConfig().over_arch)
        )
        for each in variations
    }

    assert list(found) == ["dot", "dcn_v2", "masked_transformer"]
    assert max(found.values()) < 1.01 * min(found.values())
    for number in found.values():
        assert f"{number:,}" in text
