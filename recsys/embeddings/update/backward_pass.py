"""`BackwardPass`: a backward pass at whose end rows are updated."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["SCHEDULING", "BackwardPass"]

SCHEDULING = threading.RLock()  # of any updater: it is held for a microsecond


class BackwardPass:
    """A backward pass that will update rows. Only autograd refers to it, until the pass ends.

    Attributes:
        is_over: Whether the rows were updated, or the update failed.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._thread = threading.get_ident()

    def require_same_thread(self) -> None:
        """Check that another pass, which is part of this one, runs in its thread.

        On CUDA, autograd runs the passes of all threads in one, so this finds none of them.

        Raises:
            RuntimeError: it runs in another thread. Its gradients would be added to this pass, or
                lost.
        """
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "backward in another thread is updating the rows of the same tables; train them "
                "in one thread (evaluation under torch.no_grad() may run beside it), or give each "
                "thread a module of its own"
            )

    def end(self, updater: RowUpdater) -> None:
        """Update the rows."""
        try:
            updater.update_rows()
        finally:
            self.is_over = True
