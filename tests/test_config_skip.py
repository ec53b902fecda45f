from dataclasses import MISSING, fields

import pytest

from recsys.config import (
    GuardConfig,
    ImportanceConfig,
    PaperConfig,
    SkipConfig,
    StalenessConfig,
    TrainConfig,
    load_config,
    to_toml,
)
from recsys.embeddings.staleness.settings import Staleness
from recsys.errors import ConfigError
from recsys.pipeline import Importance, RandomDrop
from recsys.pipeline.skip.guard import Guard
from recsys.pipeline.skip.paper import Paper
from recsys.train.parts.skip_policy import skip_policy

DROP = "skip.policy=drop_input"
FAE = ("schedule.name=fae", "schedule.rate=100", "schedule.adaptive=false", "budget=1MiB")


def test_nothing_is_skipped_by_default():
    config = TrainConfig()

    assert config.skip.policy == "none"
    assert not config.skip.is_on


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
    own = {each.name: each.default for each in fields(keys)}

    assert MISSING not in own.values()
    if settings is Staleness:
        library["threshold"] = library["threshold"] or 0.0
    assert own == library


def test_keys_become_settings():
    config = load_config(
        None,
        [
            DROP,
            "skip.staleness.window=200",
            "skip.staleness.patience=3",
            "skip.guard.every=300",
            "skip.guard.auc=0.01",
        ],
    )

    assert config.skip.staleness.settings() == Staleness(window=200, patience=3)
    assert config.skip.guard.settings() == Guard(every=300, auc=0.01)
    assert SkipConfig().staleness.settings() == Staleness()
    assert GuardConfig(every=0).settings() is None
    fixed = load_config(None, [DROP, "skip.guard.every=0", "skip.staleness.threshold=0.5"])
    assert fixed.skip.staleness.settings() == Staleness(threshold=0.5)
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

    assert skip_policy(importance) == Importance(0.3, 0.2, 4, warm_up=7, guard=None)
    assert skip_policy(random) == RandomDrop(0.2, 2, weighted=True, refill=False)


def test_what_is_written_is_what_was_read(tmp_path):
    config = load_config(None, [DROP, "skip.guard.every=1500", "skip.share=0.4"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))

    assert load_config(file) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["skip.policy=drop"], "skip.policy must be one of 'none', 'observe'"),
        (["skip.share=0.3"], r"skip\.share means nothing with policy 'none'; set policy to 'obs"),
        ([DROP, "skip.keep=0.5"], r"skip\.keep means nothing with policy 'drop_input'; .*'subs"),
        ([DROP, "skip.seed=1"], r"skip\.seed means nothing .*'subsample'"),
        (["skip.policy=observe", "skip.guard.auc=0.1"], r"skip\.guard\.auc means nothing with"),
        (
            ["skip.policy=random_drop", "skip.staleness.patience=3"],
            r"skip\.staleness\.patience means nothing with policy 'random_drop'",
        ),
        ([DROP, "skip.paper.target=0.1"], r"skip\.paper\.target means nothing .*'paper'"),
        (["skip.policy=paper", *FAE, "skip.share=0.3"], r"skip\.share means nothing"),
        (
            [DROP, "skip.guard.every=0", "skip.guard.steps=60"],
            r"skip\.guard\.steps means nothing with every 0, got 60",
        ),
        ([DROP, "skip.guard.every=81"], r"skip\.guard\.every must be at least steps \+ 32"),
        ([DROP, "skip.guard.steps=2"], r"skip\.guard\.steps must be at least 10, got 2"),
        ([DROP, "skip.staleness.measure=x"], r"skip\.staleness\.measure must be one of"),
        ([DROP, "skip.staleness.window=32"], r"skip\.staleness\.window must be at least 33"),
        (
            [DROP, "skip.staleness.window=40", "skip.staleness.min_updates=41"],
            r"skip\.staleness\.min_updates must be at most window",
        ),
        ([DROP, "skip.importance.lr=0.1"], r"skip\.importance\.lr means nothing .*'importance'"),
        ([DROP, "skip.weighted=true"], r"skip\.weighted means nothing .*'random_drop'"),
        (["skip.policy=importance", "skip.importance.bits=30"], r"bits must be in \[8, 24\]"),
        (
            ["skip.policy=importance", "skip.share=0.8", "skip.importance.least=0.5"],
            r"skip\.share must be at most 1 - importance\.least: .* 0\.8 and least 0\.5",
        ),
        (
            ["skip.policy=importance", "embeddings=torch"],
            r"skip\.policy 'importance' is for embeddings 'recsys', got",
        ),
        (
            [DROP, "skip.share=0.3", "skip.staleness.threshold=0.5"],
            r"skip\.share means nothing with staleness\.threshold.* 0\.3 and threshold 0\.5; drop",
        ),
        (
            [DROP, "skip.staleness.threshold=0.5"],
            r"skip\.staleness\.threshold means that a guard cannot lower share; set guard\.every",
        ),
        (
            [DROP, "skip.guard.every=500"],
            r"skip\.guard\.every must be at least staleness\.window, .* every 500 and window 1000",
        ),
        (
            ["skip.policy=paper", *FAE, "skip.share=0.4"],
            r"skip\.share means nothing with policy 'paper'; set paper\.target, or drop the key",
        ),
        ([DROP, "skip.share=1"], r"skip\.share must be in \(0, 0.95\], got 1"),
        (
            ["skip.policy=subsample", "skip.share=0.8"],
            r"skip\.share must be at most 1 - keep: .* got share 0.8 and keep 0.25",
        ),
        (
            ["skip.policy=paper", *FAE, "skip.paper.first_threshold=0.2"],
            r"skip\.paper\.thresholds must be 0 < first_threshold < highest_threshold",
        ),
        ([DROP, "embeddings=torch"], r"skip\.policy 'drop_input' is for embeddings 'recsys', got"),
        ([DROP, "schedule.name=fae"], r"skip\.policy 'drop_input' does not go with .*'fae'"),
        (["skip.policy=paper"], r"skip\.policy 'paper' trains on all cold and then .* to false"),
        (["skip.policy=paper", "schedule.name=fae"], r"skip\.policy 'paper' trains on all cold"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


def test_random_samples_are_dropped_with_any_embeddings():
    config = load_config(None, ["skip.policy=random_drop", "skip.seed=3", "embeddings=torch"])

    assert config.skip.is_on
    assert not config.skip.needs_rows
