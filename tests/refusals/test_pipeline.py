"""What schedules, policies and mini-batches refuse: the error, and the name that it gives."""

import numpy as np
import pytest
import torch

from recsys.batch import Batch, JaggedIds
from recsys.config import load_config
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.errors import ConfigError
from recsys.pipeline import (
    FAE,
    Auto,
    DropInput,
    Guard,
    HotColdLoader,
    Hotline,
    Importance,
    LookAhead,
    Paper,
    RandomDrop,
    Sequential,
    Subsample,
    TrainPipeline,
)


class Numbered:
    """A source whose samples are their numbers."""

    num_samples, fingerprint = 210, "numbers"

    def __init__(self, num_train):
        self.splits = {"train": range(num_train), "test": range(0), "validation": range(0)}


def train_by(**settings):
    TrainPipeline(torch.nn.Linear(1, 1), None, **settings)


def load_hot(is_hot, num_train=None, **settings):
    source = Numbered(len(is_hot) if num_train is None else num_train)
    return HotColdLoader(
        source, "train", is_hot=np.array(is_hot), fae=FAE(), **({"batch_size": 7} | settings)
    )


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
    pipeline = TrainPipeline(LossOfEachSample(), None, schedule=Hotline(learning_steps=1))
    for rows in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 8, 9]):
        ids = JaggedIds.from_one_hot(["user"], torch.tensor([rows]))
        pipeline.progress(iter([Batch(torch.zeros(4, 0), ids, torch.zeros(4))]))


