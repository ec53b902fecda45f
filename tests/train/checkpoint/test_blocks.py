from __future__ import annotations

import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

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
from recsys.train.checkpoint.manifest import Array, Block, Part, Piece


def write(folder, tensors, parts):
    writer = PieceWriter(folder, "full-00000001", 1)
    writer.write(Rows(tensors, parts))
    piece = writer.finish()
    return piece, piece.blocks[0], folder / piece.folder / piece.blocks[0].file


def test_a_block_is_an_ordinary_safetensors_file(tmp_path):
    tensors = {"a": torch.randn(3, 2), "b/ä": torch.arange(5), "none": torch.empty(0, 2)}
    parts = [Part("a", 0, 3), Part("b/ä", 5, 10), Part("none", 0, 0)]
    arrays = {"a": Array("F32", (3, 2)), "b/ä": Array("I64", (10,)), "none": Array("F32", (0, 2))}

    piece, block, path = write(tmp_path, tensors, parts)
    found = read_block(tmp_path, piece, block, arrays)

    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor("a"), tensors["a"])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path, name):
    tensor = torch.tensor([[1, 0], [1, 1]]).to(DTYPES[name])

    piece, block, _ = write(tmp_path, {"a": tensor}, [Part("a", 0, 2)])

    assert torch.equal(read_block(tmp_path, piece, block, {"a": Array(name, (2, 2))})["a"], tensor)


@pytest.mark.parametrize("place", [0, 20, -1, None])
def test_a_flipped_byte_and_a_file_that_was_cut_off_are_detected(tmp_path, place):
    piece, block, path = write(tmp_path, {"a": torch.randn(30, 2)}, [Part("a", 0, 30)])
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-3:]
    else:
        content[place] ^= 1
    path.write_bytes(content)

    for check in (check_block, lambda *args: read_block(*args, {"a": Array("F32", (30, 2))})):
        with pytest.raises(CheckpointError, match=r"block-00000\.safetensors"):
            check(tmp_path, piece, block)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    piece, block, path = write(folder, {"a": torch.randn(30, 2)}, [Part("a", 0, 30)])
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")

    with pytest.raises(CheckpointError, match="leads out of"):
        read_block(folder, piece, block, {"a": Array("F32", (30, 2))})


def forged(tmp_path, content, parts):
    """A block whose checksum fits any content."""
    path = tmp_path / "full-00000001" / "block-00000.safetensors"
    path.parent.mkdir()
    path.write_bytes(content)
    block = Block(path.name, len(content), zlib.crc32(content), tuple(parts))
    return Piece("full-00000001", 1, (block,)), block


def rows_of(*rows):
    return save({"a": torch.ones(2, 2), "rows/a": torch.tensor(rows)})


@pytest.mark.parametrize(
    ("content", "part", "name"),
    [
        (b"", Part("a", 0, 2), "safetensors"),
        (b"\xff" * 8, Part("a", 0, 2), "safetensors"),
        ((2**40).to_bytes(8, "little") + b"{}", Part("a", 0, 2), "safetensors"),
        (save({"a": torch.ones(3)}), Part("a", 0, 2), "F32"),
        (save({"a": torch.ones(2, 2).double()}), Part("a", 0, 2), "F32"),
        (save({"b": torch.ones(2, 2)}), Part("a", 0, 2), "F32"),
        (rows_of(1, 1), Part("a", 0, 9, "rows/a"), "ascending rows"),
        (rows_of(2, 1), Part("a", 0, 9, "rows/a"), "ascending rows"),
        (rows_of(-1, 0), Part("a", 0, 9, "rows/a"), "ascending rows"),
        (rows_of(0, 9), Part("a", 0, 9, "rows/a"), "ascending rows"),
    ],
)
def test_a_forged_block_is_refused(tmp_path, content, part, name):
    piece, block = forged(tmp_path, content, [part])

    with pytest.raises(CheckpointError, match=name):
        read_block(tmp_path, piece, block, {"a": Array("F32", (9, 2))})


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
