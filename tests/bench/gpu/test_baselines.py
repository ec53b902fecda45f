import pytest
import torch

from recsys.bench.gpu.cases import Model
from recsys.bench.gpu.host_tables import HostTables
from recsys.bench.gpu.providers import AbstractProvider, PlainLoop, Setting, steps_of_turn
from recsys.bench.gpu.samples import MiniBatches, Stream, num_distinct
from recsys.bench.gpu.tables import Tables
from recsys.errors import BudgetTooSmall

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stream():
    return Stream((900, 3, 70), num_fill_samples=256)


@pytest.fixture
def setting(stream):
    model = Model("kaggle", 8, 32, "fp32")
    return Setting(model, CPU, MiniBatches(stream, 32, CPU), steps_of_turn(32, is_quick=True))


@pytest.fixture
def tables(stream):
    """Tables on the host and on the device with the same rows."""
    found = Tables(stream, 8, CPU)
    with torch.no_grad():
        for table, rows in zip(found.resident.table_weights(), found.host.tables(), strict=True):
            table.copy_(rows)
    return found


@pytest.mark.parametrize("name", ["plain", "hybrid", "gathered"])
def test_a_baseline_makes_the_step_of_the_resident_tables(name, tables, setting):
    before = tables.host.rows.clone()
    expected = PlainLoop(setting, tables.resident, [tables.resident.row_optimizer])
    expected_loss = expected.step()
    updated = torch.cat(list(tables.resident.table_weights())).detach().clone()
    with torch.no_grad():  # the plain bags are on these tables
        for table, rows in zip(
            tables.resident.table_weights(), before.split([900, 3, 70]), strict=True
        ):
            table.copy_(rows)
    module = getattr(tables, name)()
    of_rows = module if name == "gathered" else module.optimizer()

    loop = PlainLoop(setting, module, [of_rows], are_ids_on_host=name == "hybrid")
    loss = loop.step()

    found = torch.cat(list(module.table_weights())).detach()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(found, updated, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found, before)
    assert torch.equal(tables.host.rows, before) == (name == "plain")


def test_a_loss_that_is_not_finite_is_an_error(tables, setting):
    with torch.no_grad():
        tables.resident.table_weights()[1].fill_(float("inf"))
    loop = PlainLoop(setting, tables.resident, [])

    with pytest.raises(RuntimeError, match="the loss is nan"):
        loop.turn()


def test_a_slow_provider_makes_few_steps(tables, setting, monkeypatch):
    made = []
    loop = PlainLoop(
        setting._replace(steps=steps_of_turn(32, is_quick=False)),
        tables.resident,
        [tables.resident.row_optimizer],
    )
    real = loop.step
    monkeypatch.setattr(loop, "step", lambda: made.append(1) or real())
    assert isinstance(loop, AbstractProvider)

    assert loop.turn().num_steps == 16
    assert len(made) == 4 + 16
    monkeypatch.setattr("recsys.bench.gpu.providers._SLOW_SECONDS", 0.0)
    assert loop.turn().num_steps == 2
    assert len(made) == 4 + 16 + 2 + 2


def test_host_tables_are_written_everywhere_and_shared(monkeypatch):
    monkeypatch.setattr("recsys.bench.gpu.host_tables._BLOCK_ROWS", 100)
    host = HostTables([90, 250, 1], 4)

    first, again = host.tables(), host.tables()

    assert (host.rows != 0).all(dim=1).all()
    assert [each.shape for each in first] == [(90, 4), (250, 4), (1, 4)]
    first[1][7] = 5
    assert (again[1][7] == 5).all()
    assert (host.rows[97] == 5).all()
    assert first[1].untyped_storage().nbytes() == first[1].nbytes
    assert first[1]._version != again[1]._version


def test_slots_are_filled_and_their_rows_need_to_be_written_back(tables, setting, stream):
    tiered = tables.tiered("0.5", setting.batches)

    [tiers] = tiered.module.tiers()
    rows, _ = tiers.hot.dirty()
    assert tiered.budget == 973 * 8 * 4 // 2
    assert tiers.hot.num_bytes == tiered.held_bytes <= tiered.budget
    assert len(rows) == num_distinct(stream.fill_rows) < tiers.hot.num_slots


def test_a_floor_has_room_for_a_mini_batch_and_less_has_not(tables, setting):
    floor = tables.budget("floor", setting.batches)

    assert 973 * 4 < floor < tables.everything
    with pytest.raises(BudgetTooSmall):
        tables.tiered("0.15", setting.batches)


def test_slots_are_kept_for_a_case_of_the_same_share_which_trains_on_new_samples(tables, setting):
    tiered = tables.tiered("0.5", setting.batches)
    numbers = tiered.numbers(32)

    assert [next(numbers) for _ in range(3)] == [0, 1, 2]
    assert tables.tiered("0.5", setting.batches) is tiered
    assert next(tiered.numbers(64)) == 2  # its first 32 samples were left out
    assert next(numbers) == 6
    assert tables.tiered("0.4", setting.batches) is not tiered
    again = tables.tiered("0.4", setting.batches)
    tables.forget_tiered()
    assert tables.tiered("0.4", setting.batches) is not again
    floor = tables.tiered("floor", setting.batches)
    assert tables.tiered("floor", setting.batches) is not floor
