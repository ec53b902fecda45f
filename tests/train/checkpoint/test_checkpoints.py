import errno
import shutil
import warnings

import pytest
import torch

from recsys.errors import CheckpointError
from recsys.train.checkpoint import load_checkpoint, newest, save_checkpoint
from recsys.train.checkpoint.format import (
    PieceWriter,
    manifest_numbers,
    read_blocks,
    read_manifest,
    read_piece,
)
from tests.train.checkpoint.trainings import (
    begin,
    load,
    make_training,
    require_equal,
    require_restores,
    save_and_wait,
    saved,
    set_block_bytes,
)


@pytest.fixture(params=["resident", "host", "file"])
def tier(request):
    return request.param


def pieces_of(folder):
    return [read_piece(folder, name) for name in read_manifest(folder).pieces]


def rows_of(folder, piece):
    """The rows of each table that a delta has."""
    return {block.key: block.rows.tolist() for block in read_blocks(folder, piece)}


def train(training, steps, most=1_000_000):
    for number in steps:
        training.step(number, most)


def test_a_restored_training_goes_on_bit_for_bit(tier, tmp_path):
    training = make_training(tier, tmp_path / "cold")
    train(training, range(5))
    save_checkpoint(
        tmp_path / "saved",
        model=training.model,
        optimizers=training.optimizers,
        state={"step": 5, "seen": torch.arange(3)},
    )
    train(training, range(5, 9))

    for other in ("resident", "host", "file"):
        again = make_training(other, tmp_path / f"cold of {other}", seed=1)
        train(again, range(3))  # is overwritten
        state = load(again, tmp_path / "saved")
        again.losses.clear()
        train(again, range(5, 9))

        assert state["step"] == 5
        assert torch.equal(state["seen"], torch.arange(3))
        assert again.losses == training.losses[5:]
        require_equal(again.numbers(), training.numbers())


def test_gradients_of_the_weights_before_are_dropped(tier, tmp_path):
    training = make_training(tier, tmp_path / "cold")
    train(training, range(2))
    save_checkpoint(tmp_path / "saved", model=training.model, optimizers=training.optimizers)
    saved_numbers = training.numbers()
    step, training.optimizers[-1].step = training.optimizers[-1].step, lambda: None
    train(training, [2])  # its rows are not updated, so their gradients wait
    training.optimizers[-1].step = step

    load(training, tmp_path / "saved")
    for optimizer in training.optimizers:
        optimizer.step()

    assert all(parameter.grad is None for parameter in training.model.parameters())
    require_equal(training.numbers(), saved_numbers)


def test_random_states_continue(tmp_path):
    import random

    import numpy as np

    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002

    load(training, tmp_path)

    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]  # noqa: NPY002


def test_each_checkpoint_has_the_rows_updated_since_the_one_before(tier, tmp_path):
    training, checkpoints = begin(tmp_path / "saved", tier, tmp_path / "cold")
    expected = {}
    for number in range(1, 6):
        train(training, range(number * 10, number * 10 + 2), most=30 * number)
        expected[number] = training.numbers()
        assert save_and_wait(checkpoints, state=number) == number
        for known in (number, number - 1)[:number]:
            again = make_training(seed=number)
            assert load(again, tmp_path / "saved", number=known) == known
            require_equal(again.numbers(), expected[known])
    checkpoints.close()

    assert manifest_numbers(tmp_path / "saved") == [4, 5]
    [third] = [piece for piece in pieces_of(tmp_path / "saved") if piece.name.endswith("3")]
    assert rows_of(tmp_path / "saved", third).keys() == {
        f"tables.embedding_bags.t{n}.weight" for n in range(3)
    }


def test_rows_that_change_during_the_first_copy_are_right(tier, tmp_path, monkeypatch):
    training = make_training(tier, tmp_path / "cold")
    train(training, range(3))
    checkpoints = saved(training, tmp_path / "saved")
    set_block_bytes(monkeypatch, 64)
    checkpoints.prepare()
    train(training, range(3, 43, 2))
    save_and_wait(checkpoints)
    checkpoints.close()

    require_restores(training, tmp_path / "saved")


def test_a_torch_operation_on_a_table_is_saved(tier, tmp_path):
    training, checkpoints = begin(tmp_path / "saved", tier, tmp_path / "cold")
    train(training, range(3))
    checkpoints.save()
    weight = training.model.tables.embedding_bags.t0.weight
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)
    training.step(3)
    checkpoints.save()
    checkpoints.close()

    require_restores(training, tmp_path / "saved")


