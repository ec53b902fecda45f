"""The processes that train a run together: `Processes` for one, or `Ranks` under `torchrun`.

The trainer is the same for both. What differs is here: who reads which samples, who has which rows,
whose files are the run's, and what the processes tell each other after a step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.train.checkpoint import load_checkpoint
from recsys.train.loop.resume import reopened
from recsys.train.loop.run_checkpoints import RunCheckpoints
from recsys.train.parts.build import build_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recsys.batch import Batch, SampleSource
    from recsys.config import TrainConfig
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.train.loop.resume import Reopened
    from recsys.train.run_folder import RunFolder

__all__ = ["BuiltModel", "Processes"]


class BuiltModel(NamedTuple):
    """A model to train.

    Attributes:
        train_model: Maps a mini-batch to (loss, (loss, logits, labels)).
        saved: The model with the rows of this process, by the keys of a plain model: what
            checkpoints save.
        optimizers: Of the dense part, then of the rows.
    """

    train_model: nn.Module
    saved: nn.Module
    optimizers: list[Optimizer]


class Processes:
    """The processes of one run, seen by one of them: here this one alone, in `Ranks` several.

    Some methods are collectives: every process must call them, in the same order.

    Args:
        run_dir: The folder of the run.

    Attributes:
        num_ranks: How many there are.
        rank: The number of this one. The first, 0, writes the run folder.
        run_dir: The folder of the run.
        own_dir: Where this process writes its files: the run folder, or one that is deleted.
    """

    num_ranks, rank = 1, 0

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = self.own_dir = run_dir

    def require_same(self, given: Mapping[str, Any]) -> None:
        """Check that all processes were given the same. A collective.

        Args:
            given: Values by their names, as a message has them.

        Raises:
            ConfigError: a value differs; all raise.
        """

    def warnings_once(self) -> AbstractContextManager[None]:
        """Warnings in the `with` block are the same on all processes: only the first warns."""
        return nullcontext()

    def num_threads(self, config: TrainConfig) -> int:
        """The threads of this process; 0 as in `set_num_threads`."""
        return config.num_threads

    def require(self, config: TrainConfig, source: SampleSource) -> None:
        """Check that the configuration can be trained by these processes.

        Raises:
            ConfigError: it cannot.
        """

    def reopened(
        self, config: TrainConfig, number: int | None
    ) -> AbstractContextManager[Reopened | None]:
        """Open the run to continue; see `reopened` of `recsys.train.loop.resume`. A collective."""
        return reopened(config, self.own_dir, number)

    def build_model(
        self, config: TrainConfig, source: SampleSource, plan: HotPlan | None
    ) -> BuiltModel:
        """Build the model. A collective; errors as for `recsys.train.parts.build.build_model`."""
        model, optimizers = build_model(config, source, plan)
        return BuiltModel(model, model.model, optimizers)

    def restore(self, folder: RunFolder, earlier: Reopened, model: BuiltModel) -> Any:
        """Restore the rows of this process from the checkpoint of a run to continue.

        Returns:
            The state of the run.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        return load_checkpoint(
            folder.checkpoints_folder,
            model=model.saved,
            optimizers=model.optimizers,
            number=earlier.saved,
        )

    def checkpoints(
        self, config: TrainConfig, folder: RunFolder, model: BuiltModel, earlier: Reopened | None
    ) -> RunCheckpoints | None:
        """What writes the checkpoints of the run; None if it writes none. A collective."""
        if not config.checkpoint.is_on:
            return None
        return RunCheckpoints(
            config.checkpoint,
            folder.checkpoints_folder,
            model.saved,
            model.optimizers,
            None if earlier is None else earlier.saved,
        )

    def gather_step(
        self, most: int, batch: Batch, loss: Tensor, logits: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a mini-batch of all processes, and its samples. A collective.

        Args:
            most: The most samples that a process has; the same on all.
            batch: This process's part.
            loss: The mean over its samples, detached, as are the others.
            logits: Predictions of its samples.
            labels: Labels of its samples.

        Shape:
            loss (); logits (b,); labels (b,). Results the same with B, the samples of all
            processes, process after process.

        Raises:
            TrainingDiverged: the loss of one of several processes is not finite; all raise.
        """
        return loss, logits, labels

    def gather_scores(
        self, most: int, scores: NDArray[np.float32], labels: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """The scores and labels of a mini-batch of all processes. A collective.

        Args:
            most: The most samples that a process has; the same on all.
            scores: Scores of this process's samples.
            labels: Their labels.

        Shape:
            scores (b,); labels (b,); results (B,).
        """
        return scores, labels

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether a process has set it. A collective."""
        return flags

    def save_model(self, folder: RunFolder, model: BuiltModel) -> None:
        """Write the file of the model with all of its rows. A collective.

        Raises:
            OSError: the disk is full, or the folder no longer exists.
        """
        folder.save_model(model.saved)

    def describe(self) -> dict[str, Any] | None:
        """For the run record; None for one process."""
        return None
