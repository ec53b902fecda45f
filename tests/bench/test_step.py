import pytest
import torch

from recsys.batch import Batch, JaggedIds
from recsys.bench import step
from recsys.bench.step import bench_step
from recsys.config import ModelConfig, TrainConfig
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig


@pytest.fixture
def short_turns(monkeypatch):
    """An untimed step before a timed one, where a small mini-batch has sixteen; in this process."""
    monkeypatch.setattr(step, "steps_of_turn", lambda _: 1)
    monkeypatch.setattr(step, "_close_rounds", lambda _: 3)
    monkeypatch.setattr(step, "in_own_process", lambda function, *arguments: function(*arguments))


def test_rounds_are_shared_out_among_processes_and_all_of_them_count(monkeypatch):
    calls = []

    def in_own_process(function, *arguments):
        assert function is step._measure
        calls.append(arguments)
        batch_size, precisions, num_rounds, _, _ = arguments
        num_close = num_rounds * step._close_rounds(batch_size)
        providers = ("recsys", "torch", "fbgemm", "kernels", "dense", "dense_eager")
        close = {"recsys": 5.0, "kernels": 3.0, "dense": 2.0}
        return (
            {
                (precision, provider): [float(len(calls))] * num_rounds
                for precision in precisions
                for provider in providers
            },
            {
                (precision, provider): [seconds] * num_close
                for precision in precisions
                for provider, seconds in close.items()
            },
        )

    monkeypatch.setattr(step, "in_own_process", in_own_process)

    rows = list(bench_step([4, 8], ["fp32"], num_rounds=7, num_processes=3, table_sizes=[5]))

    assert calls == [
        (size, ["fp32"], share, [5], seed)
        for size in (4, 8)
        for seed, share in enumerate((2, 2, 3))
    ]
    assert [
        (row.provider, row.median, row.num_runs) for row in rows if row.metric == "time_over_dense"
    ] == [("recsys", 2.5, 224), ("torch", 1.0, 7), ("fbgemm", 1.0, 7), ("kernels", 1.5, 224)] * 2
    assert {row.num_runs for row in rows if row.metric != "time_over_dense"} == {7}
    assert [row.median for row in rows if row.metric == "time"] == [2e3] * 6 + [5e3] * 6

    calls.clear()
    rows = list(bench_step([4], ["fp32"], num_rounds=2, num_processes=3))
    assert [share for _, _, share, _, _ in calls] == [1, 1]
    # 64 close rounds are of two states of the machine: too few for an interval.
    assert {row.low for row in rows if row.metric == "time_over_dense"} == {None}


@pytest.mark.outside_ci
@pytest.mark.slow
@pytest.mark.usefixtures("short_turns")
def test_every_provider_is_measured_in_every_case():
    pytest.importorskip("torchrec", exc_type=ImportError)

    rows = list(bench_step([16], ["fp32", "bf16"], num_rounds=1, table_sizes=[50] * 26))

    cases = [f"B=16,D=16,optimizer=sgd,precision={precision}" for precision in ("fp32", "bf16")]
    whole = ["recsys", "torch", "fbgemm"]
    providers = [*whole, "kernels", "dense", "dense_eager", "gemm_torch", "gemm_onednn"]
    assert [(row.case, row.provider) for row in rows if row.metric == "time"] == [
        (case, provider) for case in cases for provider in providers
    ]
    assert [row.case for row in rows if row.metric == "speed_over_dense_eager"] == cases
    assert [row.case for row in rows if row.metric == "speed_over_fp32"] == cases[1:]
    times = {(row.case, row.provider): row.median for row in rows if row.metric == "time"}
    ratios = {(row.case, row.provider, row.metric): row.median for row in rows}
    for case in cases:
        for name in ("torch", "fbgemm"):
            assert ratios[case, name, "time_over_dense"] == pytest.approx(
                times[case, name] / times[case, "dense"]
            )
        for other in ("torch", "fbgemm"):
            assert ratios[case, "recsys", f"speed_over_{other}"] == pytest.approx(
                times[case, other] / times[case, "recsys"]
            )
        for name in ("recsys", "kernels"):
            assert ratios[case, name, "time_over_dense"] > 0
    close = [("recsys", "time_over_dense"), ("kernels", "time_over_dense")]
    for row in rows:
        assert row.median > 0
        assert row.num_runs == (3 if (row.provider, row.metric) in close else 1)


