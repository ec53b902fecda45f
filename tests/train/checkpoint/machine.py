"""One training and its checkpoints, driven at random; a twin without checkpoints has the numbers.

The twin keeps all tables in fast memory. It makes the same steps and writes, and what it has at
each cut is what the checkpoint must restore. The training itself is never read for a comparison,
because reading its tables would write rows in slots back.
"""

import copy
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

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import load_file
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import optimizer as formulas
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.table import TableConfig
from recsys.train.checkpoint import Checkpoints, load_checkpoint, newest
from recsys.train.checkpoint.format import manifest_numbers, read_manifest
from recsys.train.export import apply_deltas, export_checkpoint

SIZES, DIMS = (150, 7, 60), (4, 4, 8)
SECONDS_PER_EXAMPLE = 30
TIERS = st.sampled_from(["resident", "host", "file"])
FORMULAS = {
    "sgd": lambda: formulas.SGD(lr=0.1),
    "adagrad": lambda: formulas.Adagrad(lr=0.1),
    "row-wise adagrad": lambda: formulas.RowWiseAdagrad(lr=0.1),
    "adam": lambda: formulas.Adam(lr=0.1),
    "partial row-wise adam": lambda: formulas.PartialRowWiseAdam(lr=0.1),
}
TORCH = {
    "torch sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "torch adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1),
    "torch adam": lambda given: torch.optim.Adam(given, lr=0.1),
}


