"""Files of rows keep their place, their names and their numbers, whatever else happens there."""

import json
import shutil

import pytest
import torch

from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    TableConfig,
)
from recsys.embeddings.tiers.cold.cold_files import ColdFiles, FilesDeleted
from recsys.embeddings.tiers.cold.left_files import remove_cold_files
from recsys.errors import ColdTierError

NUM_ROWS, DIM = 300, 4
PLAIN = SGD(lr=1.0)
IDS = torch.tensor([[1, 2, 3]])


def build(folder, optimizer=PLAIN, num_rows=NUM_ROWS, **options):
    torch.manual_seed(0)
    files = {"budget": 4000, "cold_tier": "file", "cold_path": folder}
    return HotColdEmbeddingBag(num_rows, DIM, optimizer=optimizer, **files, **options)


def let_go(module):
    """Close the files, as its deletion does."""
    module.row_updater._files.close()


def train(bag, ids=IDS, offsets=None):
    bag(ids, offsets).square().sum().backward()
    bag.sync()


def trained(folder, optimizer=PLAIN):
    bag = build(folder, optimizer)
    train(bag)
    return bag


def trained_resident(optimizer):
    torch.manual_seed(0)
    bag = HotColdEmbeddingBag(NUM_ROWS, DIM, optimizer=optimizer)
    train(bag)
    return bag


def manifest(folder):
    return json.loads((folder / "arrays.json").read_text())


def collection(name, folder):
    return HotColdEmbeddingBagCollection(
        [TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM)],
        optimizer=PLAIN,
        budget=4000,
        cold_tier="file",
        cold_path=folder,
    )


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    bag = build("rows")
    train(bag)
    monkeypatch.chdir(tmp_path / "elsewhere")

    train(bag)
    expected = bag.weight.detach().clone()
    bag.sync()
    let_go(bag)

    assert torch.equal(build(tmp_path / "rows").weight, expected)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("optimizer", [PLAIN, Adagrad(lr=1.0)], ids=["alike", "other"])
def test_a_module_leaves_the_files_that_took_the_place_of_its_own(optimizer, tmp_path):
    before = build(tmp_path / "rows", Adam(lr=1.0))
    train(before)
    before(IDS).sum().backward()
    shutil.rmtree(tmp_path / "rows")
    bag = build(tmp_path / "rows", optimizer)
    bag(IDS).sum().backward()
    expected = manifest(tmp_path / "rows")

    with pytest.raises(FilesDeleted, match="rows: the files of this module were deleted"):
        before.sync()

    assert manifest(tmp_path / "rows") == expected
    assert expected["is_dirty"]


def test_a_clean_module_leaves_the_files_that_took_the_place_of_its_own(tmp_path):
    before = build(tmp_path / "rows")
    train(before)
    shutil.rmtree(tmp_path / "rows")
    bag = build(tmp_path / "rows", Adam(lr=1.0))
    train(bag)
    expected = manifest(tmp_path / "rows")

    with pytest.raises(FilesDeleted):
        train(before)
    with pytest.raises(FilesDeleted):
        before.row_optimizer.updater._files.make("weight", "momentum1", (NUM_ROWS,), torch.float32)

    assert manifest(tmp_path / "rows") == expected
    bag.sync()


@pytest.mark.parametrize("is_clean", [True, False])
def test_rows_of_deleted_files_can_still_be_trained_and_saved(is_clean, tmp_path):
    bag, twin = trained(tmp_path / "rows"), trained(tmp_path / "twin")
    for each in (bag, twin):
        if not is_clean:
            each.weight.data.add_(1.0)
    shutil.rmtree(tmp_path / "rows")
    for each in (bag, twin):
        each(IDS + 1).square().sum().backward()

    assert torch.equal(bag.state_dict()["weight"], twin.state_dict()["weight"])


def test_a_start_that_fails_leaves_the_files_that_took_the_place_of_its_own(tmp_path):
    tables = {"t": ((3, DIM), torch.float32)}
    before = ColdFiles(tmp_path / "rows", tables)
    shutil.rmtree(tmp_path / "rows")
    files = ColdFiles(tmp_path / "rows", tables)

    before.discard()

    files.sync({})


def test_numbers_that_change_without_a_row_are_kept(tmp_path):
    bag, twin = build(tmp_path / "rows", Adam(lr=0.1)), build(tmp_path / "twin", Adam(lr=0.1))
    for each in (bag, twin):
        train(each)
        train(each, torch.empty(0, dtype=torch.long), torch.tensor([0]))  # no id
    let_go(bag)

    again = build(tmp_path / "rows", Adam(lr=0.1))
    train(again)
    train(twin)

    assert torch.equal(again.weight, twin.weight)


