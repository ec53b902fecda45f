"""What following rows costs a training step.

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

import gc
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import build_model, samples
from turns import (
    Row,
    Worker,
    bench_arguments,
    end_turn,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    take_turns,
)

from recsys import TrainPipeline
from recsys.datasets import BatchLoader
from recsys.embeddings import Adagrad, Staleness
from recsys.pipeline import DropInput, Observe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SAMPLES_PER_WINDOW = 512_000
_MOST_WINDOW = 1000  # the default of `Staleness`
_LEAST_WINDOW = 40  # a stale row changes 32 mini-batches later
_TURNS_PER_WINDOW = 10
# So small that no row becomes stale: it is less than one of the samples that the threshold is
# found from.
_NO_SHARE = 1e-9
_PROVIDERS = ("plain", "plain_again", "observe", "drop_input")


def bench_cost(
    batch_sizes: Sequence[int],
    *,
    num_rounds: int,
    table_sizes: Sequence[int],
    most_window: int,
) -> Iterator[Row]:
    """Measure seconds per window of steps, and the ratios to plain training.

    Args:
        batch_sizes: The values of B.
        num_rounds: Windows of each provider.
        table_sizes: Rows per table; Kaggle's if empty.
        most_window: The most steps of a window.
    """
    for batch_size in batch_sizes:
        window = min(most_window, _SAMPLES_PER_WINDOW // batch_size)
        window -= window % _TURNS_PER_WINDOW
        case = f"B={batch_size},D=16,optimizer=adagrad,window={window}"
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(
                    Worker(name, _Trainer, name, batch_size, window, num_rounds, table_sizes)
                )
                for name in _PROVIDERS
            }
            for worker in workers.values():
                worker.wait()
            seconds: dict[str, list[float]] = take_turns(
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
    """Lives in a worker: trains by one policy."""

    def __init__(
        self,
        name: str,
        batch_size: int,
        window: int,
        num_rounds: int,
        table_sizes: Sequence[int],
    ) -> None:
        prepare_process()
        torch.manual_seed(0)
        self._window = window
        num_samples = 2 * batch_size * window * (num_rounds + 3)
        source = samples(num_samples, table_sizes)
        model, optimizers = build_model(source, 16, Adagrad(lr=0.01))
        self._batches = iter(BatchLoader(source, "train", batch_size, shuffle=True))
        staleness = Staleness(window=window)
        policies: dict[str, Any] = {
            "observe": Observe(staleness=staleness),
            "drop_input": DropInput(share=_NO_SHARE, staleness=staleness, guard=None),
        }
        self._pipeline = TrainPipeline(model, optimizers, skip=policies.get(name))
        for _ in range(_TURNS_PER_WINDOW):
            self.turn()
        gc.disable()
        gc.collect()
        gc.freeze()

    def turn(self) -> float:
        """Train for a tenth of a window; returns seconds."""
        begin = time.perf_counter()
        for _ in range(self._window // _TURNS_PER_WINDOW):
            self._pipeline.progress(self._batches)
        seconds = time.perf_counter() - begin
        end_turn()
        return seconds


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048])
    options = parser.parse_args()
    rows = bench_cost(
        options.batch_sizes,
        num_rounds=2 if options.quick else 30,
        table_sizes=[1000] * 26 if options.quick else (),
        most_window=_LEAST_WINDOW if options.quick else _MOST_WINDOW,
    )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
