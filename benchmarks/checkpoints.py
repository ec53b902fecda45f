"""What checkpoints cost a training run, and what memory they take.

    plain         trains; no checkpoints
    recsys        trains on the same mini-batches, and saves one checkpoint in each turn

Both have Kaggle's tables and Adagrad, each in a process of its own, and take turns of equally many
steps. A checkpoint is cut in the middle of a turn. The copy of every row begins with the first
turn; that of a run begins half an interval before its checkpoint, too. At the end of a turn all
threads of its process are stopped until its next turn: what is left to write goes on then, beside
training, as it does in a run. The time in all includes what is left after the last turn. Rows that
are updated are recorded in every step. The row `time_over_plain` is named after `plain`; it is how
many times longer turns with checkpoints take.

`memory` saves one checkpoint of a table in files, and measures the peak of anonymous and of all
resident memory beyond that before.
"""

from __future__ import annotations

import gc
import shutil
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from model import build_model, samples
from turns import (
    Row,
    Worker,
    bench_arguments,
    end_turn,
    in_own_process,
    prepare_process,
    process_memory,
    ratio,
    show_rows,
    summarize,
    take_turns,
)

from recsys import Checkpoints, HotColdEmbeddingBagCollection, TrainPipeline, save_checkpoint
from recsys.datasets import BatchLoader
from recsys.embeddings import SGD, Adagrad, TableConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

_BATCH_SIZE = 2048
_WARM_UP_STEPS = 20


