import pytest
import torch
from safetensors import safe_open

from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import (
    BlockBuilder,
    PieceWriter,
    Rows,
    check_block,
    read_block,
    row_ranges,
)
from recsys.train.checkpoint.manifest import Part


def write(folder, tensors, parts):
    writer = PieceWriter(folder, "full-00000001", 1)
    writer.write(Rows(tensors, parts))
    piece = writer.finish()
    return piece, piece.blocks[0], folder / piece.folder / piece.blocks[0].file


def test_a_block_is_an_ordinary_safetensors_file(tmp_path):
    tensors = {"a": torch.randn(3, 2), "b/ä": torch.arange(5), "none": torch.empty(0, 2)}
    parts = [Part("a", 0, 3), Part("b/ä", 5, 10), Part("none", 0, 0)]

    piece, block, path = write(tmp_path, tensors, parts)
    found = read_block(tmp_path, piece, block)

    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor("a"), tensors["a"])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path, name):
    tensor = torch.tensor([[1, 0], [1, 1]]).to(DTYPES[name])

    piece, block, _ = write(tmp_path, {"a": tensor}, [Part("a", 0, 2)])

    assert torch.equal(read_block(tmp_path, piece, block)["a"], tensor)


@pytest.mark.parametrize("place", [0, 20, -1, None])
def test_a_flipped_byte_and_a_file_that_was_cut_off_are_detected(tmp_path, place):
    piece, block, path = write(tmp_path, {"a": torch.randn(30, 2)}, [Part("a", 0, 30)])
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-3:]
    else:
        content[place] ^= 1
    path.write_bytes(content)

    for check in (check_block, read_block):
        with pytest.raises(CheckpointError, match=r"block-00000\.safetensors"):
            check(tmp_path, piece, block)


def test_blocks_are_divided_by_size_and_never_repeat_a_name(monkeypatch):
    monkeypatch.setattr("recsys.train.checkpoint.blocks.BLOCK_BYTES", 100)
    found = []
    builder = BlockBuilder(found.append)

    for begin, end in row_ranges(60, 4):
        builder.add({"a": torch.arange(begin, end).int()}, [Part("a", begin, end)])
    builder.add({"b": torch.zeros(3)}, [Part("b", 0, 3)])
    builder.flush()

    assert [[part.array for part in rows.parts] for rows in found] == [["a"], ["a"], ["a", "b"]]
    assert torch.equal(torch.cat([rows.tensors["a"] for rows in found]), torch.arange(60).int())