def test_a_checkpoint_leaves_the_hot_tier_as_it_is(tmp_path):
    counts = []
    for number_saved in (0, 3):
        training, checkpoints = begin(tmp_path / str(number_saved), "host")
        for number in range(8):
            training.step(number % 3)
            if number < number_saved:
                checkpoints.save()
        checkpoints.close()
        [group] = training.model.tables.groups()
        counts.append(group.fetcher.counts._replace(written=0))

    assert counts[0] == counts[1]


def test_a_resumed_training_continues_the_deltas(tier, tmp_path):
    training = make_training(tier, tmp_path / "cold")
    train(training, range(3))
    save_checkpoint(tmp_path / "saved", model=training.model, optimizers=training.optimizers)

    again = make_training(tier, tmp_path / "cold 2", seed=1)
    load(again, tmp_path / "saved")
    checkpoints = saved(again, tmp_path / "saved", after=1)
    train(again, range(3, 5), most=10)
    checkpoints.save()
    checkpoints.close()

    full, _, delta = pieces_of(tmp_path / "saved")
    assert (full.name[:4], delta.name[:5]) == ("full", "delta")
    # only rows updated since
    assert max(max(rows) for rows in rows_of(tmp_path / "saved", delta).values()) < 10
    third = make_training(seed=2)
    load(third, tmp_path / "saved")
    require_equal(third.numbers(), again.numbers())


def test_state_may_change_its_shape(tmp_path):
    training, checkpoints = begin(tmp_path)
    for number in (5, 2, 9, 1, 3, 8, 0):
        training.step(number)
        save_and_wait(checkpoints, state=torch.arange(number))

        assert torch.equal(load(make_training(), tmp_path), torch.arange(number))
    checkpoints.close()


def test_an_error_in_the_writing_thread_is_raised(tmp_path, monkeypatch):
    _training, checkpoints = begin(tmp_path)
    monkeypatch.setattr(PieceWriter, "finish", lambda *_: 1 / 0)
    checkpoints.save()

    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


def failing(monkeypatch, when):
    """Make writes of blocks fail while `when()` is true."""
    write = PieceWriter.write_rows

    def write_or_fail(self, *block):
        if when():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *block)

    monkeypatch.setattr(PieceWriter, "write_rows", write_or_fail)


def test_a_full_disk_warns_and_the_next_checkpoint_has_all_rows(tier, tmp_path, monkeypatch):
    is_full = [False]
    failing(monkeypatch, lambda: is_full[0])
    training, checkpoints = begin(tmp_path / "saved", tier, tmp_path / "cold")
    train(training, range(3))
    checkpoints.save(state=1)
    train(training, range(3, 5))
    checkpoints.wait()
    is_full[0] = True
    checkpoints.save(state=2)
    with pytest.warns(
        UserWarning,
        match="training goes on; the newest complete one is 1 .*No space left",
    ):
        assert checkpoints.wait() == 1
    assert load(make_training(), tmp_path / "saved") == 1
    is_full[0] = False
    train(training, range(5, 6), most=5)
    checkpoints.save(state=3)
    checkpoints.close()

    again = make_training(seed=1)
    assert load(again, tmp_path / "saved") == 3
    require_equal(again.numbers(), training.numbers())
    assert checkpoints.describe()["num_failed"] == 1


def test_a_first_copy_that_fails_is_made_again(tmp_path, monkeypatch):
    is_full = [True]
    failing(monkeypatch, lambda: is_full[0])
    training, checkpoints = begin(tmp_path)
    train(training, range(2))
    checkpoints.save()
    with pytest.warns(UserWarning, match="the newest complete one is none"):
        assert checkpoints.wait() is None
    assert newest(tmp_path) is None
    is_full[0] = False
    train(training, range(2, 4))
    checkpoints.save()
    checkpoints.close()

    require_restores(training, tmp_path)


def test_by_hand_a_full_disk_raises(tmp_path, monkeypatch):
    failing(monkeypatch, lambda: True)
    training = make_training()

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    training = make_training()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(OSError, match=r"5\.\d\d KiB are needed, and 1000 B are free"):
        save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)


@pytest.fixture
def two(tmp_path):
    """Two checkpoints, and the training that wrote them."""
    training = make_training()
    for number in (1, 2):
        training.step(number)
        save_checkpoint(
            tmp_path, model=training.model, optimizers=training.optimizers, state=number
        )
    return training


