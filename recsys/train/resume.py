"""What a run continues from, and what may differ when it does.

A run continues from a checkpoint, to the exact next sample. `_require_same_run` says which keys of
its configuration must stay: those that decide its numbers. Where rows lie, when they are fetched,
and what is measured and saved may change; each key has its marker in `recsys/config.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.files import alone_in, as_argument
from recsys.config import (
    TrainConfig,
    describe_config,
    flat,
    load_config,
    put_key,
    read_tree,
    walk_keys,
)
from recsys.errors import AlreadyExists, ConfigError, refuse
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from pathlib import Path

__all__ = ["Reopened", "config_of_run", "reopened"]


class Reopened(NamedTuple):
    """A run to continue.

    Attributes:
        saved: The number of the checkpoint to continue from; None to start from the first sample.
        record: Its record, if it is finished and nothing is left to do.
    """

    saved: int | None
    record: dict[str, Any] | None


def reopened(
    config: TrainConfig, run_dir: Path, number: int | None, stack: ExitStack
) -> Reopened | None:
    """Open and lock the folder of a run, and check that it can continue with a configuration.

    Nothing is written to the folder.

    Args:
        config: The configuration to continue with.
        run_dir: The folder.
        number: The checkpoint to continue from; None for the newest complete one.
        stack: Is closed after the run; unlocks the folder.

    Returns:
        The run; None if the folder is new or empty.

    Raises:
        AlreadyExists: a finished run has no checkpoint to continue from.
        ConfigError: the folder is not of a run, or in use; the configuration does not fit the run;
            or `number` is given and the folder is new.
        StoreError: there is no data.
    """
    if RunFolder.is_new(run_dir) and number is None:
        sys.stderr.write(f"{run_dir} is new: training starts from the first sample\n")
        return None
    from recsys.train.checkpoint import newest  # imports PyTorch

    folder = RunFolder.open(run_dir)
    stack.enter_context(alone_in(run_dir, "recsys train"))
    before = load_config(folder.config_file)
    _require_same_run(run_dir, before, config)
    if config.data == before.data:
        folder.require_data(config.data)
    record = folder.read_record() if folder.record_file.is_file() else {}
    is_finished = record.get("status") == "finished"
    has_model = folder.model_file.is_file() or not config.save_model
    if is_finished and has_model and number is None and config.epochs == before.epochs:
        sys.stderr.write(
            f"{run_dir} is finished; to train more, set epochs above {before.epochs}\n"
        )
        return Reopened(None, record)
    saved = newest(folder.checkpoints_folder) if number is None else number
    if saved is None and is_finished:
        raise AlreadyExists(
            f"{run_dir} is finished and has no checkpoint to continue from: none could be written, "
            "or it was shorter than checkpoint.every_seconds and checkpoint.every_steps was not "
            "set; choose another folder with --run to train from the first sample"
        )
    if saved is None:
        sys.stderr.write(
            f"{run_dir} has no complete checkpoint: training starts from the first sample\n"
        )
    return Reopened(saved, None)


def _require_same_run(run_dir: Path, before: TrainConfig, config: TrainConfig) -> None:
    """Check that a run can continue with another configuration.

    Raises:
        ConfigError: a key differs that decides the numbers of the run.
    """
    old, new = (
        {"schedule": of.schedule.kind, "skip": of.skip.kind} | flat(describe_config(of))
        for of in (before, config)
    )
    is_fae = "fae" in (before.schedule.kind, config.schedule.kind)
    markers = {key.name: key.resume for key in walk_keys(TrainConfig)}
    for key in old | new:  # tables such as model.pooling may have a key in one of them alone
        marker = markers.get(key, "fixed")
        is_free = marker == "free" or (marker != "fixed" and not is_fae)
        if old.get(key) != new.get(key) and not is_free:
            why = "" if marker == "fixed" else " and schedule 'fae'"
            raise ConfigError(
                f"{run_dir} cannot continue with {key} {new.get(key)!r}: it was trained with "
                f"{old.get(key)!r}{why}; leave {key} as it was, or train a new run in another "
                "folder"
            )
    refuse(
        (
            config.epochs < before.epochs,
            f"{run_dir} cannot continue with epochs {config.epochs}: it was trained with "
            f"{before.epochs}; epochs may only become more",
        )
    )


def config_of_run(
    run_dir: Path, file: Path | None, settings: Sequence[str], data: str | None, *, resume: bool
) -> TrainConfig:
    """The configuration of a run, new or to be continued.

    One to be continued has its own, with some keys changed. Another schedule replaces the one that
    it had, with its keys; `cold_tier` "host" resets `cold_path`, and `early_stopping.patience` 0
    resets the other keys of early stopping.

    Args:
        run_dir: The folder of the run; new, or with `config.toml`.
        file: A TOML file with keys to set.
        settings: As for `load_config`; they win over the file.
        data: The key `data`; None to leave it.
        resume: Continue the run in the folder, if there is one.

    Raises:
        ConfigError: a key is unknown, a value is not what the key accepts, or nothing names the
            data.
    """
    stored = RunFolder(run_dir).config_file
    values = {} if data is None else {"data": data}
    if not (resume and stored.is_file()):
        config = load_config(file, settings, **values)
        is_missing = "data" not in config.model_fields_set
        refuse(
            (
                resume and is_missing,
                f"{run_dir} has no run to continue; name the data to start one: recsys train STORE "
                f"--run {as_argument(run_dir)} --resume",
            ),
            (is_missing, "data is missing; name a store, or synthetic:criteo-kaggle"),
        )
        return config
    tree, changes = read_tree(stored), flat(read_tree(file, settings, **values))
    if changes.get("cold_tier") == "host":
        tree.pop("cold_path", None)
    if changes.get("early_stopping.patience") == 0:
        tree.pop("early_stopping", None)
    for name, value in changes.items():
        put_key(tree, name, value)
    try:
        return TrainConfig(**tree)
    except ConfigError as error:
        locations = [stored, *filter(None, [file]), *settings]
        raise ConfigError(f"{' with '.join(map(str, locations))}: {error}") from None
