"""The dense part replayed as CUDA graphs, for which a stand-in runs on the CPU."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)

from recsys import DLRM, DLRMTrain
from recsys.embeddings.baselines import TorchEmbeddingBags
from recsys.embeddings.lookup.result_memory import result_in
from recsys.embeddings.optimizer import SGD, Adagrad, Adam
from recsys.embeddings.table import TableConfig
from recsys.models import dlrm
from recsys.pipeline import Hotline, LookAhead, RandomDrop, Sequential, TrainPipeline
from tests.captured_training import (
    DENSE,
    B,
    D,
    add_dropout,
    dense_parameters,
    make_batch,
    make_model,
    make_tables,
    require_equal,
    train,
)
from tests.fake_graphs import capture_on_cpu


@pytest.fixture
def made(monkeypatch):
    """The captures; the CPU stands in for the device."""
    return capture_on_cpu(monkeypatch)


def require_same(batches, *, num_replays, **options):
    expected = train(batches, capture=False, **options)
    found = train(batches, capture=True, **options)
    require_equal(found, expected)
    assert found.captured.num_replays == num_replays
    assert expected.captured is None
    return found


@pytest.fixture
def batches():
    return [make_batch(seed) for seed in range(6)]


@pytest.mark.in_ci("None-None-SGD", "8500-Sequential()-Adagrad", "8500-LookAhead(depth=2)-Adam")
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)], ids=str)
@pytest.mark.parametrize(
    ("budget", "schedule"), [(None, None), (8_500, Sequential()), (8_500, LookAhead(2))], ids=str
)
def test_replayed_steps_are_those_op_by_op(made, batches, budget, schedule, optimizer, dense):
    found = require_same(
        batches,
        num_replays=6,
        dense=dense,
        optimizer=optimizer,
        budget=budget,
        schedule=schedule,
    )

    assert len(made) == 1
    assert found.captured.reason == ""


@pytest.mark.parametrize("kind", ["dcn_v2", "deepfm", "masked_transformer"])
def test_every_model_of_pooled_vectors_is_captured(made, batches, kind):
    require_same(batches, kind=kind, num_replays=6)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("budget", [None, 8_500])
def test_rows_may_wait_for_their_optimizer(batches, budget):
    require_same(batches, auto_apply=False, budget=budget, num_replays=6)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("batch_size", [None, B])
def test_a_smaller_last_mini_batch_runs_op_by_op_without_a_warning(batches, batch_size):
    again = [*batches, make_batch(7, 3), *batches, make_batch(8, 1)]

    require_same(again, batch_size=batch_size, num_replays=12)


@pytest.mark.usefixtures("made")
def test_evaluation_between_steps_runs_op_by_op(batches):
    models = [make_model(), make_model()]
    pipelines = [
        TrainPipeline(
            model, torch.optim.SGD(dense_parameters(model), lr=0.1), capture=model is models[1]
        )
        for model in models
    ]
    iterators = [iter(batches), iter(batches)]
    found = [[], []]
    for number in range(6):
        for side, model in enumerate(models):
            model.train(number % 2 == 0)
            found[side].append(pipelines[side].progress(iterators[side]))
            with torch.no_grad():
                found[side].append(model(batches[0]))

    for (loss, output), (other, other_output) in zip(*found, strict=True):
        assert torch.equal(loss, other)
        assert all(map(torch.equal, output, other_output))
    assert pipelines[1].captured.num_replays == 3


@pytest.mark.usefixtures("made")
def test_an_evaluation_in_another_thread_does_not_replay_the_graphs_of_a_step(batches, monkeypatch):
    expected = train(batches, capture=False)
    evaluated = []

    @contextmanager
    def result_in_beside_evaluation(memory):
        with result_in(memory):
            yield
        if memory is not None and not evaluated:
            evaluated.append(None)
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    def evaluate():
        with torch.no_grad():
            evaluated.append(models[0](batches[5])[0])

    monkeypatch.setattr(dlrm, "result_in", result_in_beside_evaluation)
    models = []

    found = train(batches, capture=True, change=models.append)

    require_equal(found, expected)
    assert found.captured.num_replays == 6
    assert evaluated[1].isfinite()


@pytest.mark.usefixtures("made")
def test_parts_of_mini_batches_run_op_by_op():
    batches = [make_batch(seed, 16) for seed in range(10)]
    schedule = Hotline(learning_steps=4)

    with pytest.warns(UserWarning, match="run op by op now, because Hotline trains on parts"):
        found = train(batches, capture=True, budget=8_500, schedule=schedule)
    expected = train(batches, capture=False, budget=8_500, schedule=schedule)

    require_equal(found, expected)
    num_split = found.pipeline.popular_split.num_split
    assert num_split > 1
    assert found.captured.num_replays == 10 - num_split


@pytest.mark.usefixtures("made")
def test_precision_is_that_of_the_forward(batches):
    def bf16(model):
        def forward(batch):
            with torch.autocast("cpu", torch.bfloat16):
                return model(batch)

        return forward

    found = require_same(batches, custom_model_fwd=bf16, num_replays=6)

    plain = train(batches, capture=False)
    assert not torch.equal(found.outputs[0][2], plain.outputs[0][2])


@pytest.mark.usefixtures("made")
def test_random_draws_are_those_of_steps_op_by_op(batches):
    found = require_same(batches, change=add_dropout, num_replays=6)

    plain = train(batches, capture=False)
    assert not torch.equal(found.outputs[0][2], plain.outputs[0][2])


@pytest.mark.usefixtures("made")
def test_frozen_parameters_and_rows_stay(batches):
    def freeze(model):
        model.model.dense_arch.requires_grad_(False)
        model.model.sparse_arch.requires_grad_(False)

    found = require_same(batches, change=freeze, num_replays=6)

    before = make_model().state_dict()
    same = {name for name, value in found.weights.items() if torch.equal(value, before[name])}
    assert same == {name for name in before if "over_arch" not in name}


@pytest.mark.usefixtures("made")
def test_parameters_of_the_model_itself_and_unused_ones_are_trained(batches):
    class Scaled(DLRM):
        def head(self, embedded_dense, embedded_sparse):
            return super().head(embedded_dense, embedded_sparse) * self.scale

    def add(model):
        model.model.__class__ = Scaled
        model.model.scale = nn.Parameter(torch.ones(()))
        model.model.unused = nn.Parameter(torch.ones(3))

    found = require_same(batches, change=add, num_replays=6)

    assert found.weights["model.scale"] != 1
    assert found.weights["model.unused"].tolist() == [1, 1, 1]


def _name_a_module_twice(model):
    model.model.another_name = model.model.over_arch.model[0]


def _share_a_parameter(model):
    first, second = (each._linear for each in model.model.dense_arch.model._mlp)
    first.weight = nn.Parameter(torch.rand(D, 5))
    first.bias = second.bias
    second.weight = nn.Parameter(torch.rand(D, D))


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("change", [_name_a_module_twice, _share_a_parameter])
def test_shared_modules_and_parameters_are_trained(batches, change):
    losses = []
    for capture in (False, True):
        model = make_model()
        change(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        losses.append([loss for loss, _ in pipeline.steps(batches)])
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert parameter is before[name]

    assert pipeline.captured.num_replays == len(batches)
    assert all(map(torch.equal, *losses))


@pytest.mark.usefixtures("made")
def test_tables_of_torch_and_projected_ones_are_trained(batches):
    def build():
        torch.manual_seed(0)
        tables = make_tables()
        tables[0] = TableConfig(
            name="t_cat_0", num_embeddings=300, embedding_dim=2, feature_names=("cat_0",)
        )
        return DLRMTrain(DLRM(TorchEmbeddingBags(tables), 5, [8, D], [8, 1]))

    require_same(batches, build=build, num_replays=6)


@pytest.mark.usefixtures("made")
def test_a_second_forward_of_a_step_runs_op_by_op(batches):
    def twice(model):
        def forward(batch):
            loss, output = model(batch)
            return loss + model(batch)[0], output

        return forward

    require_same(batches, custom_model_fwd=twice, num_replays=6)


def _scaled(model, loss):
    return loss * 3


def _regularized(model, loss):
    parameters = dense_parameters(model)
    return loss + 0.1 * sum(each.square().sum() for each in parameters)


def _with_a_hook(model, loss):
    loss.register_hook(lambda gradient: gradient * 2)
    return loss


def _without_the_loss(model, loss):
    return dense_parameters(model)[0].square().sum()


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("auto_apply", [True, False])
@pytest.mark.parametrize("change", [_scaled, _regularized, _with_a_hook, _without_the_loss])
def test_what_is_made_from_the_loss_is_trained_on(batches, change, auto_apply):
    def wrap(model):
        def forward(batch):
            loss, output = model(batch)
            return change(model, loss), output

        return forward

    options = {"custom_model_fwd": wrap, "auto_apply": auto_apply}
    found = require_same(batches, num_replays=6, **options)

    plain = train(batches, capture=False, auto_apply=auto_apply)
    assert any(not torch.equal(found.weights[name], each) for name, each in plain.weights.items())


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("auto_apply", [True, False])
def test_a_loss_of_the_vectors_updates_rows_once(batches, auto_apply):
    """Its gradient and that of the graph reach the lookup in one pass, as they do op by op."""

    def wrap(model):
        kept = []
        model.model.sparse_arch.register_forward_hook(lambda _, __, out: kept.append(out))

        def forward(batch):
            loss, output = model(batch)
            return loss + kept.pop().square().mean(), output

        return forward

    options = {"custom_model_fwd": wrap, "auto_apply": auto_apply, "optimizer": Adagrad(lr=0.1)}
    require_same(batches, num_replays=6, **options)


@pytest.mark.usefixtures("made")
def test_a_loss_for_each_sample_is_summed(batches):
    def change(model):
        model.loss_fn = nn.BCEWithLogitsLoss(reduction="none")

    require_same(batches, change=change, num_replays=6)


@pytest.mark.usefixtures("made")
def test_a_share_of_a_whole_mini_batch_weighs_its_loss(batches):
    found = require_same(batches, batch_size=2 * B, num_replays=6)

    plain = train(batches, capture=False)
    assert not torch.equal(found.outputs[-1][0], plain.outputs[-1][0])


def _double(model):
    dense_parameters(model)[0].register_hook(lambda gradient: gradient * 2)


def _halve(model):
    def halve(parameter):
        parameter.grad *= 0.5

    dense_parameters(model)[1].register_post_accumulate_grad_hook(halve)


def _step_in_backward(model):
    last = [dense_parameters(model)[-1]]
    apply_optimizer_in_backward(torch.optim.SGD, last, {"lr": 0.3})


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("change", [_double, _halve, _step_in_backward])
def test_hooks_of_parameters_are_called(batches, change):
    found = require_same(batches, change=change, num_replays=6)

    plain = train(batches, capture=False)
    assert any(not torch.equal(found.weights[name], each) for name, each in plain.weights.items())


def _keep(model):
    """A hook of the embeddings that keeps what they give, as for an analysis."""
    model.kept = []
    model.model.sparse_arch.register_forward_hook(
        lambda _, __, out: model.kept.append(out.detach())
    )


def _square(model):
    model.model.sparse_arch.register_forward_hook(lambda _, __, out: out * out)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("change", [_keep, _square])
def test_hooks_of_the_embeddings_have_vectors_of_their_own(batches, change):
    found = []
    for capture in (False, True):
        model = make_model()
        change(model)
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, capture=capture)
        losses = [loss for loss, _ in pipeline.steps(batches)]
        found.append([*losses, *getattr(model, "kept", ())])

    assert pipeline.captured.num_replays == len(batches)
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("made")
def test_lookups_before_that_of_the_model_have_vectors_of_their_own(batches):
    teacher = make_model()

    def compare(model):
        def forward(batch):
            with torch.no_grad():
                target = teacher.model.sparse_arch(batch.sparse_features)
            loss, output = model(batch)
            return loss + target.square().mean(), output

        return forward

    expected = train(batches, capture=False, custom_model_fwd=compare)
    found = train(batches, capture=True, custom_model_fwd=compare)

    assert found.captured.num_replays == len(batches)
    require_equal(found, expected)


def test_the_model_is_an_ordinary_one_outside_of_steps(made, batches):
    model = make_model()
    pipeline = TrainPipeline(model, torch.optim.SGD(dense_parameters(model), lr=0.1), capture=True)
    pipeline.progress(iter(batches))

    loss, _ = model(batches[0])
    loss.backward()

    assert model.run_dense is None
    assert pipeline.captured.num_replays == 1
    assert len(made) == 1


@pytest.mark.usefixtures("made")
def test_a_step_that_raises_leaves_the_model_as_it_was(batches):
    batches[1].sparse_features.values()[0] = 9999
    model = make_model()
    pipeline = TrainPipeline(model, torch.optim.SGD(dense_parameters(model), lr=0.1), capture=True)
    iterator = iter(batches)
    pipeline.progress(iterator)

    with pytest.raises(Exception, match="9999"):
        pipeline.progress(iterator)

    assert model.run_dense is None
    pipeline.progress(iterator)
    assert pipeline.captured.num_replays == 2


def test_skipping_trains_on_the_same_samples(made, batches):
    found = require_same(
        [make_batch(seed, 16) for seed in range(12)],
        skip=RandomDrop(0.25, seed=3),
        num_replays=9,
    )

    assert found.captured.reason == ""
    assert len(made) == 1