def newest_files(folder):
    """The files that the newest checkpoint needs; of the older deltas, no state."""
    names = list(read_manifest(folder).pieces)
    files = [path for name in names for path in (folder / name).iterdir()]
    return [path for path in files if path.name != "state.pt" or path.parent.name == names[-1]]


def test_a_new_full_copy_takes_the_place_of_deltas_that_outgrow_it(tier, tmp_path, monkeypatch):
    set_block_bytes(monkeypatch, 1000)
    training, checkpoints = begin(tmp_path / "saved", tier, tmp_path / "cold")
    fulls, sizes = set(), []
    for number in range(1, 12):
        train(training, range(number * 10, number * 10 + 2), most=20 * number)
        save_and_wait(checkpoints, state=number)
        again = make_training(seed=number)
        assert load(again, tmp_path / "saved") == number
        require_equal(again.numbers(), training.numbers())
        fulls.add(next(iter(read_manifest(tmp_path / "saved").pieces)))
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob("saved/*/*")))
    checkpoints.close()

    assert len(fulls) > 2
    assert max(sizes) < 8 * sizes[0]
    kept = {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()}
    manifests = [read_manifest(tmp_path / "saved", number) for number in (10, 11)]
    assert kept == {name for manifest in manifests for name in manifest.pieces}


@pytest.mark.parametrize("fault", ["flipped", "cut", "missing"])
def test_a_damaged_file_changes_nothing_and_offers_the_older_one(two, tmp_path, fault):
    # Two objects have saved them, so they have no file in common.
    for number, path in enumerate(newest_files(tmp_path)):
        content = path.read_bytes()
        if fault == "missing":
            path.unlink()
        else:
            path.write_bytes(
                content[:-1]
                if fault == "cut"
                else content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]
            )
        again = make_training(seed=number)
        before = again.numbers()

        with pytest.raises(
            CheckpointError, match=f"{path.parent.name}/{path.name}.*load checkpoint 1 "
        ):
            load(again, tmp_path)

        require_equal(again.numbers(), before)
        assert load(again, tmp_path, number=1) == 1
        path.write_bytes(content)


def test_a_checkpoint_of_another_model_is_refused(two, tmp_path):
    other = make_training()
    before = other.numbers()
    other.optimizers[0].add_param_group({"params": torch.nn.Parameter(torch.ones(1))})
    with pytest.raises(CheckpointError, match=r"with 1 param groups.* with 2 param groups"):
        load(other, tmp_path)
    require_equal(other.numbers(), before)
    other = make_training()
    other.model.top = torch.nn.Linear(12, 2)

    with pytest.raises(
        CheckpointError,
        match=r"another model: top\.bias is torch.float32 of shape \(1,\) there and",
    ):
        load(other, tmp_path)
    with pytest.raises(CheckpointError, match="optimizer 0 is"):
        load_checkpoint(tmp_path, model=make_training().model)


@pytest.mark.parametrize(
    ("place", "number", "name"),
    [
        ("file", None, "file"),
        ("file", 1, "file"),
        ("run", None, "checkpoints"),
        ("empty", None, "empty"),
    ],
)
def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path, place, number, name):
    training, folder = make_training(), tmp_path / "run" / "checkpoints"
    save_checkpoint(folder, model=training.model, optimizers=training.optimizers)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    with pytest.raises(CheckpointError, match=name):
        load(training, tmp_path / place, number=number)


def test_only_files_of_checkpoints_are_deleted(tmp_path):
    training, others = make_training(), ["delta-1", "film.partial", "full-images", "notes.json"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "LAST.partial").touch()
    (tmp_path / "full-00000001").mkdir()
    saved(training, tmp_path).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == others


def test_a_read_only_folder_is_an_error_of_the_system(tmp_path, monkeypatch):
    training = make_training()
    folder = tmp_path / "file" / "saved"
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        save_checkpoint(folder, model=training.model, optimizers=training.optimizers)


def test_tables_of_torch_are_saved_whole(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.EmbeddingBag(50, 4, sparse=True), torch.nn.Linear(4, 1)
        )
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sparse tensors
        model, optimizer = make(0)
        step(model, optimizer)
        save_checkpoint(tmp_path, model=model, optimizers=optimizer)
        step(model, optimizer)
        again, of_again = make(1)
        load_checkpoint(tmp_path, model=again, optimizers=of_again)
        step(again, of_again)

    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
