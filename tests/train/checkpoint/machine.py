"""One training and its checkpoints, driven at random; a twin without checkpoints has the numbers.

The twin keeps all tables in fast memory. It makes the same steps and writes, and what it has at
each cut is what the checkpoint must restore. The training itself is never read for a comparison,
because reading its tables would write rows in slots back.
"""

import errno
import faulthandler
import gc
import shutil
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import load_file

from recsys import load_checkpoint
from tests.commands import recsys
from tests.train.checkpoint.trainings import (
    FORMULAS,
    TORCH,
    Training,
    listed,
    manifest_of,
    newest,
    require_equal,
    require_only_needed_files,
)

SECONDS_PER_EXAMPLE = 30
TIERS = st.sampled_from(["resident", "host", "file"])


class CheckpointMachine(RuleBasedStateMachine):
    """Steps, writes, checkpoints, failures and restarts in any order."""

    def __init__(self):
        super().__init__()
        faulthandler.dump_traceback_later(SECONDS_PER_EXAMPLE, exit=True, file=sys.__stderr__)
        self.folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        (self.folder / "config.toml").touch()  # so that `recsys export` takes it for a run
        self.saved = self.folder / "checkpoints"
        self.patches = ExitStack()
        for module in ("format", "save"):
            self.patches.enter_context(
                mock.patch(f"recsys.train.checkpoint.{module}.BLOCK_BYTES", 700)
            )
        self.patches.enter_context(warnings.catch_warnings())
        # State may be removed while every row is copied again; the deltas go on.
        warnings.filterwarnings("ignore", "rows could not be copied again")
        self.num_made = 0
        self.checkpoints = None
        self.cuts = {}  # the numbers of the twin at each cut
        self.exports = {}
        self.is_pending = self.is_prepared = False

    @initialize(
        kind=st.sampled_from([*FORMULAS, *TORCH]),
        tier=TIERS,
        seed=st.integers(0, 5),
    )
    def start(self, kind, tier, seed):
        self.kind = kind
        self.twin = Training(kind, "resident", None, seed)
        self.training = self.make(tier, seed)
        self.checkpoints = self.training.saved(self.saved)

    def make(self, tier, seed=99):
        self.num_made += 1
        return Training(self.kind, tier, self.folder / f"cold{self.num_made}", seed)

    @rule(seed=st.integers(0, 50), most=st.sampled_from([3, 30, 1000]))
    def step(self, seed, most):
        for each in (self.training, self.twin):
            each.step(seed, most)

    @rule(place=st.integers(0, 2), seed=st.integers(0, 5))
    def write(self, place, seed):
        for each in (self.training, self.twin):
            each.write(place, seed)

    @rule()
    def freshen(self):
        """Load the state of new optimizers, and go on with the rows."""
        self.settle()
        if self.is_prepared:  # a copy of every row fails if state is removed
            return
        fresh = self.make("resident").snapshot()
        for each in (self.training, self.twin):
            model, _ = each.snapshot()
            each.load((model, fresh[1]))

    @rule()
    def prepare(self):
        self.checkpoints.prepare()
        self.is_prepared = newest(self.saved) is None

    @rule()
    def save(self):
        """Save; the next rule that needs the result waits for it."""
        self.settle()
        self.checkpoints.save(state=self.num_made)
        number = max([0, *self.cuts]) + 1
        self.cuts[number] = self.twin.snapshot()
        self.is_pending = True

    def settle(self):
        """Take over the result of the last save, whose number is known only now."""
        if not self.is_pending:
            return
        self.is_pending = False
        number = self.checkpoints.wait()
        self.is_prepared = False
        cut = self.cuts.pop(max(self.cuts))
        assert number is not None
        self.cuts[number] = cut
        self.require_restores(number)

    def require_restores(self, number, tier="resident"):
        again = self.make(tier)
        load_checkpoint(self.saved, **again.parts, number=number)
        require_equal(again.snapshot(), self.cuts[number])
        return again

    @rule(
        target_name=st.sampled_from(["_write_checked", "safetensors_header"]),
        calls=st.integers(0, 4),
        is_after=st.booleans(),
        is_strict=st.booleans(),
    )
    def fail(self, target_name, calls, is_after, is_strict):
        """Save while the disk is full, or breaks."""
        self.settle()
        before = newest(self.saved)
        module = sys.modules["recsys.train.checkpoint.format"]
        function, count = getattr(module, target_name), [calls]

        def fail(*args, **more):
            count[0] -= 1
            if count[0] >= 0:
                return function(*args, **more)
            if is_after:
                function(*args, **more)
            raise OSError(errno.ENOSPC, "No space left on device")

        with (
            mock.patch.object(module, target_name, fail),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            self.checkpoints.save()
            cut = self.twin.snapshot()
            try:
                number = self.checkpoints.wait(strict=is_strict)
            except OSError:
                number = None
            self.is_prepared = newest(self.saved) is None
        now = newest(self.saved)
        if now != before:
            self.cuts[now] = cut
            self.require_restores(now)
        else:
            assert count[0] < 0
            assert is_strict or caught
        assert number is None or number <= now  # a failure may come after the manifest

    @rule()
    def restore(self):
        self.settle()
        for number in listed(self.saved):
            self.require_restores(number)

    @precondition(lambda self: self.cuts and not self.is_pending)
    @rule(tier=TIERS, choice=st.integers(0, 1), way=st.sampled_from(["close", "drop", "keep"]))
    def restart(self, tier, choice, way):
        """Continue from a checkpoint, in another training or in the same one."""
        numbers = listed(self.saved)
        if not numbers:
            return
        number = numbers[choice % len(numbers)]
        if way == "keep":
            load_checkpoint(self.saved, **self.training.parts, number=number)
        else:
            if way == "close":
                self.checkpoints.close()
                require_only_needed_files(self.saved)
            self.checkpoints = None
            gc.collect()
            self.training = self.require_restores(number, tier)
            self.checkpoints = self.training.saved(self.saved, after=number)
        self.twin.load(self.cuts[number])

    @precondition(lambda self: self.cuts and not self.is_pending)
    @rule(data=st.data())
    def export(self, data):
        """Export the newest checkpoint, whole, and as what has changed since an earlier one."""
        numbers = listed(self.saved)
        if not numbers:
            return
        last = manifest_of(self.saved, numbers[0])
        key, cut = (numbers[0], last["id"]), self.cuts[numbers[0]][0]
        known = [each for each in map(tuple, last["since"]) if each in self.exports]
        if key not in self.exports:
            self.exports[key] = self.folder / f"whole{len(self.exports)}"
            whole = ("--to", "safetensors", "--checkpoint", "last")
            recsys("export", self.folder, *whole, "--out", self.exports[key])
        require_equal(load_file(self.exports[key]), dict(cut))
        if not known:
            return
        before = data.draw(st.sampled_from(known))
        delta, applied = (self.folder / name for name in ("delta", "applied"))
        for file in (delta, applied):
            file.unlink(missing_ok=True)
        recsys("export", self.folder, "--since", before[0], "--out", delta)
        recsys("apply", self.exports[before], delta, "--out", applied)
        assert applied.read_bytes() == self.exports[key].read_bytes()

    def teardown(self):
        try:
            if self.checkpoints is not None:
                self.settle()
                self.checkpoints.close()
                require_only_needed_files(self.saved)
                self.restore()
        finally:
            self.patches.close()
            self.checkpoints = self.training = self.twin = None
            shutil.rmtree(self.folder, ignore_errors=True)
            faulthandler.cancel_dump_traceback_later()
