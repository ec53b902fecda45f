"""The rows that a checkpoint must save: those that differ from the last one's, and few others."""

import pytest
import torch

from recsys.embeddings import SGD, Adam, PartialRowWiseAdam
from recsys.embeddings.rows.grads import bind_table
from recsys.embeddings.update import changed_rows
from recsys.embeddings.update.changed_rows import ChangedRows, rows_of
from tests.unit.embeddings.model import TOO_MANY_ROWS, Tables

pytestmark = pytest.mark.filterwarnings(f"ignore:{TOO_MANY_ROWS}")
SIZES, FEATURES = [70, 200, 64], [0, 1, 2, 1]


def recorded(formula=Adam(lr=0.1), **settings):  # noqa: B008
    tables = Tables(SIZES, FEATURES, 5, formula, **settings)
    for number in range(0 if tables.fetcher else len(SIZES)):
        bind_table(tables.group, number, is_sparse=True)
    [update] = tables.optimizer.updates
    update.changed = ChangedRows(tables.group)
    return tables, update.changed


@pytest.mark.parametrize("how", ["alone", "threads", "device"])
@pytest.mark.parametrize("num_slots", [None, 30], ids=["resident", "slots"])
@pytest.mark.parametrize("formula", [SGD(lr=0.1), PartialRowWiseAdam(lr=0.1)], ids=["SGD", "Adam"])
def test_all_rows_that_differ_are_marked_and_no_others(formula, num_slots, how, monkeypatch):
    device = None
    if how == "device":
        pytest.importorskip("triton")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if how == "threads":
        monkeypatch.setattr(changed_rows, "_MIN_SHARED_IDS", 0)
        monkeypatch.setattr(changed_rows, "num_parts", lambda: 2)
    tables, changed = recorded(formula, num_slots=num_slots, device=device)
    generator = torch.Generator().manual_seed(0)
    before = tables.values()
    for number in range(3):
        for _ in range(2):
            ids = torch.randint(0, 64, (40,), generator=generator)
            offsets = torch.arange(0, 40, 5) if number else None
            tables.train(tables.bags(ids, offsets))
        after, marked = tables.values(), [rows_of(bits) for bits in changed.take()]
        for table, rows in enumerate(marked):
            differs = (after[table, "rows"] != before[table, "rows"]).any(1)
            assert rows.tolist() == differs.nonzero().flatten().tolist()
        before = after
