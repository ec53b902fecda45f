"""TorchRec's exchange of how many ids each rank sends, which waits for an agreement of the ranks.

input_dist      starts to exchange these numbers, and whether the input of every rank is valid
first `wait`    has both; raises on every rank, or starts to send the ids
second `wait`   has the ids
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable, KJTSplitsAllToAllMeta

if TYPE_CHECKING:
    from recsys.distributed.agreement import Agreement

__all__ = ["agreed"]


class _AgreedSplits(KJTListSplitsAwaitable):  # type: ignore[misc]  # TorchRec has no types
    """As TorchRec's class, after an agreement.

    Args:
        splits: Has started to exchange.
        agreement: Has started, too.
    """

    def __init__(self, splits: KJTListSplitsAwaitable[Any], agreement: Agreement) -> None:
        super().__init__(splits.awaitables, splits.ctx, splits._module_fqn, splits._sharding_types)
        self._agreement = agreement

    def _wait_impl(self) -> Any:
        self._agreement.wait()
        return super()._wait_impl()


def agreed(splits: KJTListSplitsAwaitable[Any], agreement: Agreement) -> Any:
    """Let the first `wait` wait for an agreement, too, and raise its error before ids are sent.

    In a pipeline of TorchRec it is waited for now: the pipeline exchanges the numbers of several
    collections together, later, and does not call that `wait`.
    """
    if any(isinstance(each, KJTSplitsAllToAllMeta) for each in splits.awaitables):
        agreement.wait()
        return splits
    return _AgreedSplits(splits, agreement)