class Training:
    """A model of collections with formulas, or of bags with an optimizer of torch."""

    def __init__(self, kind, tier, folder, seed=0):
        torch.manual_seed(seed)
        more = {}
        if tier != "resident":
            more = {"budget": 1700 if kind in FORMULAS else 4000, "cold_tier": tier}
        self.model = nn.Module()
        self.is_collection = kind in FORMULAS
        frozen = nn.EmbeddingBag(9, 4, mode="sum")
        frozen.weight.requires_grad_(False)
        self.model.top = nn.Linear(sum(DIMS) + 4, 1)
        self.model.register_buffer("count", torch.tensor(3))
        if self.is_collection:
            optimizers = []
            for name, places in (("small", (0, 1)), ("large", (2,))):
                tables = [
                    TableConfig(
                        name=f"t{place}",
                        num_embeddings=SIZES[place],
                        embedding_dim=DIMS[place],
                        feature_names=(str(place),),
                    )
                    for place in places
                ]
                if tier == "file":
                    more["cold_path"] = folder / name
                made = HotColdEmbeddingBagCollection(
                    tables, optimizer=FORMULAS[kind](), auto_apply=False, **more
                )
                setattr(self.model, name, made)
                optimizers.append(made.row_optimizer)
            self.model.frozen = frozen
            dense = torch.optim.Adam(self.model.top.parameters(), lr=0.01)
            self.optimizers = [dense, *optimizers]
        else:
            if tier == "file":
                more["cold_path"] = folder / "bags"
            self.model.bags = nn.ModuleList(
                nn.EmbeddingBag(size, dim, mode="sum")
                for size, dim in zip(SIZES, DIMS, strict=True)
            )
            self.model.frozen = frozen
            given = [each for each in self.model.parameters() if each.requires_grad]
            self.optimizers = [TORCH[kind](given)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # how lazy_adam differs
                recsys.accelerate(
                    self.model, optimizer=self.optimizers[0], lazy_adam=True, **more, always=True
                )

    def weights(self):
        if self.is_collection:
            small, large = self.model.small.embedding_bags, self.model.large.embedding_bags
            return [small.t0.weight, small.t1.weight, large.t2.weight]
        return [bag.weight for bag in self.model.bags]

    def step(self, seed, most):
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(min(size, most), (6,), generator=generator) for size in SIZES]
        labels = torch.rand(6, generator=generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        pooled = []
        if self.is_collection:
            given = JaggedIds.from_one_hot(["0", "1"], torch.stack(rows[:2]))
            pooled.append(self.model.small(given).values())
            given = JaggedIds.from_one_hot(["2"], torch.stack(rows[2:]))
            pooled.append(self.model.large(given).values())
        else:
            pooled += [bag(ids[:, None]) for bag, ids in zip(self.model.bags, rows, strict=True)]
        pooled.append(self.model.frozen(rows[1][:, None]))
        loss = (self.model.top(torch.cat(pooled, 1)).squeeze(1) - labels).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def write(self, place, seed):
        weight = self.weights()[place]
        with torch.no_grad():
            if seed % 3 == 0:
                weight.mul_(0.5)
            elif seed % 3 == 1:
                weight[seed % len(weight)] = seed / 10
            else:
                weight.data.add_(0.25)

    def snapshot(self):
        """Every number of the training, as it can be loaded."""
        states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
        return copy.deepcopy(self.model.state_dict()), states

    def load(self, snapshot):
        model, states = copy.deepcopy(snapshot)
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def require_equal(found, expected, place="training"):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (place, found.keys(), expected.keys())
        for key, value in expected.items():
            require_equal(found[key], value, f"{place}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, pair in enumerate(zip(found, expected, strict=True)):
            require_equal(*pair, f"{place}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), (place, found, expected)
    else:
        assert found == expected, place


class CheckpointMachine(RuleBasedStateMachine):
    """Steps, writes, checkpoints, failures and restarts in any order."""

    def __init__(self):
        super().__init__()
        faulthandler.dump_traceback_later(SECONDS_PER_EXAMPLE, exit=True, file=sys.__stderr__)
        self.folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        self.patches = ExitStack()
        for module in ("format", "save"):
            blocks = f"recsys.train.checkpoint.{module}.BLOCK_BYTES"
            self.patches.enter_context(mock.patch(blocks, 700))
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
        self.open()

    def make(self, tier, seed=99):
        self.num_made += 1
        return Training(self.kind, tier, self.folder / f"cold{self.num_made}", seed)

    def open(self, after=None):
        self.checkpoints = Checkpoints(
            self.folder / "saved",
            model=self.training.model,
            optimizers=self.training.optimizers,
            after=after,
        )

    @property
    def listed(self):
        """The newest checkpoint, and the one before it, if its files are there."""
        saved = self.folder / "saved"
        last = newest(saved)
        if last is None:
            return []
        before = read_manifest(saved, last).before
        return [last, *(number for number in manifest_numbers(saved) if number == before)]

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
        self.is_prepared = newest(self.folder / "saved") is None

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
        load_checkpoint(
            self.folder / "saved", model=again.model, optimizers=again.optimizers, number=number
        )
        require_equal(again.snapshot(), self.cuts[number])
        return again

    @rule(
        target_name=st.sampled_from(["_write_checked", "_set_newest", "safetensors_header"]),
        calls=st.integers(0, 4),
        is_after=st.booleans(),
        is_strict=st.booleans(),
    )
    def fail(self, target_name, calls, is_after, is_strict):
        """Save while the disk is full, or breaks."""
        self.settle()
        before = newest(self.folder / "saved")
        name = f"recsys.train.checkpoint.format.{target_name}"
        module, _, function_name = name.rpartition(".")
        function, count = getattr(sys.modules[module], function_name), [calls]

        def fail(*args, **more):
            count[0] -= 1
            if count[0] >= 0:
                return function(*args, **more)
            if is_after:
                function(*args, **more)
            raise OSError(errno.ENOSPC, "No space left on device")

        with mock.patch(name, fail), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.checkpoints.save()
            cut = self.twin.snapshot()
            try:
                number = self.checkpoints.wait(strict=is_strict)
            except OSError:
                number = None
            self.is_prepared = newest(self.folder / "saved") is None
        now = newest(self.folder / "saved")
        if now != before:  # it was written, or `LAST` was
            self.cuts[now] = cut
            self.require_restores(now)
        else:
            assert count[0] < 0
            assert is_strict or caught
        assert number is None or number <= now  # a failure may come after `LAST`

    @rule()
    def restore(self):
        self.settle()
        for number in self.listed:
            self.require_restores(number)

    @precondition(lambda self: self.cuts and not self.is_pending)
    @rule(tier=TIERS, choice=st.integers(0, 1), way=st.sampled_from(["close", "drop", "keep"]))
    def restart(self, tier, choice, way):
        """Continue from a checkpoint, in another training or in the same one."""
        self.settle()
        numbers = self.listed
        if not numbers:
            return
        number = numbers[choice % len(numbers)]
        given = {"model": self.training.model, "optimizers": self.training.optimizers}
        if way == "keep":
            load_checkpoint(self.folder / "saved", **given, number=number)
        else:
            if way == "close":
                self.checkpoints.close()
                self.require_only_needed_files()
            self.checkpoints = None
            del given
            gc.collect()
            self.training = self.require_restores(number, tier)
            self.open(after=number)
        self.twin.load(self.cuts[number])

    @precondition(lambda self: self.cuts and not self.is_pending)
    @rule(data=st.data())
    def export(self, data):
        saved, numbers = self.folder / "saved", self.listed
        if not numbers:
            return
        last = read_manifest(saved, numbers[0])
        known = [each for each in last.since if each in self.exports]
        key = last.number, last.id
        if key not in self.exports:
            self.exports[key] = self.folder / f"whole{len(self.exports)}"
            export_checkpoint(saved, self.exports[key])
        whole = load_file(self.exports[key])
        require_equal(whole, {name: self.cuts[last.number][0][name] for name in whole})
        assert whole.keys() == self.cuts[last.number][0].keys()
        if not known:
            return
        before = data.draw(st.sampled_from(known))
        for name in ("delta", "applied"):
            (self.folder / name).unlink(missing_ok=True)
        export_checkpoint(saved, self.folder / "delta", since=before[0])
        apply_deltas(self.exports[before], [self.folder / "delta"], self.folder / "applied")
        assert self.folder.joinpath("applied").read_bytes() == self.exports[key].read_bytes()

    def require_only_needed_files(self):
        saved, expected = self.folder / "saved", set()
        for number in self.listed:
            manifest = read_manifest(saved, number)
            expected |= {f"{number:08}.json", *manifest.pieces}
        # Without `LAST`, whose first write may have failed, the last manifest is the newest.
        assert {path.name for path in saved.iterdir()} - {"LAST"} == expected

    def teardown(self):
        try:
            if self.checkpoints is not None:
                self.settle()
                self.checkpoints.close()
                self.require_only_needed_files()
                for number in self.listed:
                    self.require_restores(number)
        finally:
            self.patches.close()
            self.checkpoints = self.training = self.twin = None
            shutil.rmtree(self.folder, ignore_errors=True)
            faulthandler.cancel_dump_traceback_later()