def test_numbers_that_could_not_be_written_are_written_later(tmp_path, monkeypatch):
    files = ColdFiles(tmp_path, {"t": ((3, DIM), torch.float32)})
    files.sync({"t": {"step": 1}})

    with monkeypatch.context() as patched:
        patched.setattr(ColdFiles, "_write_manifest", lambda _: (tmp_path / "no").stat())
        with pytest.raises(FileNotFoundError):
            files.sync({"t": {"step": 2}})
    files.sync({"t": {"step": 2}})

    assert manifest(tmp_path)["numbers"] == {"t": {"step": 2}}


def test_state_that_is_made_again_leaves_tensors_of_the_earlier_state(tmp_path):
    bag = build(tmp_path / "rows", Adagrad(lr=1.0))
    train(bag)
    kept = bag.row_optimizer.state_dict()["state"]["weight"]["momentum1"]
    expected = kept.clone()

    bag.row_optimizer.state.clear()
    train(bag, IDS + 5)

    assert torch.equal(kept, expected)
    assert not torch.equal(bag.row_optimizer.state[bag.weight]["momentum1"], expected)


def test_state_that_another_tensor_replaces_counts_for_rows_in_slots_at_once(tmp_path):
    bag, resident = trained(tmp_path / "rows", Adagrad(lr=1.0)), trained_resident(Adagrad(lr=1.0))
    for each in (bag, resident):
        each.row_optimizer.state_dict()
        state = each.row_optimizer.state[each.weight]
        state["momentum1"] = torch.full_like(state["momentum1"], 9.0)
        train(each)

    assert torch.equal(bag.weight, resident.weight)


@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=["Adagrad", "Adam"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_state_that_was_removed_stays_removed(is_loaded, optimizer, tmp_path):
    bag, twin = trained(tmp_path / "rows", optimizer), trained(tmp_path / "twin", optimizer)
    empty = build(tmp_path / "empty", optimizer).row_optimizer.state_dict()
    for each in (bag, twin):
        each(IDS).square().sum().backward()
        if is_loaded:
            each.row_optimizer.load_state_dict(empty)
        else:
            each.row_optimizer.state.clear()
    bag.sync()
    bag(IDS)  # its slots do not fetch the state
    bag.sync()
    let_go(bag)

    again = build(tmp_path / "rows", optimizer)
    assert not again.row_optimizer.state.get(again.weight)
    assert len(list((tmp_path / "rows").glob("*.bin"))) == 1
    train(again)
    train(twin)

    assert torch.equal(again.weight, twin.weight)


def test_state_is_not_made_in_the_file_that_a_link_leads_to(tmp_path):
    let_go(trained(tmp_path / "rows"))
    (tmp_path / "own").write_text("precious")
    (tmp_path / "rows" / "weight.momentum1.bin").symlink_to(tmp_path / "own")

    train(build(tmp_path / "rows", Adagrad(lr=1.0)))

    assert (tmp_path / "own").read_text() == "precious"
    assert not (tmp_path / "rows" / "weight.momentum1.bin").is_symlink()


@pytest.mark.parametrize("name", ["a b", "a/b", "a\nb", "a\xa0b", "\u5546\u54c1\u3000id"])
def test_a_table_may_have_any_name(name, tmp_path):
    module = collection(name, tmp_path)
    expected = module.state_dict()[f"embedding_bags.{name}.weight"].clone()
    module.sync()
    let_go(module)

    again = collection(name, tmp_path)

    assert torch.equal(again.state_dict()[f"embedding_bags.{name}.weight"], expected)


@pytest.mark.parametrize("name", ["a" * 250, "\u5546" * 30])
def test_a_name_too_long_for_a_file_is_refused(name, tmp_path):
    with pytest.raises(ColdTierError, match=rf"table '{name}' must have a name that fits in"):
        collection(name, tmp_path / "rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_table_without_rows_has_its_dtype(dtype, tmp_path):
    with torch.device("meta"):  # not the default device either
        files = ColdFiles(tmp_path, {"t": ((0, 3), dtype)})

    rows = files.array("t")

    assert (rows.shape, rows.dtype, rows.device.type) == ((0, 3), dtype, "cpu")


def test_a_file_that_cannot_be_mapped_is_named(tmp_path, monkeypatch):
    let_go(trained(tmp_path / "rows"))

    def refuse(path, **options):
        raise RuntimeError(f"unable to open file <{path}> in read-write mode")

    monkeypatch.setattr(torch, "from_file", refuse)

    with pytest.raises(ColdTierError, match=r"weight\.bin: must be a file that can be mapped"):
        build(tmp_path / "rows")


def test_nothing_is_removed_through_a_link(tmp_path):
    let_go(trained(tmp_path / "rows"))
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    before = set((tmp_path / "rows").iterdir())

    with pytest.raises(ColdTierError, match="link: must be a folder, is a symbolic link"):
        remove_cold_files(tmp_path / "link", ["weight"])

    assert set((tmp_path / "rows").iterdir()) == before
