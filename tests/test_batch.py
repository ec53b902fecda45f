import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.batch import Batch, JaggedIds, PooledEmbeddings
from recsys.errors import MalformedBags

BAGS = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=2, max_size=2), max_size=4
)


def jagged(bags_by_key, **options):
    """From {"key": [[ids of sample 0], ...], ...}."""
    flat = [bag for bags in bags_by_key.values() for bag in bags]
    values = torch.tensor([row for bag in flat for row in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *[len(bag) for bag in flat]]).cumsum(0)
    return JaggedIds(list(bags_by_key), values, offsets, **options)


@given(BAGS)
def test_bags_come_back_from_the_layout(bags_of_samples):
    bags = {key: [sample[n] for sample in bags_of_samples] for n, key in enumerate("ab")}

    ids = jagged(bags)

    assert ids.stride() == len(bags_of_samples)
    for key, expected in bags.items():
        part = ids[key]
        offsets = part.offsets().tolist()
        values = part.values().tolist()
        assert [values[a:b] for a, b in pairwise(offsets)] == expected
    assert ids.lengths().tolist() == [len(bag) for key in "ab" for bag in bags[key]]


def test_ids_made_one_hot_are_known_to_be_wherever_they_go():
    ids = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2], [3, 4]]))
    others = JaggedIds(["a", "b"], ids.values(), ids.offsets())

    assert ids.is_known_one_hot()
    assert ids.to("meta").is_known_one_hot()
    assert not others.is_known_one_hot()


@pytest.mark.parametrize("shape", [(2, 3), (2, 0)])
def test_offsets_of_one_hot_ids_are_made_where_they_go(monkeypatch, shape):
    """Only the values are copied, so that a GPU is sent half as much."""
    ids = JaggedIds.from_one_hot(["a", "b"], torch.zeros(shape, dtype=torch.int32))
    copied = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copied.append(tensor) or tensor)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *args, **kw: copied.append(tensor) or to(tensor, *args, **kw),
    )

    moved = ids.pin_memory().to("meta", non_blocking=True)

    assert [each.data_ptr() for each in copied] == [ids.values().data_ptr()] * 2
    assert (moved.keys(), moved.stride()) == (ids.keys(), ids.stride())
    for name in ("values", "offsets"):
        ours, theirs = getattr(moved, name)(), getattr(ids, name)()
        assert (ours.shape, ours.dtype, ours.device.type) == (theirs.shape, theirs.dtype, "meta")


def test_offsets_of_one_hot_ids_are_made_when_they_are_asked_for(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "arange", None)
        ids = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]]))
        assert ids.to("cpu").stride() == ids.select(torch.tensor([2, 0, 1])).stride() == 3

    with torch.inference_mode():
        assert ids.offsets().tolist() == list(range(7))
    assert not ids.offsets().is_inference()
    assert ids.lengths().tolist() == [1] * 6


def _differentiate(function):
    torch.func.grad(lambda weights: (weights * function()).sum())(torch.ones(7))


def _export(function):
    class Scaled(torch.nn.Module):
        def forward(self, weights):
            return weights * function()

    torch.export.export(Scaled(), (torch.ones(7),))


@pytest.mark.parametrize("run", [_differentiate, _export])
def test_offsets_first_asked_for_in_a_trace_are_made_again_after_it(run):
    ids = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]]))

    run(ids.offsets)

    assert pickle.loads(pickle.dumps(ids)).offsets().tolist() == list(range(7))
    assert ids.offsets().numpy().tolist() == list(range(7))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_first_asked_for_in_a_capture_do_not_wait_for_its_replay():
    ids = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]], device="cuda"))
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        ids.offsets()

    assert ids.offsets().tolist() == list(range(7))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_hot_ids_on_a_gpu_are_those_of_the_host():
    ids = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2], [3, 4]]))

    moved = ids.pin_memory().to("cuda", non_blocking=True)

    assert moved.offsets().tolist() == ids.offsets().tolist()
    assert moved.values().tolist() == ids.values().tolist()


def test_one_hot_ids_are_taken_without_a_copy():
    ids_FB = torch.arange(6).view(2, 3)

    ids = JaggedIds.from_one_hot(["a", "b"], ids_FB)

    assert ids.values().data_ptr() == ids_FB.data_ptr()
    assert ids.offsets().tolist() == list(range(7))
    assert ids["b"].values().tolist() == [3, 4, 5]