def bench_checkpoints(
    folder: Path,
    *,
    num_rounds: int,
    steps_per_turn: int,
    table_sizes: Sequence[int],
    file_tier_bytes: int,
) -> list[Row]:
    """Measure time and memory.

    Args:
        folder: A folder on the disk to be measured; what is written there is deleted.
        num_rounds: Checkpoints, and turns of each provider.
        steps_per_turn: Steps of a turn.
        table_sizes: Rows per table; Kaggle's if empty.
        file_tier_bytes: Bytes of the table in files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as own:
        path = Path(own)
        num_steps = _WARM_UP_STEPS + num_rounds * steps_per_turn
        rows = _time_rows(path, num_rounds, steps_per_turn, num_steps, tuple(table_sizes))
        memory = in_own_process(_memory, path / "memory", file_tier_bytes)
    case = f"D=128,cold_tier=file,bytes={file_tier_bytes}"
    row_of = partial(summarize, "checkpoints", case, "recsys")
    return rows + [
        row_of(metric, "s" if metric.endswith("time") else "bytes", [value])
        for metric, value in memory.items()
    ]


def _time_rows(
    folder: Path, num_rounds: int, steps: int, num_steps: int, table_sizes: tuple[int, ...]
) -> list[Row]:
    case = f"B={_BATCH_SIZE},D=16,optimizer=adagrad,steps={steps}"
    with (
        Worker("plain", _Trainer, None, num_steps, table_sizes) as plain,
        Worker("recsys", _Trainer, folder / "saved", num_steps, table_sizes) as saving,
    ):
        plain.wait()
        saving.wait()
        turns = take_turns(
            {"plain": partial(_turn, plain, steps), "recsys": partial(_turn, saving, steps)},
            num_rounds,
            num_warm_up_rounds=0,
        )
        after = saving.call("finish")
    row_of = partial(summarize, "checkpoints", case)
    seconds = {name: [turn["seconds"] for turn in found] for name, found in turns.items()}
    saved = turns["recsys"]
    total = {name: sum(each) for name, each in seconds.items()}
    overhead = (total["recsys"] + after["seconds"]) / total["plain"] - 1
    return [
        *(row_of(name, "time", "s", each) for name, each in seconds.items()),
        row_of("recsys", "overhead_in_all", "ratio", [overhead]),
        ratio(
            "checkpoints",
            case,
            "plain",
            "time_over_plain",
            values=seconds["plain"],
            baseline=seconds["recsys"],
            is_by_round=True,
        ),
        row_of("recsys", "exposed_time", "s", [turn["exposed"] for turn in saved]),
        row_of("recsys", "time_after_training", "s", [after["seconds"]]),
        row_of("recsys", "disk_bytes", "bytes", [after["disk_bytes"]]),
    ]


def _turn(worker: Worker, num_steps: int) -> dict[str, float]:
    """A turn of a worker, which is stopped before and after; "seconds" is all of it."""
    begin = time.perf_counter()
    found: dict[str, float] = worker.call("turn", num_steps)
    worker.pause()
    return found | {"seconds": time.perf_counter() - begin}


class _Trainer:
    """Trains; with a folder, saves a checkpoint in the middle of each turn."""

    def __init__(self, folder: Path | None, num_steps: int, table_sizes: tuple[int, ...]) -> None:
        prepare_process()
        torch.manual_seed(0)
        num_samples = 2 * _BATCH_SIZE * (num_steps + 1)
        source = samples(num_samples, table_sizes)
        model, optimizers = build_model(source, 16, Adagrad(lr=0.01))
        self._loader = BatchLoader(source, "train", _BATCH_SIZE, shuffle=True)
        self._batches = iter(self._loader)
        self._pipeline = TrainPipeline(model, optimizers)
        self._folder = folder or Path()
        self._train(_WARM_UP_STEPS)
        self._checkpoints = (
            None if folder is None else Checkpoints(folder, model=model, optimizers=optimizers)
        )
        gc.disable()
        gc.collect()
        gc.freeze()
        end_turn()

    def turn(self, num_steps: int) -> dict[str, float]:
        """Train; returns seconds that training waited for its checkpoint."""
        found = {}
        if self._checkpoints is not None:
            self._checkpoints.prepare()
        self._train(num_steps // 2)
        if self._checkpoints is not None:
            cut = time.perf_counter()
            self._checkpoints.save(loader=self._loader)
            found["exposed"] = time.perf_counter() - cut
        self._train(num_steps - num_steps // 2)
        gc.collect()
        return found

    def finish(self) -> dict[str, float]:
        """Write what is left; returns the seconds, and the bytes on the disk."""
        assert self._checkpoints is not None
        begin = time.perf_counter()
        self._checkpoints.wait()
        seconds = time.perf_counter() - begin
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        return {"seconds": seconds, "disk_bytes": sum(path.stat().st_size for path in files)}

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._pipeline.progress(self._batches)


def _memory(folder: Path, num_bytes: int) -> dict[str, float]:
    """Peak memory beyond that before, while a table in files is saved."""
    prepare_process()
    dim = 128
    table = TableConfig(
        name="table",
        num_embeddings=num_bytes // (dim * 4),
        embedding_dim=dim,
        feature_names=("id",),
    )
    torch.manual_seed(0)
    module = HotColdEmbeddingBagCollection(
        [table],
        optimizer=SGD(lr=0.1),
        budget=min(num_bytes // 2, 2**28),
        cold_tier="file",
        cold_path=folder / "cold",
    )
    assert module.row_optimizer is not None
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process_memory()
    begin = time.perf_counter()
    save_checkpoint(folder / "saved", model=module, optimizers=module.row_optimizer)
    seconds = time.perf_counter() - begin
    after = process_memory()
    shutil.rmtree(folder)
    return {
        "save_time": seconds,
        "peak_memory_beyond": after["VmHWM"] - before["VmRSS"],
        "memory_kept": after["RssAnon"] - before["RssAnon"],
    }


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="on the disk to measure; default: runs"
    )
    options = parser.parse_args()
    rows = bench_checkpoints(
        options.folder,
        num_rounds=2 if options.quick else 10,
        steps_per_turn=20 if options.quick else 1150,
        table_sizes=[1000] * 26 if options.quick else (),
        file_tier_bytes=10**7 if options.quick else 10**10,
    )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
