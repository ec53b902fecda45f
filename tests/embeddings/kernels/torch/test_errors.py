import threading
from types import SimpleNamespace

import pytest
import torch

from recsys.embeddings.kernels.torch import errors as module
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


def test_a_second_thread_may_read_reports_meanwhile(monkeypatch):
    """As it does where evaluation runs beside training: all modules of a device share them."""
    errors, has_arrived, threads = DeferredErrors(torch.device("cpu")), module._has_arrived, []

    def poll_beside(report):
        if not threads:
            threads.append(threading.Thread(target=errors.poll, daemon=True))
            threads[0].start()
            threads[0].join(0.2)
        return has_arrived(report)

    monkeypatch.setattr(module, "_has_arrived", poll_beside)
    errors.report(explain_as("first"))

    errors.poll()

    threads[0].join()
    assert len(errors._spare) == 1


def test_a_check_waits_for_all_streams_before_it_copies_what_they_have_recorded(monkeypatch):
    errors, order = DeferredErrors(torch.device("cpu")), []
    first = errors.first
    errors.first = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(device.type))

    def report(explain):
        order.append("report")
        errors._reports.append(module._Report(first, None, explain))

    monkeypatch.setattr(errors, "report", report)
    errors.expect(lambda: None)

    errors.check()

    assert order == ["cuda", "report", "report"]
