"""The state of a run apart from its model and optimizers: where it is, and what it has counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys._support.files import as_argument
from recsys._support.states import SavedState
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from recsys._support.machine import Threads
    from recsys.batch.protocols import SampleSource
    from recsys.datasets.loader import BatchLoader
    from recsys.pipeline import TrainPipeline
    from recsys.pipeline.fae.hot_cold_loader import HotColdLoader
    from recsys.train.callbacks.run_callbacks import RunCallbacks
    from recsys.train.loop.progress import Progress
    from recsys.train.run_files.run_folder import RunFolder

__all__ = ["RunState", "require_fingerprint"]

_KEYS = (
    "data",
    "resumed",
    "history_bytes",
    "loader",
    "pipeline",
    "progress",
    "clock",
    "callbacks",
    "num_threads",
)


class RunState:
    """Collects the state of a run's parts for a checkpoint, and gives it back to them.

    Args:
        folder: The folder of the run.
        loader: The loader of the training split.
        pipeline: The pipeline, with the run's clock.
        progress: The run's counters.
        callbacks: The run's callbacks.
        threads: The threads that compute.

    Attributes:
        threads: The threads that compute. A resumed run keeps a number that was chosen for it:
            floats of the dense part may be summed in another order by another number.
        resumed: For each time that the run was continued from a checkpoint: the `step` it continued
            after, and the number of the `checkpoint`.
    """

    def __init__(
        self,
        folder: RunFolder,
        loader: BatchLoader | HotColdLoader,
        pipeline: TrainPipeline,
        progress: Progress,
        callbacks: RunCallbacks,
        threads: Threads,
    ) -> None:
        self.threads = threads
        self._folder, self._loader = folder, loader
        self._pipeline, self._progress, self._callbacks = pipeline, progress, callbacks
        self.resumed: list[dict[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps: JSON types, and tensors."""
        return {
            "data": self._loader.source.fingerprint,
            "resumed": list(self.resumed),
            "history_bytes": self._folder.history_bytes(),
            "loader": self._loader.state_dict(),
            "pipeline": self._pipeline.state_dict(),
            "progress": self._progress.state_dict(),
            "clock": self._pipeline.clock.state_dict(),
            "callbacks": self._callbacks.state_dict(),
            "num_threads": self.threads.num_threads,
        }

    def load_state_dict(self, state: Any, number: int) -> int:
        """Continue where `state` was saved; the model and its optimizers are restored already.

        Args:
            state: The state.
            number: The number of its checkpoint.

        Returns:
            The length in bytes that the history had.

        Raises:
            ConfigError: the state was saved with other data, or it is no state of a run.
        """
        found = SavedState(f"the run of checkpoint {number}", state, _KEYS)
        resumed = found["resumed"]
        require_fingerprint(self._folder.path, found["data"], self._loader.source)
        if not isinstance(resumed, list):
            raise found.error("resumed", "a list")
        entries = [SavedState("resumed", entry, ("step", "checkpoint")) for entry in resumed]
        history_bytes = found.whole("history_bytes")
        self._loader.load_state_dict(found["loader"])
        self._pipeline.load_state_dict(found["pipeline"])
        self._progress.load_state_dict(found["progress"])
        self._pipeline.clock.load_state_dict(found["clock"])
        self._callbacks.load_state_dict(found["callbacks"])
        num_threads = found.whole("num_threads")
        if self.threads.chosen_by == "free cores":
            num_threads = min(num_threads, self.threads.num_cores)
            torch.set_num_threads(num_threads)
            self.threads = self.threads._replace(
                num_threads=num_threads, chosen_by="the run so far"
            )
        self.resumed = [
            {key: entry.whole(key) for key in ("step", "checkpoint")} for entry in entries
        ]
        self.resumed.append({"step": self._progress.num_steps, "checkpoint": number})
        return history_bytes


def require_fingerprint(run_dir: Path, fingerprint: Any, source: SampleSource) -> None:
    """Check that data is what a run was trained on.

    Args:
        run_dir: The folder of the run.
        fingerprint: That of its data.
        source: The data to continue with.

    Raises:
        ConfigError: the fingerprints differ.
    """
    if fingerprint != source.fingerprint:
        raise ConfigError(
            f"{run_dir} was trained on other data: the fingerprint was {fingerprint!r} then and is "
            f"{source.fingerprint!r} now; name the data of the run, or go on with "
            f"other data in a new run by --set {as_argument(f'init_from={run_dir}')}"
        )
