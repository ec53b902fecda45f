from dataclasses import fields

import pytest

from recsys.config import (
    GuardConfig,
    ImportanceConfig,
    PaperConfig,
    StalenessConfig,
    TrainConfig,
    load_config,
)
from recsys.embeddings.staleness.settings import Staleness
from recsys.pipeline import DropInput, FreezeRows, Importance, Observe, RandomDrop, Subsample
from recsys.pipeline.skip.paper import Paper
from recsys.pipeline.skip.policies import Guard

FAE = ("schedule.fae.rate=100", "schedule.fae.adaptive=false", "budget=1MiB")


def policy_of(*settings):
    config = load_config(None, settings)
    return config.skip.settings(config.seed)


def test_nothing_is_skipped_by_default():
    skip = TrainConfig().skip

    assert skip.kind == "none"
    assert skip.settings(0) is None


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
    library = {each.name: each.default for each in fields(settings) if each.name != "guard"}
    own = {name: each.default for name, each in keys.model_fields.items() if name != "guard"}

    assert own == library


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("observe", Observe()),
        ("drop_input", DropInput()),
        ("freeze_rows", FreezeRows()),
        ("subsample", Subsample()),
        ("importance", Importance()),
        ("random_drop", RandomDrop()),
    ],
)
def test_a_kind_alone_is_the_policy_with_its_defaults(name, policy):
    assert policy_of(f"skip={name}") == policy


def test_keys_become_policies():
    assert policy_of(
        "skip.drop_input.staleness.window=200",
        "skip.drop_input.staleness.patience=3",
        "skip.drop_input.guard.every=300",
        "skip.drop_input.guard.logloss=0.1",
    ) == DropInput(staleness=Staleness(window=200, patience=3), guard=Guard(every=300, logloss=0.1))
    assert policy_of("skip.drop_input.guard.every=0") == DropInput(guard=None)
    assert policy_of("skip.paper.target=0.1", *FAE, "seed=3") == Paper(target=0.1, seed=3)
    assert policy_of(
        "skip.importance.share=0.3",
        "skip.importance.seed=4",
        "skip.importance.least=0.2",
        "skip.importance.warm_up=7",
        "skip.importance.guard.every=0",
    ) == Importance(0.3, 0.2, 4, warm_up=7, guard=None)
    assert policy_of(
        "skip.random_drop.weighted=true", "skip.random_drop.refill=false", "seed=2"
    ) == RandomDrop(0.2, 2, weighted=True, refill=False)


def test_the_last_policy_wins():
    assert policy_of("skip.drop_input.share=0.3", "skip=observe") == Observe()
    assert policy_of("skip=observe", "skip.observe.share=0.3") == Observe(share=0.3)
    assert policy_of("skip.observe.share=0.3", "skip=observe") == Observe(share=0.3)
    assert policy_of("skip=observe", "skip=none") is None
