from dataclasses import fields

import pytest

from recsys.config import (
    GuardConfig,
    ImportanceConfig,
    PaperConfig,
    SkipConfig,
    StalenessConfig,
    TrainConfig,
    load_config,
)
from recsys.embeddings.staleness.settings import Staleness
from recsys.pipeline import Guard, Importance, RandomDrop
from recsys.pipeline.skip.paper import Paper

DROP = "skip.policy=drop_input"
FAE = ("schedule.name=fae", "schedule.rate=100", "schedule.adaptive=false", "budget=1MiB")


def test_nothing_is_skipped_by_default():
    config = TrainConfig()

    assert config.skip.policy == "none"
    assert config.skip.settings(0) is None


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (StalenessConfig, Staleness),
        (GuardConfig, Guard),
        (PaperConfig, Paper),
        (ImportanceConfig, Importance),
    ],
)
def test_keys_and_their_defaults_are_those_of_the_library(keys, settings):
    other = ("share", "seed", "guard")  # keys beside these
    library = {each.name: each.default for each in fields(settings) if each.name not in other}
    own = {name: field.default for name, field in keys.model_fields.items()}

    assert own == library


def test_keys_become_settings():
    config = load_config(
        None,
        [
            DROP,
            "skip.staleness.window=200",
            "skip.staleness.patience=3",
            "skip.guard.every=300",
            "skip.guard.logloss=0.02",
        ],
    )

    assert config.skip.staleness.settings() == Staleness(window=200, patience=3)
    assert config.skip.guard.settings() == Guard(every=300, logloss=0.02)
    assert SkipConfig().staleness.settings() == Staleness()
    assert GuardConfig(every=0).settings() is None
    paper = load_config(None, ["skip.policy=paper", *FAE, "skip.paper.target=0.1"]).skip.paper
    assert paper.settings(3) == Paper(target=0.1, seed=3)


def test_keys_become_policies():
    importance = load_config(
        None,
        [
            "skip.policy=importance",
            "skip.share=0.3",
            "skip.seed=4",
            "skip.importance.least=0.2",
            "skip.importance.warm_up=7",
            "skip.guard.every=0",
        ],
    )
    random = load_config(
        None, ["skip.policy=random_drop", "skip.weighted=true", "skip.refill=false", "seed=2"]
    )

    assert importance.skip.settings(1) == Importance(0.3, 0.2, 4, warm_up=7, guard=None)
    assert random.skip.settings(2) == RandomDrop(0.2, 2, weighted=True, refill=False)


def test_random_samples_are_dropped_with_any_embeddings():
    config = load_config(None, ["skip.policy=random_drop", "skip.seed=3", "embeddings=torch"])

    assert not config.skip.needs_rows
