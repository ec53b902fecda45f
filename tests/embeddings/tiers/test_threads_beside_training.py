"""A second thread may evaluate beside training, and threads may train one after the other."""

import threading

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


def test_threads_may_train_one_after_the_other():
    module = build()

    for first in (0, 1):
        thread, found = begin(lambda ids=IDS[first : first + 1]: module(ids).sum().backward())
        thread.join()
        assert found == [None]

    expected = torch.arange(12.0)
    expected[:8] -= 1
    assert torch.equal(module.weight.detach()[:12, 0], expected)


def test_evaluation_in_a_second_thread_finds_each_row_as_it_was_or_as_it_is():
    module, is_done = build(), threading.Event()

    def evaluate():
        found = []
        while not is_done.is_set():
            with torch.no_grad():
                found.append(module(torch.arange(NUM_ROWS).view(-1, 1))[:, 0])
        return torch.stack(found)

    thread, found = begin(evaluate)
    for step in range(100):
        module(IDS + 12 * (step % 30)).sum().backward()
    is_done.set()
    thread.join()

    num_updates = torch.arange(NUM_ROWS).float() - found[0]
    assert (num_updates.diff(dim=0) >= 0).all()
    assert ((num_updates >= 0) & (num_updates <= 4) & (num_updates == num_updates.round())).all()
