"""Acts before rows move, so that whoever does not wait for them loses."""

from recsys.embeddings.kernels.cpu.claim import FETCHED
from recsys.embeddings.tiers.transfer import Transfer


def before_transfers(patch, act):
    """Call `act(is_alone, fetches)` before each transfer, as long as `patch` lasts.

    `is_alone` says whether a thread in the background runs it, and `fetches` whether it fetches
    rows.
    """
    run = Transfer.run

    def run_late(self, *, is_alone):
        act(is_alone, bool(self.counts[FETCHED]))
        run(self, is_alone=is_alone)

    patch.setattr(Transfer, "run", run_late)
