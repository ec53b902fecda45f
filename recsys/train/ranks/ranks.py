"""A run on several processes: each reads a part of every mini-batch, and has a part of the rows.

    samples       of each mini-batch, process r of W reads the r-th part
    rows          TorchRec moves ids and vectors between processes
    dense part    every process has it; TorchRec averages its gradients
    reports       after each forward, every process gets all losses, logits and labels, so all know
                  the same metrics; the first one writes the run folder
    checkpoints   each process writes its rows to pieces of its own

So all processes must see the same file system.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from recsys._support.machine import num_cores
from recsys.distributed.agreement import OtherRankFailed, require_same
from recsys.embeddings.saved_tables import SavedTables
from recsys.errors import ConfigError, RecsysError, TrainingDiverged
from recsys.pipeline.loss_and_output import explain_loss
from recsys.train.checkpoint.contents import Contents, Share
from recsys.train.checkpoint.format import last_number, newest, row_ranges
from recsys.train.checkpoint.restore import restore
from recsys.train.checkpoint.writer import remove_unneeded
from recsys.train.loop.resume import Reopened, reopened
from recsys.train.loop.run_checkpoints import RunCheckpoints
from recsys.train.parts.models import needs_rows
from recsys.train.ranks.processes import BuiltModel, Processes
from recsys.train.ranks.rank_model import RankModel, rank_model
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.batch import Batch, SampleSource
    from recsys.config import TrainConfig
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["Ranks", "joined", "require_supported"]

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@contextmanager
def joined(run_dir: Path) -> Iterator[Ranks]:
    """Join the processes that `torchrun` has started, until the end of the `with` block.

    Args:
        run_dir: The folder of the run, the same for all.

    Raises:
        OtherRankFailed: the connection to another process is lost.
    """
    is_first_use = not dist.is_initialized()
    # TorchRec calls a function of torch that warns once.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        if is_first_use:
            _make_group()
        with ExitStack() as stack:
            own_dir = run_dir
            if dist.get_rank():
                own_dir = Path(stack.enter_context(TemporaryDirectory(prefix="recsys-"))) / "run"
            ranks = Ranks(run_dir, own_dir)
            try:
                yield ranks
            finally:
                if ranks.has_diverged:
                    # `torchrun` stops the first process, which writes the record, when others end.
                    dist.barrier()
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if isinstance(error, RecsysError) or not is_lost:
            raise
        raise OtherRankFailed(
            f"process {os.environ.get('RANK', '')} lost its connection to another process: it has "
            "raised an error, which it shows, or was killed, which torchrun shows as an exit code "
            "such as -9 (often for lack of memory); --resume continues from the newest complete "
            "checkpoint, and torchrun --max-restarts 3 with --resume does so by itself"
        ) from error
    finally:
        if is_first_use and dist.is_initialized():
            dist.destroy_process_group()


def _make_group() -> None:
    """Make the process group of the processes that `torchrun` has started.

    After a restart, the store of `torchrun` still has the addresses of the processes before, which
    gloo would wait for. So each start has names of its own.
    """
    store, rank, num_ranks = next(rendezvous("env://"))
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    # Processes wait for each other's disks. One that ends is noticed at once: its sockets close.
    limit = timedelta(days=1)
    dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=num_ranks)


class Ranks(Processes):
    """Several processes of a run, seen by one of them.

    Args:
        run_dir: The folder of the run.
        own_dir: Where this process writes its reports: the run folder for the first one.

    Attributes:
        has_diverged: Whether all processes have raised `TrainingDiverged`.
    """

    has_diverged = False

    def __init__(self, run_dir: Path, own_dir: Path) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.run_dir, self.own_dir, self._folder = run_dir, own_dir, RunFolder(run_dir)
        self._built: RankModel | None = None

    def require_same(self, given: Mapping[str, Any]) -> None:
        """Compare what the processes were given."""
        require_same(given, None)

    @contextmanager
    def warnings_once(self) -> Iterator[None]:
        """Only the first process warns."""
        with warnings.catch_warnings():
            if self.rank:
                warnings.simplefilter("ignore", UserWarning)
            yield

    def num_threads(self, config: TrainConfig) -> int:
        """By default, this process's share of the cores."""
        of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return config.num_threads or max(1, num_cores() // of_machine)

    def require(self, config: TrainConfig, source: SampleSource) -> None:
        """Check what several processes support."""
        require_supported(config, source, self.num_ranks)

    @contextmanager
    def reopened(self, config: TrainConfig, number: int | None) -> Iterator[Reopened | None]:
        """Open the run to continue, on the first process; the others learn what it has found."""
        if self.rank:
            found: list[Any] = [None]
            dist.broadcast_object_list(found)
            if found[0] is None:
                yield None
                return
            before, *rest = found[0]
            yield Reopened(RunFolder.create(self.own_dir, before), before, *rest)
            return
        with ExitStack() as stack:
            earlier = stack.enter_context(reopened(config, self._folder.path, number))
            dist.broadcast_object_list([None if earlier is None else tuple(earlier)[1:]])
            yield earlier

    def build_model(
        self, config: TrainConfig, source: SampleSource, plan: HotPlan | None
    ) -> BuiltModel:
        """Build the model with this process's rows."""
        self._built = rank_model(config, source, plan)
        return self._built.model

    def restore(self, folder: RunFolder, earlier: Reopened, model: BuiltModel) -> Any:
        """Restore this process's rows."""
        contents = Contents(model.saved, model.optimizers, self._share())
        found = restore(self._folder.checkpoints_folder, contents, earlier.saved)
        if self.rank:
            found["state"]["history_bytes"] = 0  # this process's reports begin anew
        return found["state"]

    def checkpoints(
        self, config: TrainConfig, folder: RunFolder, model: BuiltModel, earlier: Reopened | None
    ) -> RunCheckpoints | None:
        """This process's rows, beside those of the others."""
        if not config.checkpoint.is_on:
            return None
        saved, place = None if earlier is None else earlier.saved, self._folder.checkpoints_folder
        number = 0
        if not self.rank:
            if saved == newest(place):
                remove_unneeded(place, unfinished=True)
            number = last_number(place)
        share = self._share(self._gather_objects(number)[0])
        if self.rank:
            self._require_shared_folder()
        return RunCheckpoints(config.checkpoint, place, model.saved, model.optimizers, saved, share)

    def gather_step(
        self, most: int, batch: Batch, loss: Tensor, logits: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and the samples of all processes."""
        own_sum = loss.reshape(1) * len(labels)
        sums, all_logits, all_labels = self._gather(most, own_sum, logits, labels)
        if not sums.isfinite().all():
            own = None if own_sum.isfinite() else explain_loss(loss.item(), batch)
            messages: list[str | None] = [None] * self.num_ranks
            dist.all_gather_object(messages, own)
            self.has_diverged = True
            raise TrainingDiverged(
                next(f"process {rank}: {each}" for rank, each in enumerate(messages) if each)
            )
        return sums.sum() / len(all_labels), all_logits, all_labels

    def gather_scores(
        self, most: int, scores: NDArray[np.float32], labels: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """The scores and labels of all processes."""
        all_scores, all_labels = self._gather(
            most, torch.from_numpy(scores), torch.from_numpy(labels)
        )
        return all_scores.numpy(), all_labels.numpy()

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether a process has set it."""
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return tuple(map(bool, found.tolist()))

    def save_model(self, folder: RunFolder, model: BuiltModel) -> None:
        """Collect all rows on the first process, which writes the file."""
        assert self._built is not None
        tables = SavedTables(model.saved)
        tables.flush()
        own = {table.key: table for table in tables.tables}
        state = {key: value for key, value in model.saved.state_dict().items() if key not in own}
        dims = self._built.dims
        for key, ranges in self._built.layout.items():
            rows = torch.empty(max(end for _, end in ranges) if not self.rank else 0, dims[key])
            for rank, (first, last) in enumerate(ranges):
                for begin, end in row_ranges(last - first, 4 * dims[key]):
                    if rank == self.rank:
                        found = own[key].read("weight", begin, end)
                        if rank:
                            dist.send(found, 0)
                        else:
                            rows[first + begin : first + end] = found
                    elif not self.rank:
                        dist.recv(rows[first + begin : first + end], rank)
            state[key] = rows
        if not self.rank:
            folder.save_model(model.saved, state=state)

    def describe(self) -> dict[str, Any]:
        """How many processes there are, and which tables each has."""
        assert self._built is not None
        return {"num_ranks": self.num_ranks, "placement": self._built.placement}

    def _gather(self, most: int, *tensors: Tensor) -> list[Tensor]:
        """One-dimensional tensors of all processes, process after process, in one collective.

        Args:
            most: The most numbers that a tensor of a process has; the same on all.
            tensors: Are sent as float32.
        """
        own = torch.zeros(len(tensors), 1 + most)
        for row, each in zip(own, tensors, strict=True):
            row[0] = len(each)
            row[1 : 1 + len(each)] = each
        of_ranks = [torch.empty(own.shape[0], 1 + most) for _ in range(self.num_ranks)]
        dist.all_gather(of_ranks, own)
        return [
            torch.cat([found[row, 1 : 1 + int(found[row, 0])] for found in of_ranks])
            for row in range(len(tensors))
        ]

    def _require_shared_folder(self) -> None:
        """Check that this process sees the run folder, which the first one has made.

        Raises:
            ConfigError: it does not.
        """
        path = self._folder.path
        with suppress(OSError):  # a file server may not have told yet that it is there; this asks
            path.mkdir()
            path.rmdir()
        if not self._folder.config_file.is_file():
            raise ConfigError(
                f"{path}: process {self.rank} does not see this run folder, which the first "
                "process has made; name a folder that all machines share by --run, or set "
                "checkpoint.every_seconds and checkpoint.every_steps to 0"
            )

    def _gather_objects(self, value: Any) -> list[Any]:
        """What every process gives, by rank. A collective."""
        found = [None] * self.num_ranks
        dist.all_gather_object(found, value)
        return found

    def _share(self, numbers_after: int = 0) -> Share:
        """What of the model this process saves and restores."""
        assert self._built is not None
        layout = self._built.layout
        return Share(self.rank, self.num_ranks, layout, self._gather_objects, numbers_after)


def require_supported(config: TrainConfig, source: SampleSource, num_ranks: int) -> None:
    """Check that several processes can train a configuration.

    Args:
        config: The configuration.
        source: The data.
        num_ranks: W, the number of processes.

    Raises:
        ConfigError: they cannot.
    """
    rules = [
        ("embeddings", config.embeddings, ("recsys",)),
        ("device", config.device, ("cpu",)),
        ("init_from", config.init_from, ("",)),
        ("optimizer.name", config.optimizer.name, _OPTIMIZERS),
        ("schedule", config.schedule.kind, ("", "sequential", "lookahead")),
        ("skip", config.skip.kind, ("none",)),
    ]
    for key, value, allowed in rules:
        if value not in allowed:
            wanted = repr(allowed[0]) if len(allowed) == 1 else f"one of {allowed}"
            raise ConfigError(
                f"{key} must be {wanted} on {num_ranks} processes, got {value!r}; change it, or "
                "train on one process"
            )
    if needs_rows(config.model):
        raise ConfigError(
            f"model.name {config.model.name!r} looks rows up without pooling, which {num_ranks} "
            "processes do not support; choose a model that pools, such as 'dlrm', or train on one "
            "process"
        )
    if config.batch_size % num_ranks:
        size = config.batch_size
        raise ConfigError(
            f"batch_size must be a multiple of the number of processes, {num_ranks}, got {size}; "
            f"start a number that divides {size}, or, for a new run, set it to "
            f"{-(-size // num_ranks) * num_ranks}"
        )
    last = len(source.splits["train"]) % config.batch_size
    if 0 < last < num_ranks:
        raise ConfigError(
            f"the last mini-batch of an epoch has {last} samples, fewer than the {num_ranks} "
            f"processes, with batch_size {config.batch_size}; start fewer processes, or, for a new "
            "run, choose another batch_size"
        )
