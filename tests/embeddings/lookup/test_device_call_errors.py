"""Invalid ids of calls of many modules on a device; the CPU stands in for one."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.lookup.abstract_tables import check_input
from recsys.errors import IdOutOfRange
from tests.embeddings.lookup.models_on_device import (
    DIM,
    NUM_ROWS,
    make_ids,
    train,
    trained_bags,
)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("has_grad", [True, False])
def test_an_id_that_is_no_row_is_named_by_a_later_call_and_no_row_changes(device, has_grad):
    model, optimizer = trained_bags(device)
    before = copy.deepcopy(model.state_dict())
    ids = make_ids(2).to(device)
    ids[2, 5] = NUM_ROWS + 3

    with torch.set_grad_enabled(has_grad):
        loss = model(ids)
    message = rf"table 'bags.2', sample 5: id {NUM_ROWS + 3} is not in \[0, {NUM_ROWS}\)"

    def go_on():
        if has_grad:
            loss.backward()
            optimizer.step()
        check_input(model)

    with pytest.raises(IdOutOfRange, match=message):
        go_on()
    after = model.state_dict()
    assert all(torch.equal(after[name], rows) for name, rows in before.items())
    optimizer.zero_grad()
    train(model, optimizer, make_ids(3).to(device))
    check_input(model)


def test_the_first_call_with_such_an_id_is_named_and_places_are_of_the_shape(device):
    embedding = nn.Sequential(*(nn.Embedding(NUM_ROWS, DIM) for _ in range(3))).to(device)
    recsys.accelerate(
        embedding, optimizer=torch.optim.SGD(embedding.parameters(), lr=0.1), always=True
    )
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    bad = ids.clone()
    bad[1, 2] = -1

    embedding[0](ids)
    embedding[1](bad)
    embedding[2](bad - 5)

    with pytest.raises(IdOutOfRange, match=r"table '1', input\[1, 2\]: id -1 is not in"):
        check_input(embedding)


@pytest.mark.parametrize("num_calls", [1, 4])
def test_ids_that_were_overwritten_since_are_named_by_their_place(device, num_calls):
    model, _ = trained_bags(device)
    ids = make_ids(2).to(device)
    ids[0, 5] = NUM_ROWS
    for bag, column in zip(model.bags[:num_calls], ids, strict=False):
        bag(column.unsqueeze(1))

    ids.zero_()

    with pytest.raises(IdOutOfRange, match="position 5 of the input of a lookup was not a row"):
        errors_on(device).check()


def test_a_call_by_the_general_path_is_not_named_for_ids_of_calls_before_it(device):
    model, _ = trained_bags(device)
    ids = make_ids(2).to(device)
    ids[0, 5] = NUM_ROWS
    model.bags[0](ids[0].unsqueeze(1))
    ids.zero_()

    def go_on():
        model.bags[1](ids[0, :2].unsqueeze(1), per_sample_weights=ids.new_ones(2, 1).float())
        errors_on(device).check()

    with pytest.raises(IdOutOfRange, match="position 5 of the input of a lookup was not a row"):
        go_on()


def test_calls_before_a_report_keep_no_model_alive(device):
    model, _ = trained_bags(device)
    model.bags[0](make_ids(2)[0].unsqueeze(1).to(device))
    known = weakref.ref(model)

    del model
    gc.collect()

    assert known() is None


def test_a_step_polls_once_and_reports_once(monkeypatch, device):
    model, optimizer = trained_bags(device)
    errors = errors_on(device)
    polls, reports, poll, report = [], [], errors.poll, errors.report
    monkeypatch.setattr(errors, "poll", lambda: polls.append(poll()))
    monkeypatch.setattr(errors, "report", lambda explain: reports.append(report(explain)))

    model(make_ids(2).to(device)).backward()

    assert (len(polls), len(reports)) == (1, 1)
    optimizer.zero_grad()
