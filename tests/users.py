"""Users of PyTorch, as chance wants them: whatever they do, tiers and resident tables stay equal.

`Users` plays one user beside a twin. Both do the same through public PyTorch: the one with rows in
two tiers, the other with every row resident. What both return, and every row and state at the end,
must be equal to the last bit. After a write by a tensor that was kept, the tiered one may refuse by
name: `ConflictingWrite`. Then it goes on from the twin's checkpoint.
"""

import copy
import itertools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.errors import ConflictingWrite, IdOutOfRange, TrainingDiverged
from recsys.pipeline import Auto, Hotline, LookAhead, Sequential, TrainPipeline
from tests.budget import floor_bytes, slot_bytes

FORMULAS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
NUM_ROWS = 120
seeds = st.integers(0, 2**16)


class Bag(nn.Module):
    """One bag of ours; tells its rows' optimizer."""

    def __init__(self, options, **more):
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "budget=")
            self.bag = HotColdEmbeddingBag(NUM_ROWS, **options, **more)

    def forward(self, batch):
        return self.bag(*batch)

    def tables(self):
        return [self.bag.weight]

    @property
    def optimizer(self):
        return self.bag.row_optimizer

    @staticmethod
    def batch(options, generator):
        lengths = torch.randint(0, 4, (4,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
        if not options["include_last_offset"]:
            offsets = offsets[:-1]
        has_weights = options["mode"] == "sum" and int(torch.randint(0, 2, (), generator=generator))
        weights = None
        if has_weights:
            weights = torch.rand(len(ids), generator=generator).to(options["dtype"])
        return ids, offsets, weights


TABLES = [
    TableConfig(name="users", num_embeddings=NUM_ROWS, embedding_dim=4),
    TableConfig(name="goods", num_embeddings=90, embedding_dim=4, feature_names=("goods", "seen")),
    TableConfig(name="pages", num_embeddings=100, embedding_dim=3, feature_names=("seen",)),
]


class Collection(nn.Module):
    """A collection of ours."""

    def __init__(self, options, **more):
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "budget=")
            self.bags = HotColdEmbeddingBagCollection(TABLES, **options, **more)

    def forward(self, batch):
        return self.bags(batch).values()

    def tables(self):
        return self.bags.table_weights()

    @property
    def optimizer(self):
        return self.bags.row_optimizer

    @staticmethod
    def batch(_options, generator):
        lengths = torch.randint(0, 3, (3 * 4,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, 90, (int(lengths.sum()),), generator=generator)
        return JaggedIds(["users", "goods", "seen"], values, offsets)


def ids_of(batch):
    """Every tensor of ids or offsets in a mini-batch."""
    if isinstance(batch, JaggedIds):
        return [batch.values(), batch.offsets()]
    return list(batch[:2])


def state_of(model):
    """All optimizer state of the rows, by table and name; what is zero may not be there yet."""
    found = model.optimizer.state_dict()["state"]
    return {
        (key, name): torch.as_tensor(value)
        for key, known in found.items()
        for name, value in known.items()
        if torch.as_tensor(value).any()
    }


def are_equal(first, second, tolerance=0.0):
    """Whether two results are the same, to the last bit unless there is a tolerance."""
    if isinstance(first, torch.Tensor):
        if first.is_sparse:
            first, second = first.to_dense(), second.to_dense()
        return first.dtype == second.dtype and torch.allclose(
            first, second, rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            are_equal(first[key], second[key], tolerance) for key in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(
            are_equal(*each, tolerance) for each in zip(first, second, strict=True)
        )
    return first == second or abs(first - second) <= tolerance


KEPT = [
    lambda table: table.detach(),
    lambda table: table.data,
    lambda table: table.detach()[5:60],
]
READS = [
    lambda model: model.state_dict(),
    lambda model: [table.norm() for table in model.tables()],
    lambda model: [table[torch.tensor([3, 7])] for table in model.tables()],
    lambda model: [table.detach().clone() for table in model.tables()],
    lambda model: [table.tolist() for table in model.tables()],
    lambda model: nn.utils.parameters_to_vector([table.flatten() for table in model.tables()]),
    state_of,
]


def _by_numpy(table):
    with torch.no_grad():
        table.detach().view(torch.uint8).numpy()[7:20] = 0


WRITES = [
    lambda table: table.mul_(0.5),
    lambda table: table.detach().clamp_(-0.5, 0.5),
    lambda table: table.data.add_(0.25),
    lambda table: table[3:9].zero_(),
    lambda table: table.copy_(torch.full_like(table, 0.125)),
    lambda table: nn.init.constant_(table, 0.5),
    _by_numpy,
]


class Users(RuleBasedStateMachine):
    """One user with a loop of their own; see above."""

    tolerance = 0.0

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(data=st.data())
    def build(self, data):
        self.kind = data.draw(st.sampled_from([Bag, Collection]))
        tier = data.draw(st.sampled_from(["host", "file"]))
        self.steps_itself = data.draw(st.booleans())
        formula = data.draw(st.sampled_from(FORMULAS))
        self.options = {"optimizer": formula, "auto_apply": self.steps_itself}
        if self.kind is Bag:
            dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
            self.options |= {
                "embedding_dim": data.draw(st.sampled_from([1, 4, 4])),
                "mode": data.draw(st.sampled_from(["sum", "mean"])),
                "dtype": dtype,
                "include_last_offset": data.draw(st.booleans()),
                "padding_idx": data.draw(st.sampled_from([None, 7])),
            }
        num_slots = data.draw(st.sampled_from([16, 24, 40]))
        more = {"budget": self.budget_of(num_slots), "cold_tier": tier}
        if tier == "file":
            more["cold_path"] = Path(self.folder.name) / "rows"
        torch.manual_seed(0)
        self.twin = self.kind(self.options)
        torch.manual_seed(0)
        self.model = self.kind(self.options, **more)
        self.graphs, self.kept, self.saved, self.num_waiting = [], [], None, 0
        self.may_conflict = False

    def budget_of(self, num_slots):
        """Bytes for so many slots of each dim."""
        if self.kind is Collection:
            sizes = self.options["optimizer"].state_sizes
            spaces = [(210, 4, torch.float32, sizes(4)), (100, 3, torch.float32, sizes(3))]
        else:
            dim, dtype = self.options["embedding_dim"], self.options["dtype"]
            spaces = [(NUM_ROWS, dim, dtype, self.options["optimizer"].state_sizes(dim))]
        slots = [(num_slots, slot_bytes(*kind)) for _, *kind in spaces]
        return floor_bytes(sum(num_rows for num_rows, *_ in spaces), slots)

    def both(self, act, of_twin=None):
        """Do it in both; what both return, and raise, must be equal.

        Returns:
            What was raised by both; None of nothing.
        """
        results, errors = [], []
        for model, do in ((self.model, act), (self.twin, of_twin or act)):
            try:
                results.append(do(model))
                errors.append(None)
            except ConflictingWrite:
                assert model is self.model
                assert self.may_conflict
                self.load_checkpoint_of_twin()
                return ConflictingWrite()
            except (IdOutOfRange, TrainingDiverged, RuntimeError) as error:
                results.append(None)
                errors.append(error.with_traceback(None))
        assert type(errors[0]) is type(errors[1]), errors
        assert are_equal(*results, self.tolerance), results
        return errors[0]

    def load_checkpoint_of_twin(self):
        """The way on after a conflict."""
        self.graphs.clear()
        self.kept.clear()
        self.num_waiting, self.may_conflict = 0, False
        for each in (self.twin, self.model):
            each.optimizer.zero_grad()
        self.model.load_state_dict(copy.deepcopy(self.twin.state_dict()))
        self.model.optimizer.load_state_dict(copy.deepcopy(self.twin.optimizer.state_dict()))

    def batch(self, seed):
        return self.kind.batch(self.options, torch.Generator().manual_seed(seed))

    def forward_in_both(self, batch):
        """The outputs, of the tiered one first; None where it is refused."""
        outputs = []

        def forward(model):
            outputs.append(model(batch))
            return outputs[-1].detach()

        error = self.both(forward)
        return None if error else outputs

    def learn_in_both(self, seed, factor=1.0):
        outputs = self.forward_in_both(self.batch(seed))
        if outputs is None:
            return
        both = dict(zip((id(self.model), id(self.twin)), outputs, strict=True))

        self.both(lambda model: (both[id(model)].square().sum() * factor).backward())
        self.step_in_both()

    def step_in_both(self):
        if not self.steps_itself:
            self.both(lambda model: model.optimizer.step() and None)
        self.num_waiting = 0

    @rule(seed=seeds, count=st.integers(1, 6))
    def step(self, seed, count):
        for number in range(count):
            self.learn_in_both(seed + number)

    @precondition(lambda self: not self.steps_itself and self.num_waiting < 3)
    @rule(seed=seeds, refill=st.booleans())
    def accumulate(self, seed, refill):
        batch = self.batch(seed)
        outputs = self.forward_in_both(batch)
        if outputs is None:
            return
        both = dict(zip((id(self.model), id(self.twin)), outputs, strict=True))
        self.both(lambda model: both[id(model)].square().sum().backward())
        if refill:
            for ids in ids_of(batch):
                ids.numpy()[:] = 10**9
        self.num_waiting += 1

    @precondition(lambda self: not self.steps_itself)
    @rule()
    def step_alone(self):
        self.step_in_both()

    @rule()
    def zero_grad(self):
        self.both(lambda model: model.optimizer.zero_grad())
        self.num_waiting = 0

    @precondition(lambda self: len(self.graphs) < 2)
    @rule(seed=seeds)
    def keep_a_graph(self, seed):
        outputs = self.forward_in_both(self.batch(seed))
        if outputs is not None:
            self.graphs.append(outputs)

    @precondition(lambda self: self.graphs)
    @rule()
    def come_back_to_a_graph(self):
        outputs = self.graphs.pop(0)
        both = dict(zip((id(self.model), id(self.twin)), outputs, strict=True))
        self.both(lambda model: both[id(model)].square().sum().backward())
        self.num_waiting += 1

    @rule(seed=seeds, off=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluate(self, seed, off):
        batch = self.batch(seed)

        def look_up(model):
            model.eval()
            with off():
                found = model(batch).clone()
            model.train()
            return found

        self.both(look_up)

    @rule(read=st.sampled_from(READS))
    def look(self, read):
        self.both(read)

    @rule(write=st.sampled_from(WRITES), number=st.integers(0, 2))
    def write(self, write, number):
        def do(model):
            tables = model.tables()
            with torch.no_grad():
                write(tables[number % len(tables)])

        self.both(do)

    @rule(keep=st.sampled_from(KEPT), number=st.integers(0, 2))
    def keep_a_view(self, keep, number):
        views = []

        def do(model):
            tables = model.tables()
            views.append(keep(tables[number % len(tables)]))

        if self.both(do) is None:
            self.kept.append(views)

    @precondition(lambda self: self.kept)
    @rule(factor=st.sampled_from([0.5, -1.0]))
    def write_by_a_kept_view(self, factor):
        for view in self.kept[-1]:
            view.mul_(factor)
        self.may_conflict = True

    @rule(factor=st.sampled_from([2.0, 0.5]))
    def write_to_state(self, factor):
        def do(model):
            model.optimizer.state_dict()
            for table in model.tables():
                for value in model.optimizer.state.get(table, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.mul_(factor)

        self.both(do)

    @rule()
    def save(self):
        saved = []

        def do(model):
            saved.append(copy.deepcopy((model.state_dict(), model.optimizer.state_dict())))
            return saved[-1][0]

        if self.both(do) is None:
            self.saved = saved[1]

    @precondition(lambda self: self.saved)
    @rule(with_state=st.booleans())
    def load(self, with_state):
        rows, state = self.saved

        def do(model):
            model.load_state_dict(rows)
            if with_state:
                model.optimizer.load_state_dict(copy.deepcopy(state))

        self.both(do)

    @precondition(lambda self: not self.steps_itself)
    @rule(factor=st.sampled_from([0.5, 0.0]))
    def scale_gradients(self, factor):
        def do(model):
            found = []
            for table in model.tables():
                if table.grad is not None:
                    grad = table.grad.coalesce() if table.grad.is_sparse else table.grad
                    table.grad = grad * factor
                    found.append(table.grad)
            return found

        self.both(do)

    @precondition(lambda self: not self.steps_itself)
    @rule()
    def scale_gradients_in_place(self):
        def do(model):
            for table in model.tables():
                if table.grad is not None:
                    table.grad.mul_(0.5)

        self.both(do)

    @rule(seed=seeds)
    def go_back_twice(self, seed):
        outputs = self.forward_in_both(self.batch(seed))
        if outputs is None:
            return
        both = dict(zip((id(self.model), id(self.twin)), outputs, strict=True))

        def learn(model):
            loss = both[id(model)].square().sum()
            loss.backward(retain_graph=True)
            loss.backward()

        self.both(learn)
        self.step_in_both()

    @rule(seed=seeds, way=st.sampled_from(["functional_call", "assign"]))
    def look_up_other_tables(self, seed, way):
        batch = self.batch(seed)

        def look_up(model, rows):
            if way == "functional_call":
                torch.func.functional_call(model, rows, (batch,))
            model.load_state_dict(rows, assign=True)
            model(batch)

        def do(model):
            with torch.no_grad():
                halves = {name: 0.5 * each for name, each in model.named_parameters()}
            before = dict(model.named_parameters())
            try:
                with pytest.raises(ValueError, match="its Parameter was replaced") as raised:
                    look_up(model, halves)
            finally:
                for name, table in before.items():
                    holder, _, attribute = name.rpartition(".")
                    setattr(model.get_submodule(holder), attribute, table)
            return str(raised.value)

        self.both(do)

    @rule(number=st.integers(0, 2), is_asked=st.booleans())
    def freeze(self, number, is_asked):
        def do(model):
            tables = model.tables()
            tables[number % len(tables)].requires_grad_(is_asked)

        self.both(do)

    @rule(lr=st.sampled_from([0.05, 0.4]))
    def set_the_rate(self, lr):
        def do(model):
            for group in model.optimizer.param_groups:
                group["lr"] = lr

        self.both(do)

    @rule(seed=seeds, value=st.sampled_from([float("nan"), float("inf")]))
    def take_a_gradient_that_is_not_finite(self, seed, value):
        self.learn_in_both(seed, value)
        self.both(lambda model: model.optimizer.zero_grad())
        self.num_waiting = 0

    @rule()
    def look_up_what_is_no_row(self):
        batch = self.batch(3)
        for ids in ids_of(batch)[:1]:
            ids[-1:] = 10**6
        self.both(lambda model: model(batch).detach())

    @rule(seed=seeds)
    def prefetch(self, seed):
        batch = self.batch(seed)

        def do(model):
            module = model.bag if self.kind is Bag else model.bags
            arguments = batch if self.kind is Bag else (batch,)
            module.prefetch(*arguments)

        self.both(do)

    @rule()
    def sync(self):
        def do(model):
            for module in model.modules():
                if isinstance(module, HotColdEmbeddingBag | HotColdEmbeddingBagCollection):
                    module.sync()

        self.both(do)

    def teardown(self):
        try:
            if hasattr(self, "model"):
                self.graphs.clear()
                self.both(lambda model: model.optimizer.zero_grad())
                self.both(lambda model: model.state_dict())
                self.both(state_of)
        finally:
            self.model = self.twin = None
            self.graphs, self.kept = [], []
            self.folder.cleanup()


class Trained(nn.Module):
    """A model as pipelines take it: gives (loss, output)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        output = self.model(batch)
        return output.square().sum(1).mean(), output.detach()


class PipelineUsers(Users):
    """A user of `TrainPipeline`: under each schedule, with what `Users` do between two steps."""

    @initialize(data=st.data())
    def build(self, data):
        super().build(data)
        schedules = [Sequential(), LookAhead(1), LookAhead(4), Auto(steps_per_turn=1, num_rounds=1)]
        if self.kind is Bag and self.options["dtype"] is torch.float64:
            schedules += [Hotline(learning_steps=2), Hotline(3, pinned_share=0.9)] * 2
        schedule = data.draw(st.sampled_from(schedules))
        if isinstance(schedule, Hotline):
            self.tolerance = 1e-9
        self.pipelines, self.iterators = {}, {}
        for model, chosen in ((self.model, schedule), (self.twin, Sequential())):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "schedule=")
                self.pipelines[model] = TrainPipeline(
                    Trained(model), None, schedule=chosen, ids=self.ids_of
                )
            self.iterators[model] = [self.give(number) for number in range(3)]

    def batch(self, seed):
        if self.kind is not Bag:
            return super().batch(seed)
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(0, NUM_ROWS, (8, 2), generator=generator),)  # has samples to select

    def ids_of(self, batch):
        return {"model.bag" if self.kind is Bag else "model.bags": batch}

    def give(self, number):
        for seed in itertools.count(1000 * number):
            yield self.batch(seed)

    def progress_in_both(self, number):
        def progress(model):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "schedule=")
                return self.pipelines[model].progress(self.iterators[model][number])

        error = self.both(progress)
        if isinstance(error, ConflictingWrite):
            next(self.iterators[self.twin][number])  # a step that failed has used its own
            if self.pipelines[self.twin]._model.training:
                self.twin.optimizer.zero_grad()
        self.num_waiting = 0

    @rule(number=st.sampled_from([0, 0, 0, 1]), count=st.integers(1, 6))
    def train(self, number, count):
        for _ in range(count):
            self.progress_in_both(number)

    @rule()
    def validate(self):
        for each in (self.model, self.twin):
            self.pipelines[each]._model.eval()
        self.progress_in_both(2)
        for each in (self.model, self.twin):
            self.pipelines[each]._model.train()

    @rule()
    def detach(self):
        def do(model):
            self.pipelines[model].detach()
            for table in model.tables():  # a pipeline forgets those of tiered tables
                table.grad = None

        self.both(do)
        self.num_waiting = 0

    def teardown(self):
        for pipeline in getattr(self, "pipelines", {}).values():
            pipeline.detach()
        super().teardown()
        self.pipelines = self.iterators = None
