"""Models of many separate bags: what a step does for one of them is independent of their number."""

import torch
from torch import nn

import recsys
from recsys.embeddings.tiers import transfers
from recsys.embeddings.tiers.ticket import Ticket
from recsys.pipeline import LookAhead, TrainPipeline

NUM_TABLES, NUM_ROWS = 20, 200


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, 4, mode="sum", sparse=True) for _ in range(NUM_TABLES)
        )

    def forward(self, ids_T4):
        pooled = [bag(ids) for bag, ids in zip(self.bags, ids_of(ids_T4), strict=True)]
        return torch.cat(pooled, 1).square().mean(), None


def ids_of(ids_T4):
    """Bags of 1, 2, 3, ... ids: with as many ids, all tables would make one claim."""
    return [ids[:, None].expand(-1, 1 + number) for number, ids in enumerate(ids_T4)]


def make_pipeline():
    model = Bags()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, budget="48KiB")
    return TrainPipeline(
        model,
        optimizer,
        schedule=LookAhead(depth=2),
        ids=lambda batch: {f"bags.{number}": ids for number, ids in enumerate(ids_of(batch))},
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, NUM_ROWS, (NUM_TABLES, 4), generator=generator) for _ in range(12)]


def test_a_lookup_compares_its_ids_with_those_of_its_table(monkeypatch):
    asked, is_for = [], Ticket.is_for
    monkeypatch.setattr(
        Ticket, "is_for", lambda *args, **options: asked.append(0) or is_for(*args, **options)
    )
    pipeline = make_pipeline()

    num_steps = len(list(pipeline.steps(batches())))

    assert pipeline.mean_depth > 1.5
    assert num_steps == 12
    # On the CPU the queue looks twice at up to two mini-batches.
    assert NUM_TABLES * num_steps <= len(asked) <= 4 * NUM_TABLES * num_steps


def test_the_rows_of_a_mini_batch_are_moved_together(monkeypatch):
    told = []

    class Executor(transfers.ThreadPoolExecutor):
        def submit(self, function, count):
            told.append(count)
            return super().submit(function, count)

    monkeypatch.setattr(transfers, "ThreadPoolExecutor", Executor)
    pipeline = make_pipeline()

    num_steps = len(list(pipeline.steps(batches())))

    assert len(told) <= num_steps
    assert max(told) > NUM_TABLES // 2
