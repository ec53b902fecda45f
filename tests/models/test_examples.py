"""Configurations in examples/ of which a comment makes claims."""

from pathlib import Path

import pytest

from recsys.config import load_config

MODELS = sorted((Path(__file__).parents[2] / "examples" / "models").glob("*.toml"))


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_each_model_has_a_configuration(file):
    model = load_config(file).model

    assert file.stem in (model.name, model.interaction.kind)
