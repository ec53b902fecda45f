"""`Callback`: the base class of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Callback"]


class Callback:
    """A run calls its methods while it trains. They do nothing: override those that you need.

    All are called between two steps, by the thread that trains; of several processes, on the first
    alone. Their time counts as the run's stage `other`, or as evaluation in `on_evaluation`. An
    error that one raises ends the run as `CallbackFailed`.
    """

    def on_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Before the first step.

        Args:
            run_dir: The folder of the run. It exists from now on.
            record: As in `run.json`, as far as it is known: `config`, `environment`, `data`,
                `resumed`, and `throughput`, whose `num_samples` is above 0 if the run continues.
        """

    def on_report(self, report: Mapping[str, Any]) -> None:
        """After a report on training; there are 100 in a run, or one each step.

        Args:
            report: The line of `history.jsonl`: `step`, `num_samples` seen so far, `train_loss`,
                `train_auc`, `samples_per_second` and more.
        """

    def on_evaluation(self, evaluation: Mapping[str, Any]) -> bool | None:
        """After an evaluation during training; the one after the last step is in the record.

        Args:
            evaluation: The line of `history.jsonl`: `step`, `num_samples`, and the metrics under
                the name of the split.

        Returns:
            True to end training after this step.
        """
        return None

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """After the step in which a checkpoint was found complete on the disk.

        Of several processes, once each of them has it, which they find out when they save the next.

        Args:
            checkpoint: Its `number`, and the `step` and `num_samples` after which it was saved.
        """

    def on_end(self, record: Mapping[str, Any]) -> None:
        """At the end of the run, after its files are written, if `on_start` has returned.

        Args:
            record: As in `run.json`. `status` is "finished", "interrupted", "diverged" or "failed".
        """

    def state_dict(self) -> dict[str, Any]:
        """What a run that continues from a checkpoint needs: JSON types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; called before `on_start`, unless the state is empty.

        Args:
            state: What `state_dict` returned.
        """
