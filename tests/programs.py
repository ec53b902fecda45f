"""Random programs of plain PyTorch, each run three times: plain, accelerated, and with a budget.

A program is a model of some `nn.Embedding`s and `nn.EmbeddingBag`s, and a list of things that users
do with it: training in several ways, evaluation, copies, checkpoints, writes. What it returns, and
every parameter after each of these things, must agree. Accelerated and plain run may differ by
rounding, in float64. The one with a budget equals the accelerated one to the last bit.

What differs by documentation is left out: `zero_grad(set_to_none=False)` with an optimizer that
counts steps.
"""

import copy
import random
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recsys
from recsys.errors import BudgetTooSmall

_OPTIMIZERS = {  # with the numbers of state for each number of a row
    torch.optim.SGD: 0,
    torch.optim.Adagrad: 1,
    torch.optim.SparseAdam: 2,
}
_SETTINGS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {  # of half of the programs
    torch.optim.SGD: {},
    torch.optim.Adagrad: {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3},
    torch.optim.SparseAdam: {"betas": (0.8, 0.9), "eps": 1e-3},
}
_WIDTH = 3  # of the output of each layer after a table
_TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
_WAYS = (
    *("plain", "checkpoint", "reentrant", "saved on the CPU", "without gradient", "dropped"),
    *("detached", "scaled in place", "relu in place", "hook"),
)


class Spec(NamedTuple):
    """A model and its optimizers."""

    tables: list[dict[str, Any]]  # arguments of the modules
    same_as: list[int | None]  # for each table: the earlier one whose Parameter it has
    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    has_groups: bool  # whether the first table has a param group, and a rate, of its own
    is_scheduled: bool


class Call(NamedTuple):
    """A call of one of the modules in a forward."""

    module: int
    arguments: tuple[Any, ...]
    way: str
    factor: float


def draw_spec(draw: random.Random) -> Spec:
    optimizer = draw.choice(list(_OPTIMIZERS))
    tables, same_as = [], []
    for number in range(draw.randint(1, 5)):
        rows = draw.choice([5, 50, 300])
        is_sparse = optimizer is torch.optim.SparseAdam or draw.random() < 0.7
        table = {
            "num_embeddings": rows,
            "embedding_dim": draw.choice([1, 4, 4, 8]),
            "padding_idx": draw.choice([None, None, 0, rows - 1]),
            "sparse": is_sparse,
        }
        if draw.random() < 0.6:
            table["mode"] = draw.choice(["sum", "mean"])
            table["include_last_offset"] = draw.random() < 0.3
        alike = ("num_embeddings", "embedding_dim", "sparse")
        found = [
            other
            for other in range(number)
            if all(tables[other][name] == table[name] for name in alike) and same_as[other] is None
        ]
        tables.append(table)
        same_as.append(draw.choice(found) if found and draw.random() < 0.3 else None)
    has_groups = optimizer is not torch.optim.SparseAdam and draw.random() < 0.3
    settings = {"lr": draw.choice([0.05, 0.2])}
    if draw.random() < 0.5:
        settings |= _SETTINGS[optimizer]
    return Spec(tables, same_as, optimizer, settings, has_groups, draw.random() < 0.3)