def test_the_bare_kernels_do_what_a_step_of_the_embeddings_does():
    tables = [
        TableConfig(name=name, num_embeddings=9, embedding_dim=16, feature_names=(name,))
        for name in ("a", "b")
    ]
    embeddings = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1))
    before = [table.detach().clone() for table in embeddings.table_weights()]
    values = torch.tensor([[3, 5, 3], [0, 8, 1]])
    ids = JaggedIds.from_one_hot(["a", "b"], values)
    batch = Batch(torch.zeros(3, 13), ids, torch.zeros(3))
    with torch.no_grad():
        expected = embeddings(ids).values()

    class Dense:
        pooled = torch.zeros(3, 2, 16)

        def step(self, pooled):
            assert torch.equal(pooled.detach().flatten(1), expected)
            pooled.sum().backward()

    step._KernelsStep(embeddings, [batch], Dense())()

    for table, old, rows in zip(embeddings.table_weights(), before, values, strict=True):
        counts = torch.bincount(rows, minlength=9).unsqueeze(1)
        torch.testing.assert_close(table.detach(), old - 0.1 * counts)


class Watched(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators called, with the dtypes of what they return and the sizes they take."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if isinstance(result, torch.Tensor):
            self.dtypes.setdefault(name, set()).add(result.dtype)
        if name in ("mm", "bmm", "_linear_pointwise"):
            left, right = args[0], args[1]
            columns = right.shape[0] if name == "_linear_pointwise" else right.shape[-1]
            self.products += left.numel() * columns
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_floor_makes_the_products_of_a_dense_step_in_its_precision(precision):
    layers = [(13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)]
    every_product = [3 * inputs * outputs for inputs, outputs in layers]
    every_product[0] = 2 * 13 * 512  # no gradient of the dense features
    interaction = 2 * 27 * 27 * 16
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    for products in step._gemm_steps(8, precision).values():
        with Watched() as watched:
            products()

        assert watched.products == 8 * (sum(every_product) + interaction)
        assert all(dtypes == {dtype} for dtypes in watched.dtypes.values())


def test_floors_and_dense_steps_have_the_sizes_of_the_default_model(monkeypatch):
    pytest.importorskip("torchrec", exc_type=ImportError)
    model = ModelConfig(embedding_dim=8, dense_arch=(32, 8), over_arch=(4, 1))
    monkeypatch.setattr(step, "TrainConfig", lambda: TrainConfig(model=model))
    layers = [(13, 32), (32, 8), (8 + 27 * 26 // 2, 4), (4, 1)]
    every_product = 3 * sum(inputs * outputs for inputs, outputs in layers) - 13 * 32

    for products in step._gemm_steps(5, "fp32").values():
        with Watched() as watched:
            products()
        assert watched.products == 5 * (every_product + 2 * 27 * 27 * 8)
    for dense_step in step._dense_steps(5, "fp32").values():
        dense_step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dense_steps_multiply_in_their_precision_and_update(precision):
    pytest.importorskip("torchrec", exc_type=ImportError)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    for dense_step in step._dense_steps(8, precision).values():
        with Watched() as watched:
            dense_step()

        assert watched.dtypes["bmm"] == {dtype}
        assert watched.dtypes["add_"] == {torch.float32}  # parameters move, in float32


def test_a_whole_step_trains():
    pytest.importorskip("fbgemm_gpu")

    whole_steps = step._whole_steps(8, "fp32", [20] * 26, num_rounds=4)

    assert set(whole_steps) == {"recsys", "torch", "fbgemm"}
    for name, whole in whole_steps.items():
        assert all(batch.sparse_features._offsets is not None for batch in whole.batches)
        before = [value.clone() for value in whole.model.state_dict().values()]
        whole()

        changed = [
            not torch.equal(old, new)
            for old, new in zip(before, whole.model.state_dict().values(), strict=True)
        ]
        assert all(changed), name
