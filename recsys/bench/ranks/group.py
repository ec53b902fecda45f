"""The processes of `recsys bench distributed` at one world size."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recsys.bench.parts.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.bench.ranks.providers import Case

__all__ = ["RankGroup"]


class RankGroup:
    """One process for each rank; a context manager that starts and ends them.

    A thread for each rank calls its process, because all ranks must call a collective at once. If a
    rank raises an error, the others may wait for it in a collective, so all processes are ended.

    Args:
        case: What the ranks train.
    """

    def __init__(self, case: Case) -> None:
        self._case = case

    def __enter__(self) -> Self:
        case = self._case
        with ExitStack() as stack:
            # The threads end last: they wait for processes, which `Worker` ends.
            self._threads = stack.enter_context(ThreadPoolExecutor(case.world_size))
            # The ranks meet at this store as long as they live. The system chooses a free port.
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._workers = [
                stack.enter_context(
                    Worker(
                        f"rank {rank}",
                        f"W={case.world_size}",
                        _make_rank,
                        rank,
                        self._store.port,
                        case,
                    )
                )
                for rank in range(case.world_size)
            ]
            self._on_all([worker.wait for worker in self._workers])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks at once; its results by rank.

        Raises:
            Exception: of `Worker.call`.
        """
        return self._on_all([partial(each.call, method, *arguments) for each in self._workers])

    def _on_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        futures = [self._threads.submit(call) for call in calls]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]


def _make_rank(rank: int, port: int, case: Case) -> object:
    # This imports TorchRec, which the owner of the processes does not need.
    from recsys.bench.ranks.rank import Rank

    return Rank(rank, port, case)
