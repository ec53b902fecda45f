"""Reopens the folder of a run that was interrupted, killed or finished, to continue it.

A run continues from a checkpoint, to the exact next sample. What decides its numbers must stay as
it was; where rows lie, when they are fetched, and what is measured and saved may change.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.files import alone_in, as_argument
from recsys.config import (
    TrainConfig,
    build_from_file,
    describe_config,
    flat,
    load_config,
    put_key,
    read_tree,
    walk_keys,
)
from recsys.errors import AlreadyExists, CheckpointError, ConfigError
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Reopened", "reopened", "resumed_config"]


class Reopened(NamedTuple):
    """A run to continue.

    Attributes:
        folder: Its folder.
        config: The configuration that it had.
        saved: The number of the checkpoint to continue from; None to start from the first sample.
        record: Its record, if it is finished and nothing is left to do.
    """

    folder: RunFolder
    config: TrainConfig
    saved: int | None
    record: dict[str, Any] | None


@contextmanager
def reopened(config: TrainConfig, run_dir: Path, number: int | None) -> Iterator[Reopened | None]:
    """Open and lock the folder of a run, and check that it can continue with a configuration.

    Nothing is written to the folder.

    Args:
        config: The configuration to continue with.
        run_dir: The folder.
        number: The checkpoint to continue from; None for the newest complete one.

    Yields:
        The run; None if the folder is new or empty.

    Raises:
        AlreadyExists: a finished run has no checkpoint to continue from.
        CheckpointError: a checkpoint cannot be read.
        ConfigError: the folder is not of a run, or in use; the configuration or its data does not
            fit the run; or `number` is given and the folder is new or nothing is left to do.
        StoreError: there is no data.
    """
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        if number is not None:
            raise ConfigError(f"{run_dir} is new and has no checkpoint {number}; name another run")
        _say(f"{run_dir} is new: training starts from the first sample")
        yield None
        return

    folder = RunFolder.open(run_dir)
    with alone_in(run_dir, "recsys train"):
        before = folder.read_config()
        _require_same_run(folder, before, config)
        if config.data == before.data:
            folder.require_data(config.data)
        record = folder.read_record() if folder.record_file.is_file() else None
        if record is not None:
            _require_same_data(folder, record["data"].get("fingerprint"), config)
        is_finished = record is not None and record["status"] == "finished"
        lacks_model = config.save_model and not folder.model_file.is_file()
        if is_finished and config.epochs == before.epochs and not lacks_model:
            if number is not None:
                raise ConfigError(
                    f"{run_dir} is finished, so it does not continue from checkpoint {number}; "
                    f"leave out --checkpoint, or set epochs above {before.epochs}"
                )
            _say(f"{run_dir} is finished; to train more, set epochs above {before.epochs}")
            yield Reopened(folder, before, None, record)
            return
        from recsys.train.checkpoint import newest  # imports PyTorch

        if (run_dir / "shards").is_dir():
            raise CheckpointError(
                f"{run_dir / 'shards'}: an older recsys wrote these checkpoints; continue the run "
                "with that one, or train from the start in another folder"
            )
        saved = newest(folder.checkpoints_folder) if number is None else number
        if saved is None:
            if is_finished:
                raise AlreadyExists(
                    f"{run_dir} is finished and has no checkpoint to continue from: none could be "
                    "written, or it was shorter than checkpoint.every_seconds and "
                    "checkpoint.every_steps was not set; choose another folder with --run to train "
                    "from the first sample"
                )
            _say(f"{run_dir} has no complete checkpoint: training starts from the first sample")
        elif record is None:  # the run was killed
            _require_same_data(folder, _fingerprint_of(folder, saved), config)
        yield Reopened(folder, before, saved, None)


def resumed_config(
    run_dir: Path, file: Path | None, settings: Sequence[str], data: str | None
) -> TrainConfig:
    """The configuration of a run to continue: the one that it had, with some keys changed.

    Another schedule replaces the one that it had, with its keys; `cold_tier` "host" resets
    `cold_path`, and `early_stopping.patience` 0 resets the other keys of early stopping.

    Args:
        run_dir: The folder of the run; new, or with `config.toml`.
        file: A TOML file with keys to change.
        settings: As for `load_config`; they win over the file.
        data: The key `data`; None to leave it.

    Raises:
        ConfigError: a key is unknown, a value is not what the key accepts, or the folder is not of
            a run and `data` is None.
    """
    stored = RunFolder(run_dir).config_file
    values = {} if data is None else {"data": data}
    if not stored.is_file():
        if data is None:
            raise ConfigError(
                f"{run_dir} has no run to continue; name the data to start one: recsys train STORE "
                f"--run {as_argument(run_dir)} --resume"
            )
        return load_config(file, settings, **values)
    return build_from_file(lambda changes: _changed(stored, changes | values), file, settings)


def _changed(stored: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run with some of its keys changed."""
    tree, found = read_tree(stored), flat(changes)
    if found.get("cold_tier") == "host":
        tree.pop("cold_path", None)
    if found.get("early_stopping.patience") == 0:
        tree.pop("early_stopping", None)
    for name, value in found.items():
        put_key(tree, name, value)
    return TrainConfig(**tree)


def _require_same_run(folder: RunFolder, before: TrainConfig, config: TrainConfig) -> None:
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
        before_value, value, marker = old.get(key), new.get(key), markers.get(key, "fixed")
        if value == before_value or marker == "free" or (marker != "fixed" and not is_fae):
            continue
        why = "" if marker == "fixed" else " and schedule 'fae'"
        raise ConfigError(
            f"{folder.path} cannot continue with {key} {value!r}: it was trained with "
            f"{before_value!r}{why}; leave {key} as it was, or train a new run in another folder"
        )
    if config.epochs < before.epochs:
        raise ConfigError(
            f"{folder.path} cannot continue with epochs {config.epochs}: it was trained with "
            f"{before.epochs}; epochs may only become more"
        )


def _require_same_data(folder: RunFolder, known: Any, config: TrainConfig) -> None:
    """Check that the data of a configuration is that of a run.

    Args:
        folder: The folder of the run.
        known: The fingerprint of its data.
        config: The configuration.

    Raises:
        ConfigError: the fingerprint differs.
    """
    from recsys.train.build import open_source  # imports PyTorch

    found = open_source(config).fingerprint
    if found != known:
        raise ConfigError(
            f"{folder.path} was trained on other data: the fingerprint was {known!r} then and is "
            f"{found!r} now; name the data of the run, or go on with other data in a new run by "
            f"--set {as_argument(f'init_from={folder.path}')}"
        )


def _fingerprint_of(folder: RunFolder, saved: int) -> Any:
    """The fingerprint of the data of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    from recsys.train.checkpoint.contents import errors_of_state  # imports PyTorch
    from recsys.train.checkpoint.format import read_manifest, read_state

    place = folder.checkpoints_folder
    with errors_of_state():
        state = read_state(place, read_manifest(place, saved).deltas[0], is_mapped=True)
        return state["state"]["state"]["data"]


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
