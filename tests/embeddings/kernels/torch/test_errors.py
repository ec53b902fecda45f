import pytest
import torch

from recsys.embeddings.kernels.torch.errors import NO_ROW, DeferredErrors


def explain_as(name):
    return lambda position: LookupError(f"{name}, position {position}")


def test_a_report_that_was_read_serves_a_later_one_while_others_wait():
    errors = DeferredErrors(torch.device("cpu"))
    errors.report(explain_as("first"))
    errors.poll()

    errors.report(explain_as("second"))
    errors.note(NO_ROW, torch.tensor([False, True]))
    errors.report(explain_as("third"))

    with pytest.raises(LookupError, match="third, position 1"):
        errors.poll()


def test_a_report_makes_no_memory_if_one_was_read(monkeypatch):
    errors = DeferredErrors(torch.device("cpu"))
    errors.report(explain_as("first"))
    errors.poll()

    with monkeypatch.context() as patch:
        patch.delattr(torch, "empty")
        errors.report(explain_as("second"))

    errors.note(NO_ROW, torch.tensor([True]))
    errors.report(explain_as("third"))
    with pytest.raises(LookupError, match="third, position 0"):
        errors.poll()