REFUSALS = [
    ("hotline, a loss of each sample", train_by_hotline, ValueError, "loss"),
    ("hotline with a depth", lambda: Hotline(depth=2), TypeError, "depth"),
    (
        "hotline with a depth, by its key",
        lambda: load_config(None, ["schedule.hotline.depth=2"], data="store"),
        ConfigError,
        "depth",
    ),
    ("a class as a schedule", lambda: train_by(schedule=LookAhead), TypeError, "schedule"),
    ("a name as a schedule", lambda: train_by(schedule="lookahead"), TypeError, "schedule"),
    ("a depth as a schedule", lambda: train_by(schedule=2), TypeError, "schedule"),
    ("no samples in a batch", lambda: train_by(batch_size=0), ConfigError, "batch_size"),
    ("a negative batch size", lambda: train_by(batch_size=-16), ConfigError, "batch_size"),
    ("a broken batch size", lambda: train_by(batch_size=16.5), ConfigError, "batch_size"),
    ("a text as a batch size", lambda: train_by(batch_size="16"), ConfigError, "batch_size"),
    ("a truth as a batch size", lambda: train_by(batch_size=True), ConfigError, "batch_size"),
    ("a name as a policy", lambda: train_by(skip="drop_input"), TypeError, "skip"),
    ("a depth of 0", lambda: LookAhead(0), ValueError, "depth"),
    ("a negative depth", lambda: LookAhead(-1), ValueError, "depth"),
    ("a broken depth", lambda: LookAhead(1.5), ValueError, "depth"),
    ("a truth as a depth", lambda: LookAhead(True), ValueError, "depth"),
    ("broken steps", lambda: Hotline(learning_steps=0.5), ValueError, "learning_steps"),
    ("more than all pinned", lambda: Hotline(pinned_share=1.5), ValueError, "pinned_share"),
    ("a text of a share", lambda: Hotline(pinned_share="0.5"), ValueError, "pinned_share"),
    ("no candidates", lambda: Auto(candidates=()), ValueError, "candidates"),
    ("other numbers", lambda: Auto(candidates=(Hotline(),)), ValueError, "numbers"),
    ("one twice", lambda: Auto(candidates=(Sequential(),) * 2), ValueError, "candidates"),
    ("turns of no step", lambda: Auto(steps_per_turn=0), ValueError, "steps_per_turn"),
    ("broken rounds", lambda: Auto(num_rounds=1.0), ValueError, "num_rounds"),
    ("a rate of 0", lambda: FAE(rate=0), ConfigError, "rate"),
    ("a rate of 101", lambda: FAE(rate=101, max_rate=101), ConfigError, "rate"),
    ("rates in disorder", lambda: FAE(min_rate=60), ConfigError, "rate"),
    ("no patience", lambda: FAE(patience=0), ConfigError, "patience"),
    ("a factor of 1", lambda: FAE(factor=1.0), ConfigError, "factor"),
    ("an endless factor", lambda: FAE(factor=float("inf")), ConfigError, "factor"),
    ("broken patience", lambda: FAE(patience=2.5), ConfigError, "patience"),
    ("a truth as patience", lambda: FAE(patience=True), ConfigError, "patience"),
    ("a truth as a rate", lambda: FAE(rate=True), ConfigError, "rate"),
    ("adaptive by number", lambda: FAE(is_adaptive=1), ConfigError, "is_adaptive"),
    ("hot, of other samples", lambda: load_hot([True] * 5, 20), ConfigError, "(5,)"),
    ("hot by numbers", lambda: load_hot([1, 0, 1]), ConfigError, "is_hot"),
    ("hot, no batch", lambda: load_hot([True], batch_size=0), ConfigError, "batch_size"),
    ("hot, 2.5 a batch", lambda: load_hot([True], batch_size=2.5), ConfigError, "batch_size"),
    ("hot, a truth a batch", lambda: load_hot([True], batch_size=True), ConfigError, "batch_size"),
    ("hot, none ahead", lambda: load_hot([True], prefetch=0), ConfigError, "prefetch"),
    ("hot, 1.5 ahead", lambda: load_hot([True], prefetch=1.5), ConfigError, "prefetch"),
    ("hot, a seed below 0", lambda: load_hot([True], seed=-1), ConfigError, "seed"),
    ("hot, a broken seed", lambda: load_hot([True], seed=0.5), ConfigError, "seed"),
    ("a share of 1", lambda: DropInput(1.0), ConfigError, "share"),
    ("a share of 0", lambda: DropInput(0), ConfigError, "share"),
    (
        "a guard within a window",
        lambda: Subsample(guard=Guard(every=999)),
        ConfigError,
        "guard.every",
    ),
    ("a broken step", lambda: Paper(first_snapshot=1.5), ConfigError, "first_snapshot"),
    ("a text as a target", lambda: Paper(target="0.3"), ConfigError, "target"),
    ("a negative target", lambda: Paper(target=-0.1), ConfigError, "target"),
    ("no number", lambda: Paper(sample_share=float("nan")), ConfigError, "sample_share"),
    ("a first of 0.1", lambda: Paper(first_threshold=0.1), ConfigError, "first_threshold"),
    ("a step below 0", lambda: Paper(first_snapshot=-1), ConfigError, "first_snapshot"),
    ("a truth as a share", lambda: RandomDrop(True), ConfigError, "share"),
    ("a huge share", lambda: RandomDrop(10**400), ConfigError, "share"),
    ("a negative seed", lambda: RandomDrop(0.2, -1), ConfigError, "seed"),
    ("nothing kept", lambda: Subsample(0.2, 0.0), ConfigError, "keep"),
    ("more than is left", lambda: Subsample(0.5, 0.6), ConfigError, "share"),
    ("all left out", lambda: Importance(1.0), ConfigError, "share"),
    ("more than least", lambda: Importance(0.8, 0.3), ConfigError, "share"),
    ("a least of 0", lambda: Importance(least=0), ConfigError, "least"),
    ("30 bits", lambda: Importance(bits=30), ConfigError, "bits"),
    ("a rate of nothing", lambda: Importance(lr=0.0), ConfigError, "lr"),
    ("negative warm_up", lambda: Importance(warm_up=-1), ConfigError, "warm_up"),
    ("every 81", lambda: Guard(every=81), ConfigError, "every"),
    ("every 1000.0", lambda: Guard(every=1000.0), ConfigError, "every"),
    ("9 steps", lambda: Guard(steps=9), ConfigError, "steps"),
    ("True steps", lambda: Guard(steps=True), ConfigError, "steps"),
    ("no logloss", lambda: Guard(logloss=0), ConfigError, "logloss"),
    ("calibration by text", lambda: Guard(calibration="0.1"), ConfigError, "calibration"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)


STATES = [
    ({"more": 1}, "keys"),
    ({"is_hot": load_hot([False, True] * 10).state_dict()["is_hot"]}, "is_hot"),
    ({"seed": 1}, "seed"),
    ({"batch_size": True}, "batch_size"),
]


@pytest.mark.parametrize(("change", "name"), STATES)
def test_a_malformed_state_is_refused_by_name_and_changes_nothing(change, name):
    loader = load_hot([True, False] * 10)
    before = loader.state_dict()

    with pytest.raises(ConfigError) as raised:
        loader.load_state_dict(before | change)

    assert name in str(raised.value)
    assert loader.state_dict() == before