def test_weights_go_with_their_lookups():
    ids = jagged({"a": [[1], [2, 3]], "b": [[], [4]]}, weights=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    assert ids["a"].weights_or_none().tolist() == [1.0, 2.0, 3.0]
    assert ids["b"].weights_or_none().tolist() == [4.0]


def test_torchrec_sees_the_same_bags_in_the_same_memory():
    pytest.importorskip("torchrec", exc_type=ImportError)
    ids = jagged({"a": [[1], [2, 3]], "b": [[], [4]]}, weights=torch.rand(4))

    theirs = ids.to_torchrec()
    back = JaggedIds.from_torchrec(theirs)

    assert theirs.keys() == ["a", "b"]
    assert theirs.stride() == 2
    assert theirs["a"].to_dense()[1].tolist() == [2, 3]
    assert theirs.values().data_ptr() == ids.values().data_ptr() == back.values().data_ptr()
    assert back.offsets().tolist() == ids.offsets().tolist()
    assert back.weights_or_none().data_ptr() == ids.weights_or_none().data_ptr()


def test_pooled_embeddings_are_found_by_name():
    values = torch.arange(10.0).view(2, 5)

    pooled = PooledEmbeddings(["a", "b"], [2, 3], values)

    assert pooled["b"].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert {key: tuple(part.shape) for key, part in pooled.to_dict().items()} == {
        "a": (2, 2),
        "b": (2, 3),
    }
    with pytest.raises(KeyError, match="no feature 'c'"):
        pooled["c"]


def test_a_batch_moves_as_a_whole():
    batch = Batch(torch.zeros(2, 3), jagged({"a": [[1], [2]]}), torch.ones(2))

    moved = batch.to("meta")

    assert {moved.dense_features.device.type, moved.labels.device.type} == {"meta"}
    assert moved.sparse_features.values().device.type == "meta"
    assert len(batch) == 2
    assert batch.sparse_features.to("cpu") is batch.sparse_features


def test_samples_are_chosen_in_any_order():
    ids = JaggedIds.from_one_hot(["a", "b"], torch.arange(8).view(2, 4))

    chosen = ids.select(torch.tensor([3, 1]))

    assert chosen.is_known_one_hot()
    assert chosen.values().tolist() == [3, 1, 7, 5]
    nothing = ids.select(torch.empty(0, dtype=torch.int64))
    assert nothing.stride() == 0
    assert len(nothing.values()) == 0


IDS = torch.tensor([1, 2])
OFFSETS = torch.tensor([0, 1, 2])
ONE = JaggedIds(["a"], IDS, OFFSETS)


def lay_out(keys, values, offsets):
    JaggedIds(keys, torch.tensor(values), torch.tensor(offsets))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JaggedIds(None, IDS, OFFSETS), "keys must be a list of feature names, got None"),
        (lambda: JaggedIds([5], IDS, OFFSETS), "keys must be a list of feature names"),
        (lambda: JaggedIds("ab", IDS, OFFSETS), "keys must be a list of feature names, got 'ab'"),
        (lambda: JaggedIds(["a"], [1, 2], OFFSETS), "values must be a torch.Tensor, got list"),
        (lambda: JaggedIds(["a"], IDS.numpy(), OFFSETS), "values must be a torch.Tensor, got nda"),
        (lambda: JaggedIds(["a"], None, OFFSETS), "values must be a torch.Tensor, got NoneType"),
        (lambda: JaggedIds(["a"], IDS, OFFSETS, "x"), "weights must be a torch.Tensor, got str"),
        (lambda: JaggedIds.from_one_hot(["a"], [[1]]), "rows_FB must be a torch.Tensor, got list"),
        (lambda: JaggedIds.from_one_hot(5, IDS), "keys must be a list of feature names, got 5"),
        (
            lambda: JaggedIds.from_one_hot(["a", "a"], torch.tensor([[1], [2]])),
            r"keys must be distinct, got \['a', 'a'\]",
        ),
        (
            lambda: Batch(torch.ones(3, 1), ONE, torch.ones(2)),
            r"dense_features must be a tensor of 2 samples, as sparse_features has, got \(3, 1\)",
        ),
        (
            lambda: Batch(torch.ones(2, 1), ONE, None),
            "labels must be a tensor of 2 samples",
        ),
        (
            lambda: JaggedIds(["a"], IDS, OFFSETS, IDS),
            "weights must be floating point, got torch.i",
        ),
        (lambda: JaggedIds.concatenate([]), "give at least one input, got none"),
        (lambda: Batch.concatenate([]), "give at least one mini-batch, got none"),
        (lambda: lay_out([], [1], [0, 1]), "at least one feature"),
        (lambda: lay_out(["a", "a"], [1, 2], [0, 1, 2]), "distinct"),
        (lambda: lay_out(["a"], [[1]], [0, 1]), r"values must be \(N,\) int32 or int64"),
        (lambda: lay_out(["a"], [1.0], [0, 1]), r"values must be \(N,\) int32 or int64"),
        (lambda: lay_out(["a", "b"], [1, 2], [0, 2]), r"F \* B \+ 1 entries with F = 2, got 2"),
        (lambda: lay_out(["a"], [1, 2], [0, 1]), "end at N = 2, got 0 and 1"),
        (lambda: lay_out(["a"], [1, 2], [1, 2]), "start at 0"),
        (lambda: lay_out(["a", "b"], [1, 2], [0, 2, 1, 1, 2]), "at feature 'a', sample 1"),
        (lambda: JaggedIds(["a"], IDS, OFFSETS.int()), "int64 like values"),
        (lambda: JaggedIds(["a"], IDS, OFFSETS, torch.ones(3)), "one entry per lookup"),
        *[
            (
                lambda dtype=dtype: JaggedIds.from_one_hot(["a"], torch.ones(1, 2, dtype=dtype)),
                f"got {dtype}",
            )
            for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16)
        ],
        (
            lambda: JaggedIds.concatenate([ONE, JaggedIds(["b"], IDS, OFFSETS)]),
            "keys must be the same",
        ),
        (
            lambda: JaggedIds.concatenate([ONE, JaggedIds(["a"], IDS, OFFSETS, torch.ones(2))]),
            "only some of the inputs have weights",
        ),
        (
            lambda: JaggedIds.from_one_hot([], torch.ones(0, 2, dtype=torch.int64)),
            "keys must name at least one feature, got none",
        ),
    ],
)
def test_arguments_of_other_types_or_sizes_are_refused_by_name(make, message):
    with pytest.raises(MalformedBags, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: PooledEmbeddings(["a", "b"], [2, 3], torch.zeros(2, 4)), ValueError, "values"),
        (lambda: PooledEmbeddings(["a", "b"], [5], torch.zeros(2, 5)), ValueError, "per key"),
        (lambda: PooledEmbeddings(["a", "a"], [1, 1], torch.zeros(2, 2)), ValueError, "keys"),
        (lambda: ONE["c"], KeyError, "'c'"),
    ],
)
def test_pooled_features_are_refused_by_name(make, error, name):
    with pytest.raises(error, match=name):
        make()


