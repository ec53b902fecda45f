"""A second thread beside training: evaluation reads right rows, and training is refused."""

import threading

import pytest
import torch

from recsys.embeddings import SGD, HotColdEmbeddingBag

NUM_ROWS, DIM = 400, 4
IDS = torch.arange(12).view(3, 4)


def build(budget=6000, **options):
    rows = torch.arange(NUM_ROWS * 1.0).unsqueeze(1).repeat(1, DIM)
    return HotColdEmbeddingBag(
        NUM_ROWS, DIM, mode="sum", _weight=rows, optimizer=SGD(lr=1.0), budget=budget, **options
    )


def begin(function):
    """Start a thread; returns it, and the list that gets its result or its error."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def evaluate(module):
    with torch.no_grad():
        return module(IDS)


def test_evaluation_in_a_second_thread_waits_for_the_end_of_an_update(monkeypatch):
    module = build()
    [tiers] = module.tiers()
    mark_updated, begun = tiers.mark_updated, []

    def mark_beside_evaluation(*arguments):
        begun.append(begin(lambda: evaluate(module)))
        begun[0][0].join(0.2)
        mark_updated(*arguments)

    monkeypatch.setattr(tiers, "mark_updated", mark_beside_evaluation)
    module(IDS).sum().backward()
    thread, found = begun[0]
    thread.join()

    expected = IDS.float().sum(1, keepdim=True).repeat(1, DIM) - 4
    assert torch.equal(found[0], expected)
    assert torch.equal(evaluate(module), expected)


def test_training_waits_for_an_evaluation_that_reads_rows_in_a_second_thread(monkeypatch):
    module = build()
    [tiers] = module.tiers()
    look_up, waited = tiers.residency.look_up, []

    def look_up_beside_training(*arguments):
        thread, _ = begin(lambda: module(IDS + 100).sum().backward())
        thread.join(0.2)
        waited.append((thread, thread.is_alive()))
        return look_up(*arguments)

    monkeypatch.setattr(tiers.residency, "look_up", look_up_beside_training)
    found = evaluate(module)
    thread, had_to_wait = waited[0]
    thread.join()

    assert had_to_wait
    assert torch.equal(found, IDS.float().sum(1, keepdim=True).repeat(1, DIM))
    assert torch.equal(module.weight.detach()[100:112, 0], torch.arange(99.0, 111.0))


@pytest.mark.parametrize("budget", [None, 6000])
def test_backward_in_a_second_thread_is_refused_while_one_updates_the_rows(budget):
    module = build(budget)
    other = torch.ones(1, requires_grad=True) * 1.0
    begun = []

    def train_beside(_gradient):
        thread, found = begin(lambda: module(IDS[1:2]).sum().backward())
        thread.join()
        begun.append(found)

    other.register_hook(train_beside)
    pooled = module(IDS[:1])  # its backward runs first, that of `other` after it
    (other.sum() + pooled.sum()).backward()

    [[error]] = begun
    assert isinstance(error, RuntimeError)
    assert "backward in another thread is updating the rows of the same tables" in str(error)
    expected = torch.arange(12.0)
    expected[:4] -= 1
    assert torch.equal(module.weight.detach()[:12, 0], expected)


def test_threads_may_train_one_after_the_other():
    module = build()

    for first in (0, 1):
        thread, found = begin(lambda ids=IDS[first : first + 1]: module(ids).sum().backward())
        thread.join()
        assert found == [None]

    expected = torch.arange(12.0)
    expected[:8] -= 1
    assert torch.equal(module.weight.detach()[:12, 0], expected)
