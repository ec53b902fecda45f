"""Random configurations of `recsys train`, small enough to train in a second."""

import random
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import NamedTuple

_USER, _ITEM = ("user", "user"), ("item", "item")
_TAGS, _HISTORY = ("tags", "tag", "multi"), ("history", "item", "sequence")
FEATURES = {
    "one row each": (_USER, _ITEM),
    "bags": (_USER, _TAGS, _ITEM),
    "a history": (_USER, _TAGS, _ITEM, _HISTORY),
}
_MODELS = {
    "dlrm": ("model.name=dlrm",),
    "masked transformer": (
        "model.interaction=masked_transformer",
        "model.interaction.masked_transformer.kept=2",
        "model.interaction.masked_transformer.num_heads=2",
    ),
    "dcn_v2": ("model.name=dcn_v2", "model.dcn_v2.low_rank_dim=3", "model.dcn_v2.num_layers=2"),
    "deepfm": ("model.name=deepfm",),
}
_MODELS_OF_HISTORIES = {
    "din": ("model.name=din", "model.din.attention=[6]"),
    "tbsm": ("model.name=tbsm", "model.tbsm.num_steps=3", "model.tbsm.tower=[6, 5]"),
}
_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
_OPTIMIZERS_OF_ONE = (*_OPTIMIZERS, "adam", "partial_rowwise_adam")
_SCHEDULES = ("sequential", "lookahead", "lookahead")
_SCHEDULES_OF_ONE = (*_SCHEDULES, "hotline", "fae")
_JUDGE_ROWS = ("observe", "drop_input", "freeze_rows", "subsample")
_HAVE_GUARDS = ("drop_input", "freeze_rows", "subsample", "importance")


class RandomRun(NamedTuple):
    """A configuration, without its budget.

    Attributes:
        features: A key of `FEATURES`; None for synthetic data.
        num_samples: Of the store.
        settings: Of the model, the optimizer and the mini-batches; they change the numbers.
        schedule: When rows are fetched, and where they lie.
        changes_order: Whether the schedule may put samples in another order.
    """

    features: str | None
    num_samples: int
    settings: tuple[str, ...]
    schedule: tuple[str, ...]
    changes_order: bool


def draw_run(seed: int, num_ranks: int = 1) -> RandomRun:
    """Draw a configuration that so many processes can train, and any number that divides it."""
    draw, is_one = random.Random(seed), num_ranks == 1
    features = draw.choice([None, None, *FEATURES])
    num_samples = draw.randint(300, 900)
    models = _MODELS | (_MODELS_OF_HISTORIES if is_one and features == "a history" else {})
    model, dim = draw.choice(list(models)), draw.choice([2, 4, 8, 12, 16])
    optimizer = draw.choice(_OPTIMIZERS_OF_ONE if is_one else _OPTIMIZERS)
    lr = draw.choice([0.1, 0.02])
    batch_size = num_ranks * ceil(draw.choice([8, 16, 33, 64]) / num_ranks)
    while 0 < (num_samples - num_samples // 7) % batch_size < num_ranks:
        num_samples += 1  # the last mini-batch has a sample for each process
    settings = [
        *models[model],
        *(f"model.embedding_dim={dim}", f"model.dense_arch=[8, {dim}]", "model.over_arch=[8, 1]"),
        *(f"optimizer.name={optimizer}", f"optimizer.lr={lr}"),
        *(f"batch_size={batch_size}", f"epochs={draw.choice([1, 1, 2])}"),
        *(f"seed={draw.randint(0, 9)}", "num_threads=1"),
        *("checkpoint.every_seconds=0", f"checkpoint.every_steps={draw.randint(2, 9)}"),
    ]
    if features is None:
        sizes = [draw.choice([1, 7, 30, 500, 900]) for _ in range(draw.randint(2, 6))]
        settings += [f"synthetic.num_samples={num_samples}", f"synthetic.table_sizes={sizes}"]
    elif features != "one row each" and model in _MODELS and draw.random() < 0.4:
        settings += ["model.pooling.tag=mean"]
    if draw.random() < 0.3:
        name = draw.choice(["sgd", "adagrad", "adam"])
        settings += [f"dense_optimizer.name={name}", "dense_optimizer.lr=0.02"]
    if draw.random() < 0.3:
        decay = draw.choice(["none", "linear", "cosine"])
        settings += [
            f"lr_schedule.warmup_steps={draw.randint(1, 15)}",
            f"lr_schedule.decay={decay}",
        ]
    if not is_one:
        settings += [f"eval.batch_size={num_ranks * draw.choice([3, 50])}"]
    if draw.random() < 0.4:
        settings += [f"eval.every_steps={draw.randint(8, 30)}"]
        settings += ["early_stopping.patience=1"] * (draw.random() < 0.4)
    schedule = [f"cold_tier={draw.choice(['host', 'host', 'file'])}"]
    name = draw.choice(_SCHEDULES_OF_ONE if is_one else _SCHEDULES)
    schedule += [f"schedule={name}"]
    if name == "lookahead":
        schedule += [f"schedule.lookahead.depth={draw.randint(1, 5)}"]
    if name == "fae":
        schedule += [f"schedule.fae.rate={draw.choice([10, 20, 50])}"]
        schedule += [f"schedule.fae.adaptive={draw.choice(['true', 'false'])}"]
    else:
        settings += [f"shuffle={draw.choice(['true', 'true', 'false'])}"]
        settings += ["permutation_seed=1"] * (draw.random() < 0.2)
        settings += _draw_skipping(draw) if is_one else []
    changes_order = name in ("hotline", "fae")
    return RandomRun(features, num_samples, tuple(settings), tuple(schedule), changes_order)


def data_of(drawn: RandomRun, table_store: Callable[..., Path]) -> str:
    """The data of a configuration; `table_store` is the fixture."""
    if drawn.features is None:
        return "synthetic:criteo-kaggle"
    features = FEATURES[drawn.features]
    return str(table_store(num_samples=drawn.num_samples, features=features))


def _draw_skipping(draw: random.Random) -> list[str]:
    policy = draw.choice(["none"] * 4 + [*_JUDGE_ROWS, "importance", "random_drop"])
    if policy == "none":
        return []
    settings = [f"skip={policy}"]
    has_guard = policy in _HAVE_GUARDS and draw.random() < 0.5
    if has_guard:
        settings += [
            f"skip.{policy}.guard.every={draw.choice([45, 60])}",
            f"skip.{policy}.guard.steps=10",
        ]
    elif policy in _HAVE_GUARDS:
        settings += [f"skip.{policy}.guard.every=0"]
    if policy in _JUDGE_ROWS:
        settings += [f"skip.{policy}.staleness.max_rows={draw.choice([40, 200])}"]
        settings += [f"skip.{policy}.staleness.window={draw.choice([33, 40])}"]
        settings += [f"skip.{policy}.staleness.{key}=1" for key in ("min_updates", "patience")]
        settings += [f"skip.{policy}.share={draw.choice([0.1, 0.3, 0.5])}"]
    if policy == "importance":
        settings += ["skip.importance.warm_up=5"]
    if policy == "random_drop" and draw.random() < 0.3:
        settings += ["skip.random_drop.refill=false"]
    return settings