@pytest.mark.parametrize("samples", [torch.tensor([False, True]), torch.tensor(1), IDS.double()])
@pytest.mark.parametrize("values", [IDS, IDS.int()])
def test_samples_are_chosen_by_number_alone(samples, values):
    one_hot = JaggedIds.from_one_hot(["a"], values.view(1, 2))
    bags = JaggedIds(["a"], values, OFFSETS.to(values.dtype))

    for ids in (one_hot, bags):
        with pytest.raises(MalformedBags, match=r"give mask\.nonzero\(\)\[:, 0\]"):
            ids.select(samples)
    with pytest.raises(MalformedBags, match=r"give mask\.nonzero\(\)\[:, 0\]"):
        Batch(torch.ones(2, 1), bags, torch.ones(2)).select(samples)


def test_joined_samples_are_those_of_the_parts():
    values, offsets = torch.tensor([4, 9, 9, 0, 2]), torch.tensor([0, 1, 3, 3, 4, 4, 5])
    jagged = JaggedIds(["a", "b"], values, offsets, torch.arange(5.0))
    one_hot = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 6]]))

    for ids in (jagged, one_hot):
        chosen = [torch.tensor(samples, dtype=torch.int64) for samples in ([1], [], [2, 0])]
        parts = [ids.select(samples) for samples in chosen]
        joined, expected = JaggedIds.concatenate(parts), ids.select(torch.tensor([1, 2, 0]))
        assert torch.equal(joined.values(), expected.values())
        assert torch.equal(joined.offsets(), expected.offsets())
        assert joined.offsets().dtype == joined.values().dtype
        assert joined.is_known_one_hot() == ids.is_known_one_hot()
    assert JaggedIds.concatenate([jagged, jagged]).weights_or_none().tolist() == [
        *(0, 1, 2, 0, 1, 2),
        *(3, 4, 3, 4),
    ]
    mixed = JaggedIds.concatenate([one_hot, JaggedIds(["a", "b"], values, offsets)])
    assert mixed.values().tolist() == [1, 2, 3, 4, 9, 9, 4, 5, 6, 0, 2]


def test_weights_of_samples_go_with_them():
    ids = JaggedIds.from_one_hot(["a"], torch.tensor([[1, 2, 3]]))
    batch = Batch(torch.zeros(3, 1), ids, torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]))
    plain = Batch(torch.zeros(3, 1), ids, torch.zeros(3))

    assert batch.select(torch.tensor([2, 0])).weights.tolist() == [4, 1]
    assert batch.to("meta").weights.is_meta
    assert Batch.concatenate([plain, batch]).weights.tolist() == [1, 1, 1, 1, 2, 4]
    assert Batch.concatenate([plain, plain]).weights is None
    with pytest.raises(MalformedBags, match="weights must be a tensor of 3 samples"):
        Batch(torch.zeros(3, 1), ids, torch.zeros(3), torch.ones(2))
