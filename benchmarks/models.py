"""Models of plain PyTorch, before and after `recsys.accelerate`.

    kind                modules with the tables                                  several ids
    classic, bags       nn.EmbeddingBag, one for each table, sparse gradients    offsets
    embeddings          nn.Embedding, one for each table, sparse gradients       padded, summed
    dense-embeddings    the same with dense gradients
    lazy-adam           the same with Adam, accelerated with lazy_adam=True
    collection          torchrec.EmbeddingBagCollection                          lengths
    tbsm                nn.Embedding, one for each table, sparse gradients       all kept

`classic` is the whole DLRM, with 26 bags of Kaggle's sizes, and `tbsm` the whole sequence model,
which looks up all steps of a history; the others have one linear layer after their tables. Ids are
skewed: `E * u**8` for a uniform u, so that few rows get most lookups.

    provider     what a step does
    torch        the model as it was written
    recsys       the same model after `recsys.accelerate(model, optimizer=optimizer)`
    in_slots     the same with a budget, if a share of the bytes of rows and state is given
    no_tables    the same model with constant vectors instead of lookups; they get a gradient

A step is `zero_grad`, forward, loss, backward and the optimizer's step. In evaluation it is a
forward without gradients, after a few steps of training. Table time is the time of a
step minus that of `no_tables`. Providers take turns in one process. Ratios are ratios of medians,
with intervals for which rounds are drawn in pairs. The time of a plain step with dense gradients
grows with the tables, so such models have fewer rounds and one warm-up round.

With --against, the accelerated models of both commits are compared, with all of their tables:
every kind with one-hot ids at B=2048, and single kinds with B=128, several ids, Adagrad, or in
evaluation.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from functools import partial
from itertools import cycle, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from model import kaggle_sizes
from torch import Tensor, nn
from turns import (
    Row,
    bench_arguments,
    compare_checkouts,
    in_own_process,
    median_of_ratios,
    prepare_process,
    ratio,
    rows_by_provider,
    show_rows,
    steps_of_turn,
    take_turns,
    timed,
)

import recsys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

_WHOLE_KINDS = ("classic", "tbsm")
_SHALLOW_KINDS = ("bags", "embeddings", "dense-embeddings", "lazy-adam", "collection")
_ALL_KINDS = (*_WHOLE_KINDS, *_SHALLOW_KINDS)
_DENSE_GRADIENTS = ("collection", "dense-embeddings", "lazy-adam")
_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}

_TAOBAO_TABLE_SIZES = (987_994, 4_162_024, 9_439)  # users, items, categories
_DIM, _NUM_DENSE = 16, 13
_NUM_STEPS = 20  # of the history of tbsm
# Ids of a sample, by table: of the user, and of the history with the candidate after it.
_STEPS = (1, _NUM_STEPS + 1, _NUM_STEPS + 1)
_MEAN_LENGTH = 8  # ids per sample and table, if they are jagged

_NUM_BATCHES = 64
_FEWEST_ROUNDS = 6
_NUM_WARM_UP_ROUNDS = 4
_NUM_STEPS_BEFORE = 4  # untimed steps of a turn, which restore the provider's own cache contents

_SLOWER = 0.97

_Seconds = dict[str, list[float]]


class _Case(NamedTuple):
    """A model and its training data.

    Attributes:
        kind: A kind from the table above.
        optimizer: Name of the optimizer of all parameters.
        batch_size: B.
        table_sizes: Rows of each table.
        is_jagged: Whether a sample has several ids per table.
        share: The budget's share of the bytes of rows and state; 0 for none.
        is_evaluation: Whether a step is a forward without gradients.
        device: Where the model and its mini-batches are.
    """

    kind: str
    optimizer: str
    batch_size: int
    table_sizes: Sequence[int]
    is_jagged: bool = False
    share: float = 0.0
    is_evaluation: bool = False
    device: str = "cpu"

    @property
    def has_dense_gradients(self) -> bool:
        """Whether a plain step writes whole tables."""
        return self.kind in _DENSE_GRADIENTS and not self.is_evaluation

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        num_arrays = 1 + (self.optimizer == "adagrad")
        return int(self.share * sum(self.table_sizes) * _DIM * 4 * num_arrays)

    def __str__(self) -> str:
        found = f"model={self.kind},B={self.batch_size},D={_DIM},optimizer={self.optimizer}"
        if self.is_evaluation:
            found += ",pass=evaluation"
        if self.device != "cpu":
            found += f",device={self.device}"
        if self.kind == "classic":
            return found
        ids = "steps" if self.kind == "tbsm" else "jagged" if self.is_jagged else "one-hot"
        return f"{found},T={len(self.table_sizes)},ids={ids}"


def bench_models(
    batch_sizes: Sequence[int],
    optimizers: Sequence[str],
    *,
    num_rounds: int,
    kinds: Collection[str],
    max_rows: int,
    table_counts: Sequence[int],
    ids: Sequence[str],
    share: float,
    is_evaluation: bool,
    device: str,
) -> Iterator[Row]:
    """Measure every case.

    Args:
        batch_sizes: B of the classic model.
        optimizers: "sgd" or "adagrad"; the kind "lazy-adam" has Adam.
        num_rounds: Rounds that count; each provider takes one turn in each.
        kinds: Kinds from the table above.
        max_rows: Rows of every table of the shallow kinds; also caps the sizes of the others.
        table_counts: Numbers of tables of the shallow kinds.
        ids: "one-hot" or "jagged": ids of a sample and table in the shallow kinds.
        share: The budget of `in_slots`, as a share of the bytes of rows and state; 0 leaves it out.
        is_evaluation: Whether evaluation is measured in place of training.
        device: "cpu" or "cuda", where models and mini-batches are.
    """
    of_whole = {
        "classic": (batch_sizes, kaggle_sizes(max_rows)),
        "tbsm": ((256, 2048), _TAOBAO_TABLE_SIZES),
    }
    case_of = partial(_Case, share=share, is_evaluation=is_evaluation, device=device)
    whole = [
        case_of(kind, optimizer, batch_size, tuple(min(size, max_rows) for size in table_sizes))
        for kind, (sizes, table_sizes) in of_whole.items()
        if kind in kinds
        for batch_size, optimizer in product(sizes, optimizers)
    ]
    others = [
        case_of(kind, optimizer, batch_size, (max_rows,) * count, per_sample == "jagged")
        for kind, count, per_sample, batch_size in product(
            _SHALLOW_KINDS, table_counts, ids, (128, 2048)
        )
        if kind in kinds
        for optimizer in (("adam",) if kind == "lazy-adam" else optimizers)
    ]
    yield from measure_cases([*whole, *others], num_rounds=num_rounds)


def measure_cases(cases: Sequence[_Case], *, num_rounds: int) -> Iterator[Row]:
    """Measure cases, and the median of the shallow kinds; print where recsys is slower."""
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {}
    slower = []
    for case in cases:
        rounds = num_rounds
        if case.has_dense_gradients:
            rounds = max(_FEWEST_ROUNDS, num_rounds // 5)
        seconds = in_own_process(_measure, case, rounds)
        rows = _rows_of(case, seconds)
        yield from rows
        slower += [
            f"{row.case}: {row.median:.2f} times as fast as torch [{row.low:.2f}, {row.high:.2f}]"
            for row in rows
            if row.metric == "speed_over_torch" and row.high is not None and row.high < _SLOWER
        ]
        if case.kind in _SHALLOW_KINDS:
            pairs.setdefault(case.kind, []).append((seconds["recsys"], seconds["torch"]))
    for kind, of_kind in pairs.items():
        yield median_of_ratios(
            "models", f"model={kind},D={_DIM}", "recsys", "speed_over_torch", pairs=of_kind
        )
    if slower:
        print("slower than plain PyTorch:\n" + "\n".join(slower), file=sys.stderr)


def _rows_of(case: _Case, seconds: _Seconds) -> list[Row]:
    ratio_of = partial(ratio, "models", str(case))
    times = {provider: [1e3 * each for each in spent] for provider, spent in seconds.items()}
    rows = rows_by_provider("models", str(case), "time", "ms", times)
    ours, plain = seconds["recsys"], seconds["torch"]
    for provider in ("recsys", *(["in_slots"] if case.share else [])):
        values = seconds[provider]
        rows.append(ratio_of(provider, "speed_over_torch", values=values, baseline=plain))
    if case.kind in _WHOLE_KINDS:
        without = seconds["no_tables"]
        plain_tables, our_tables = (
            [step - rest for step, rest in zip(each, without, strict=True)]
            for each in (plain, ours)
        )
        # `ratio` divides the baseline by the values.
        metric = "table_time_over_torch"
        rows.append(ratio_of("recsys", metric, values=plain_tables, baseline=our_tables))
    return rows


def _measure(case: _Case, num_rounds: int) -> _Seconds:
    """Seconds per step, by provider and round."""
    prepare_process()
    torch.manual_seed(0)
    batches = _batches(case, _NUM_BATCHES)
    models = {"torch": _model(case.kind, case.table_sizes).to(case.device)}
    if case.kind in _WHOLE_KINDS:
        models["no_tables"] = _without_tables(case)
    models["recsys"] = copy.deepcopy(models["torch"])
    if case.share:
        models["in_slots"] = copy.deepcopy(models["torch"])
    steps = {}
    for provider, model in models.items():
        optimizer = _optimizer(case, model)
        if provider in ("recsys", "in_slots"):
            _accelerate(case, model, optimizer, case.budget if provider == "in_slots" else None)
        steps[provider] = _step(case, model, optimizer, batches)
    if case.has_dense_gradients:
        num_before, num_timed, num_warm_up_rounds = 1, 1, 1
    else:
        num_timed = steps_of_turn(case.batch_size)
        num_before, num_warm_up_rounds = min(num_timed, _NUM_STEPS_BEFORE), _NUM_WARM_UP_ROUNDS
    turns = {
        provider: timed(step, num_before=num_before, num_timed=num_timed, device=case.device)
        for provider, step in steps.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch's Adagrad
        return take_turns(turns, num_rounds, num_warm_up_rounds=num_warm_up_rounds)


def _optimizer(case: _Case, model: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if case.kind == "lazy-adam" else _OPTIMIZERS[case.optimizer]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
    return optimizer


def _accelerate(
    case: _Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: int | None = None,
    **more: Any,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy_adam warns that its rule is another
        recsys.accelerate(
            model, optimizer=optimizer, budget=budget, lazy_adam=case.kind == "lazy-adam", **more
        )


def _step(
    case: _Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[_TableBatch],
) -> Callable[[], None]:
    following = cycle(batches)

    def train() -> None:
        batch = next(following)
        optimizer.zero_grad()
        logits = model(batch.dense, batch.inputs)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def evaluate() -> None:
        batch = next(following)
        with torch.no_grad():
            model(batch.dense, batch.inputs)

    if not case.is_evaluation:
        return train
    for _ in range(_NUM_STEPS_BEFORE):
        train()
    model.eval()
    return evaluate


# Models and mini-batches


class _TableBatch(NamedTuple):
    """Dense features (B, 13), inputs of the tables, labels (B,)."""

    dense: Tensor
    inputs: Any
    labels: Tensor


def _model(kind: str, table_sizes: Sequence[int]) -> nn.Module:
    """A model of plain PyTorch."""
    if kind == "classic":
        return _Classic(table_sizes)
    if kind == "tbsm":
        return _TimeBased(table_sizes)
    return _Shallow(_TABLES[kind](table_sizes), len(table_sizes))


def _without_tables(case: _Case) -> nn.Module:
    """A whole model with constant vectors instead of lookups."""
    num_tables = len(case.table_sizes)
    model = _model(case.kind, [1] * num_tables).to(case.device)
    lengths = [(each,) for each in _STEPS] if case.kind == "tbsm" else [()] * num_tables
    model.tables = _Constants(
        [torch.randn(case.batch_size, *length, _DIM).to(case.device) for length in lengths]
    )
    return model


def _batches(case: _Case, num_batches: int) -> list[_TableBatch]:
    """The mini-batches of a case."""
    found = []
    for seed in range(num_batches):
        generator = torch.Generator().manual_seed(seed)
        ids, all_lengths = [], []
        fixed = _STEPS if case.kind == "tbsm" else (1,) * len(case.table_sizes)
        for num_rows, length in zip(case.table_sizes, fixed, strict=True):
            lengths = torch.full((case.batch_size,), length)
            if case.is_jagged:
                lengths = torch.randint(
                    1, 2 * _MEAN_LENGTH, (case.batch_size,), generator=generator
                )
            drawn = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
            ids.append((num_rows * drawn**8).long().to(case.device))
            all_lengths.append(lengths.to(case.device))
        labels = (torch.rand(case.batch_size, generator=generator) < 0.25).float()
        dense = torch.rand(case.batch_size, _NUM_DENSE, generator=generator)
        inputs = _INPUTS.get(case.kind, _as_matrices)(ids, all_lengths)
        found.append(_TableBatch(dense.to(case.device), inputs, labels.to(case.device)))
    return found


def _with_offsets(ids: list[Tensor], lengths: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(each, its.cumsum(0) - its) for each, its in zip(ids, lengths, strict=True)]


def _as_matrices(ids: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
    """The columns of one matrix if each sample has one id; else matrices padded with id 0."""
    if all(bool((its == 1).all()) for its in lengths):
        return list(torch.stack(ids, dim=1).unbind(1))
    found = []
    for each, its in zip(ids, lengths, strict=True):
        is_id = torch.arange(int(its.max()), device=its.device) < its.unsqueeze(1)
        padded = torch.zeros_like(is_id, dtype=torch.int64)
        found.append(padded.masked_scatter(is_id, each))
    return found


def _as_steps(ids: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
    return [each.view(len(its), -1) for each, its in zip(ids, lengths, strict=True)]


def _as_features(ids: list[Tensor], lengths: list[Tensor]) -> Any:
    import torchrec  # importing it takes seconds

    keys = [f"f_{number}" for number in range(len(ids))]
    return torchrec.KeyedJaggedTensor(keys, torch.cat(ids), lengths=torch.cat(lengths))


def _weight(num_rows: int) -> Tensor:
    """Rows (E, D) that are not random: drawing 26 tables of a million rows takes seconds."""
    return torch.linspace(-0.1, 0.1, num_rows * _DIM).view(num_rows, _DIM)


class _Bags(nn.Module):
    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, _DIM, mode="sum", sparse=True, _weight=_weight(size))
            for size in table_sizes
        )

    def forward(self, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [bag(*each) for bag, each in zip(self.bags, inputs, strict=True)]


class _Embeddings(nn.Module):
    def __init__(
        self, table_sizes: Sequence[int], *, sparse: bool = True, keeps_steps: bool = False
    ) -> None:
        super().__init__()
        self.keeps_steps = keeps_steps
        padding = None if keeps_steps else 0
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, _DIM, padding_idx=padding, sparse=sparse, _weight=_weight(size))
            for size in table_sizes
        )

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        found = [each(ids) for each, ids in zip(self.embeddings, inputs, strict=True)]
        if self.keeps_steps:
            return found
        return [each.sum(1) if each.dim() == 3 else each for each in found]


class _Collection(nn.Module):
    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        import torchrec

        self.collection = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t_{number}",
                    num_embeddings=size,
                    embedding_dim=_DIM,
                    feature_names=[f"f_{number}"],
                )
                for number, size in enumerate(table_sizes)
            ]
        )

    def forward(self, inputs: Any) -> list[Tensor]:
        return [self.collection(inputs).values()]


class _Constants(nn.Module):
    """Returns the same vectors for every mini-batch; they get a gradient."""

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, inputs: object) -> list[Tensor]:
        return [each.detach().requires_grad_() for each in self.vectors]


class _Classic(nn.Module):
    """The DLRM of Naumov et al. (2019) as most people write it: one bag for each feature."""

    pairs: Tensor

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables: nn.Module = _Bags(table_sizes)
        num_vectors = len(table_sizes) + 1
        self.bottom = _mlp(_NUM_DENSE, 512, 256, 64, _DIM)
        self.top = _mlp(_DIM + num_vectors * (num_vectors - 1) // 2, 512, 256, 1)[:-1]
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        dense = self.bottom(dense)
        vectors = torch.cat([dense, *self.tables(inputs)], dim=1).view(len(dense), -1, _DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([dense, pairs], dim=1))
        return logits.squeeze(1)


class _TimeBased(nn.Module):
    """TBSM on users, items and categories, with upstream's sizes for the Taobao data.

    One lookup of a table gets all steps of all samples. Histories are full.
    """

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        from recsys.models.dlrm import OverArch
        from recsys.models.tbsm import TimeSeriesLayer, Tower

        self.tables: nn.Module = _Embeddings(table_sizes, keeps_steps=True)
        self.tower = Tower(1, len(_STEPS), [_DIM], [15, 15])
        self.head = TimeSeriesLayer(_NUM_STEPS, 15)
        self.top = OverArch(30, [60, 1])

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        users, items, categories = self.tables(inputs)
        fields = torch.stack([users.expand_as(items), items, categories], dim=2)
        position = torch.linspace(0, 1, _NUM_STEPS + 1).repeat(len(dense)).unsqueeze(1)
        vectors = self.tower(position, fields.flatten(0, 1)).view(len(dense), _NUM_STEPS + 1, -1)
        history, candidate = vectors[:, :-1], vectors[:, -1]
        context = self.head(history, candidate)
        logits: Tensor = self.top(torch.cat([context, candidate], dim=1))
        return logits.squeeze(1)


class _Shallow(nn.Module):
    """Tables and one linear layer."""

    def __init__(self, tables: nn.Module, num_tables: int) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(_DIM * num_tables, 1)

    def forward(self, dense: Tensor, inputs: Any) -> Tensor:
        found = self.tables(inputs)
        logits: Tensor = self.top(found[0] if len(found) == 1 else torch.cat(found, dim=1))
        return logits.squeeze(1)


_TABLES: dict[str, Callable[[Sequence[int]], nn.Module]] = {
    "bags": _Bags,
    "collection": _Collection,
    "embeddings": _Embeddings,
    "dense-embeddings": partial(_Embeddings, sparse=False),
    "lazy-adam": partial(_Embeddings, sparse=False),
}
_INPUTS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "classic": _with_offsets,
    "bags": _with_offsets,
    "collection": _as_features,
    "tbsm": _as_steps,
}


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


def _users(num_rows: int) -> list[_Case]:
    """A case for each kind of user: sparse, dense gradients, lazy Adam, collections."""
    return [
        _Case(kind, "adam" if kind == "lazy-adam" else "sgd", 2048, (num_rows,) * 26)
        for kind in _SHALLOW_KINDS
    ]


def _cases() -> list[_Case]:
    """The cases of --against."""
    tables, kaggle = (200_000,) * 26, kaggle_sizes(200_000)
    return [
        *_users(200_000),
        _Case("classic", "sgd", 128, kaggle),
        _Case("classic", "sgd", 2048, kaggle),
        _Case("tbsm", "sgd", 256, (200_000, 200_000, 9_439)),
        _Case("bags", "sgd", 128, tables[:4]),
        _Case("bags", "sgd", 128, tables),
        _Case("bags", "sgd", 1024, tables),
        _Case("bags", "adagrad", 2048, tables[:4], is_jagged=True),
        _Case("embeddings", "sgd", 128, tables[:4], is_jagged=True),
        _Case("collection", "adagrad", 128, tables, is_jagged=True),
        _Case("collection", "sgd", 2048, tables[:1]),
        _Case("collection", "sgd", 2048, tables, is_evaluation=True),
    ]


def make_turn(case: _Case, is_tiny: bool) -> Callable[[], float]:
    """A turn of --against."""
    if is_tiny:
        case = case._replace(table_sizes=tuple(min(size, 1000) for size in case.table_sizes))
    model = _model(case.kind, case.table_sizes)
    optimizer = _optimizer(case, model)
    has_always = "always" in inspect.signature(recsys.accelerate).parameters
    _accelerate(case, model, optimizer, **({"always": True} if has_always else {}))
    step = _step(case, model, optimizer, _batches(case, 16))
    num_timed = 2 * steps_of_turn(case.batch_size)
    return timed(step, num_before=num_timed // 2, num_timed=num_timed)


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__, has_against=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--optimizers", nargs="+", default=[*_OPTIMIZERS], choices=[*_OPTIMIZERS])
    parser.add_argument("--models", nargs="+", default=list(_ALL_KINDS), choices=_ALL_KINDS)
    parser.add_argument("--table-counts", type=int, nargs="+", help="default: 1 4 26")
    parser.add_argument("--ids", nargs="+", default=["one-hot", "jagged"], help="of a table")
    parser.add_argument("--share", type=float, default=0.0, help="budget of in_slots; 0: none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--evaluation", action="store_true", help="measure forwards without gradients, not steps"
    )
    parser.add_argument(
        "--users", action="store_true", help="only a case for each kind of user, B=2048, 26 tables"
    )
    options = parser.parse_args()
    if options.against is not None:
        rows = compare_checkouts("models", make_turn, _cases(), options)
    elif options.users:
        cases = _users(1000 if options.quick else 1_000_000)
        rows = measure_cases(cases, num_rounds=3 if options.quick else 30)
    else:
        rows = bench_models(
            options.batch_sizes,
            options.optimizers,
            kinds=options.models,
            num_rounds=3 if options.quick else 30,
            max_rows=1000 if options.quick else 1_000_000,
            table_counts=options.table_counts or ((1, 4) if options.quick else (1, 4, 26)),
            ids=options.ids,
            share=options.share,
            is_evaluation=options.evaluation,
            device=options.device,
        )
    show_rows(rows, options)


if __name__ == "__main__":
    main()