class Model(nn.Module):
    """Tables, each followed by a linear layer; the loss is a sum over the calls."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        made: list[Any] = []
        for table, other in zip(spec.tables, spec.same_as, strict=True):
            kind = nn.EmbeddingBag if "mode" in table else nn.Embedding
            made.append(kind(**table, dtype=torch.float64))
            if other is not None:
                made[-1].weight = made[other].weight
        self.tables = nn.ModuleList(made)
        self.layers = nn.ModuleList(
            nn.Linear(table["embedding_dim"], _WIDTH, dtype=torch.float64) for table in spec.tables
        )

    def forward(self, calls: list[Call]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for call in calls:
            module = self.tables[call.module]
            if call.way == "checkpoint":
                found = checkpoint(module, *call.arguments, use_reentrant=False)
            elif call.way == "reentrant":  # it wants an input that asks for a gradient
                zero = torch.zeros((), requires_grad=True)
                found = checkpoint(
                    lambda zero, of=call, module=module: module(*of.arguments) + zero,
                    zero,
                    use_reentrant=True,
                )
            elif call.way == "saved on the CPU":
                with torch.autograd.graph.save_on_cpu():
                    found = module(*call.arguments) * 3
            else:
                with torch.set_grad_enabled(
                    torch.is_grad_enabled() and call.way != "without gradient"
                ):
                    found = module(*call.arguments)
            if call.way == "dropped":
                continue
            if call.way == "detached":
                found = found.detach()
            if call.way == "scaled in place":
                found = found.mul_(2)
            if call.way == "relu in place":
                found = found.relu_()
            if call.way == "hook" and found.requires_grad:
                found.register_hook(lambda gradient: gradient * 0.5)
            loss = (
                loss + self.layers[call.module](found).square().flatten(0, -2).mean() * call.factor
            )
        return loss


def draw_calls(draw: random.Random, spec: Spec, generator: torch.Generator) -> list[Call]:
    return [_draw_call(draw, spec, generator) for _ in range(draw.randint(1, 6))]


def _draw_call(draw: random.Random, spec: Spec, generator: torch.Generator) -> Call:
    number = draw.randrange(len(spec.tables))
    table = spec.tables[number]
    most = table["num_embeddings"] if draw.random() < 0.7 else max(1, table["num_embeddings"] // 10)
    dtype, size = (
        draw.choice([torch.int64, torch.int64, torch.int32]),
        draw.choice([1, 3, 7, 20, 64]),
    )

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator).to(dtype)

    if "mode" not in table:
        shape = draw.choice([(size,), (size, 3), (2, size, 2)])
        given = (ids(*shape) if draw.random() < 0.8 else ids(*shape, 2)[..., 0],)
    elif draw.random() < 0.5:
        length = draw.choice([1, 1, 2, 5])
        given = (ids(size, length) if draw.random() < 0.8 else ids(length, size).t(), None)
    else:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
        offsets = bounds if table["include_last_offset"] else bounds[:-1]
        given = (ids(int(bounds[-1])), offsets)
    if table.get("mode") == "sum" and draw.random() < 0.35:
        weights = torch.rand(given[0].shape, generator=generator, dtype=torch.float64)
        given = (*given, weights)
    way = draw.choice(("plain",) * 10 + _WAYS)
    return Call(number, given, way, draw.uniform(0.5, 2))


class Run:
    """One of the three runs of a program.

    Args:
        spec: The model.
        is_accelerated: Whether `recsys.accelerate` takes its tables over.
        budget: Its budget.
    """

    def __init__(self, spec: Spec, *, is_accelerated: bool, budget: int | None = None) -> None:
        torch.manual_seed(0)
        self.model, self._budget, self.is_accelerated = Model(spec), budget, is_accelerated
        rows = list(dict.fromkeys(each.weight for each in self.model.tables))
        dense = list(self.model.layers.parameters())
        groups = [{"params": rows[:1], "lr": spec.settings["lr"] / 3}, {"params": rows[1:]}]
        of_rows = groups if spec.has_groups and len(rows) > 1 else rows
        self.optimizers = [
            spec.optimizer(of_rows, **spec.settings),
            torch.optim.Adam(dense, lr=0.01),
        ]
        self.accelerate()
        made = self.optimizers if spec.is_scheduled else []
        self._schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in made]
        self.losses: list[torch.Tensor] = []  # kept from earlier forwards
        self.saved: Any = None

    def accelerate(self) -> None:
        if self.is_accelerated:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recsys.accelerate(
                    self.model, optimizer=self.optimizers[0], budget=self._budget, always=True
                )

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for each in (*self.optimizers, *self._schedulers):
            each.step()

    def learn(self, *batches: list[Call]) -> list[torch.Tensor]:
        """Accumulate the gradients of mini-batches, then step."""
        self.zero_grad()
        losses = [self.model(calls) for calls in batches]
        for loss in losses:
            backward(loss)
        self.step()
        return losses


def backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def _train(run, batches, draw):
    return run.learn(batches[0])


def _accumulate(run, batches, draw):
    return run.learn(*batches)


def _go_back_twice(run, batches, draw):
    run.zero_grad()
    loss = run.model(batches[0])
    backward(loss, retain_graph=True)
    backward(loss)
    run.step()


def _go_back_to_the_layers(run, batches, draw):
    run.zero_grad()
    backward(run.model(batches[0]), inputs=list(run.model.layers.parameters()))
    run.step()


def _evaluate(run, batches, draw):
    context = draw.choice([torch.no_grad, torch.inference_mode])
    run.model.eval()
    with context():
        found = [run.model(calls).clone() for calls in batches]
    run.model.train()
    return found


def _save(run, batches, draw):
    run.saved = copy.deepcopy(
        (run.model.state_dict(), [each.state_dict() for each in run.optimizers])
    )


def _load(run, batches, draw):
    if run.saved is not None:
        run.zero_grad()
        run.losses.clear()
        of_model, of_optimizers = copy.deepcopy(run.saved)
        run.model.load_state_dict(of_model)
        for optimizer, state in zip(run.optimizers, of_optimizers, strict=True):
            optimizer.load_state_dict(state)


def _copy(run, batches, draw):
    with torch.no_grad():
        return [copy.deepcopy(run.model)(batches[0])]


def _write(run, batches, draw):
    table = draw.choice(list(run.model.tables))
    run.losses.clear()
    with torch.no_grad():
        draw.choice(
            [
                lambda weight: weight.mul_(0.5),
                lambda weight: weight[2:4].fill_(0.25),
                lambda weight: weight.data.clamp_(-1, 1),
                lambda weight: weight.copy_(torch.full_like(weight, 0.125)),
            ]
        )(table.weight)


def _freeze_for_a_step(run, batches, draw):
    weight = draw.choice(list(run.model.tables)).weight
    weight.requires_grad_(False)
    found = run.learn(batches[0])
    weight.requires_grad_(True)
    return found


def _read_gradients(run, batches, draw):
    run.zero_grad()
    backward(run.model(batches[0]))
    found = []
    for table in run.model.tables:
        gradient = table.weight.grad
        if gradient is None:
            gradient = torch.zeros_like(table.weight)
        found.append((gradient.to_dense() if gradient.is_sparse else gradient).clone())
    run.step()
    return found


def _scale_gradients(run, batches, draw):
    run.zero_grad()
    backward(run.model(batches[0]))
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    run.step()


def _clip_gradients(run, batches, draw):
    run.zero_grad()
    backward(run.model(batches[0]))
    found = []
    gradients = [parameter.grad for parameter in run.model.parameters()]
    if not any(gradient is not None and gradient.is_sparse for gradient in gradients):
        found.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))
    run.step()
    return found


def _keep_a_loss(run, batches, draw):
    if len(run.losses) < 2:
        run.losses.append(run.model(batches[0]))


def _go_back_to_a_loss(run, batches, draw):
    if run.losses:
        run.zero_grad()
        try:
            backward(run.losses.pop(0))
        except RuntimeError as error:  # of a layer that was updated since
            if "modified by an inplace operation" not in str(error):
                raise
            run.zero_grad()


def _restore(run, batches, draw):
    run.zero_grad()
    run.losses.clear()
    _accelerate_anew(run, batches, draw)


def _act_between_backward_and_step(run, batches, draw):
    run.zero_grad()
    run.losses.clear()
    loss = run.model(batches[0])
    backward(loss)
    found = draw.choice([_evaluate, _save, _copy, _read_state, _accelerate_anew])(
        run, batches[1:], draw
    )
    run.step()
    return [loss, *(found or [])]


def _accelerate_anew(run, batches, draw):
    if run.is_accelerated:
        recsys.restore(run.model)
        run.accelerate()


def _read_state(run, batches, draw):
    known = run.optimizers[0].state_dict()["state"]
    found = [
        torch.as_tensor(known[number][name], dtype=torch.float64)
        for number in sorted(known)
        for name in sorted(known[number])
    ]
    return [each for each in found if each.any()]  # what is zero may not be there yet


_THINGS = [
    *[_train] * 8,
    *[_evaluate] * 3,
    _accumulate,
    _go_back_twice,
    _go_back_to_the_layers,
    _save,
    _load,
    _copy,
    _write,
    _freeze_for_a_step,
    _read_gradients,
    _scale_gradients,
    _clip_gradients,
    _act_between_backward_and_step,
    _keep_a_loss,
    _go_back_to_a_loss,
    _restore,
    _read_state,
]


def run_program(seed: int) -> str:
    """Make a program and compare its runs.

    Returns:
        "equal", or why it ended early: "budget" or "diverged".
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = draw_spec(draw)
    own = [t for t, same in zip(spec.tables, spec.same_as, strict=True) if same is None]
    num_rows = sum(table["num_embeddings"] for table in own)
    row_bytes = 8 * (1 + _OPTIMIZERS[spec.optimizer])
    num_bytes = sum(table["num_embeddings"] * table["embedding_dim"] * row_bytes for table in own)
    budget = int(num_bytes * draw.choice([0.3, 0.6, 0.9])) + 4 * num_rows
    done: list[str] = []
    try:
        plain, resident = (Run(spec, is_accelerated=each) for each in (False, True))
        tiered = Run(spec, is_accelerated=True, budget=budget)
        for _ in range(draw.randint(5, 25)):
            thing, choice = draw.choice(_THINGS), draw.getrandbits(32)
            batches = [draw_calls(draw, spec, generator) for _ in range(3)]
            done.append(thing.__name__)
            results = []
            for run in (plain, resident, tiered):
                found = thing(run, batches, random.Random(choice)) or []
                results.append([each.detach() for each in (*found, *run.model.parameters())])
            if not all(each.isfinite().all() for each in results[0]):
                return "diverged"
            assert list(map(len, results)) == [len(results[0])] * 3
            for of_plain, of_resident, of_tiered in zip(*results, strict=True):
                torch.testing.assert_close(of_resident, of_plain, **_TOLERANCE)
                assert torch.equal(of_tiered, of_resident)
    except BudgetTooSmall:
        return "budget"
    except Exception as error:
        error.add_note(f"program {seed}, {spec}: {', '.join(done)}")
        raise
    return "equal"
