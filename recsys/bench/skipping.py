"""`recsys bench skipping`: what following rows costs a training step.

    plain        trains
    plain_again  the same in another process: what one process differs from its equal
    observe      trains on the same mini-batches, follows rows, and counts what is stale
    drop_input   also classifies each sample before its step, but with a tiny share keeps all

So all four make the same steps. Each is in a process of its own. A round is one window of the
tracker, so each round has the work at a window's end exactly once. It is cut into ten turns,
because a machine that others use, too, changes its speed within seconds. Windows are shorter than
the default for large mini-batches, so this work counts for more than in a run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.machine import set_num_threads, tune_allocator
from recsys.bench.parts.harness import Row, ratio, rows_by_provider, take_turns
from recsys.bench.parts.worker import Worker, end_turn, freeze_garbage
from recsys.config import load_config
from recsys.embeddings.staleness.settings import LEAD, Staleness
from recsys.errors import ConfigError
from recsys.pipeline import DropInput, Observe, TrainPipeline
from recsys.train.parts.build import build_loader, build_model, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from recsys.pipeline.skip.policies import Policy

__all__ = ["bench_skipping"]

_SAMPLES_PER_WINDOW = 512_000
_MOST_WINDOW = 1000  # the default of `Staleness`
_TURNS_PER_WINDOW = 10
# So small that no row becomes stale: it is less than one of the samples that the threshold is
# found from.
_NO_SHARE = 1e-9
_PROVIDERS = ("plain", "plain_again", "observe", "drop_input")


def bench_skipping(
    batch_sizes: Sequence[int],
    *,
    num_rounds: int,
    table_sizes: Sequence[int] = (),
    samples_per_window: int = _SAMPLES_PER_WINDOW,
) -> Iterator[Row]:
    """Measure seconds per window of steps, and the ratios to plain training.

    Args:
        batch_sizes: The values of B.
        num_rounds: Windows of each provider.
        table_sizes: Rows per table; Kaggle's if empty.
        samples_per_window: Samples of a round, unless that is more than a default window.

    Raises:
        ConfigError: a batch size leaves no room for a window.
    """
    least_window = -(-(LEAD + 1) // _TURNS_PER_WINDOW) * _TURNS_PER_WINDOW
    largest = samples_per_window // least_window
    if max(batch_sizes) > largest:
        raise ConfigError(
            f"bench skipping: batch sizes must be at most {largest}, got {max(batch_sizes)}"
        )
    for batch_size in batch_sizes:
        window = min(_MOST_WINDOW, samples_per_window // batch_size)
        window -= window % _TURNS_PER_WINDOW
        case = f"B={batch_size},D=16,optimizer=adagrad,window={window}"
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(
                    Worker(name, case, _Trainer, name, batch_size, window, num_rounds, table_sizes)
                )
                for name in _PROVIDERS
            }
            for worker in workers.values():
                worker.wait()
            seconds = take_turns(
                {name: partial(worker.call, "turn") for name, worker in workers.items()},
                num_rounds * _TURNS_PER_WINDOW,
                num_warm_up_rounds=_TURNS_PER_WINDOW,
            )
        windows = {
            name: np.reshape(turns, (num_rounds, _TURNS_PER_WINDOW)).sum(1).tolist()
            for name, turns in seconds.items()
        }
        yield from rows_by_provider("skipping", case, "time", "s", windows)
        for name in _PROVIDERS[1:]:
            yield ratio(
                "skipping",
                case,
                name,
                "time_over_plain",
                values=windows["plain"],
                baseline=windows[name],
                is_by_round=True,
            )


class _Trainer:
    def __init__(
        self,
        name: str,
        batch_size: int,
        window: int,
        num_rounds: int,
        table_sizes: Sequence[int],
    ) -> None:
        set_num_threads(0)
        tune_allocator()
        self._window = window
        num_steps = window * (num_rounds + 3)
        config = load_config(
            batch_size=batch_size,
            optimizer={"name": "adagrad", "lr": 0.01},
            synthetic={
                "num_samples": 2 * batch_size * num_steps,
                "table_sizes": list(table_sizes),
            },
        )
        source = open_source(config)
        model, optimizers = build_model(config, source)
        model.train()
        self._loader = build_loader(config, source, None)
        self._batches: Any = iter(self._loader)
        self._pipeline = TrainPipeline(model, optimizers, skip=_policy(name, window))
        for _ in range(_TURNS_PER_WINDOW):
            self.turn()
        freeze_garbage()

    def turn(self) -> float:
        """Train for a tenth of a window; returns seconds."""
        begin = time.perf_counter()
        for _ in range(self._window // _TURNS_PER_WINDOW):
            self._pipeline.progress(self._batches)
        seconds = time.perf_counter() - begin
        self._loader.finish_reading()
        end_turn()
        return seconds


def _policy(name: str, window: int) -> Policy | None:
    staleness = Staleness(window=window)
    if name in ("plain", "plain_again"):
        return None
    if name == "observe":
        return Observe(staleness=staleness)
    return DropInput(share=_NO_SHARE, staleness=staleness, guard=None)
