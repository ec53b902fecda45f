"""Block files: rows of several arrays in one safetensors file, with a checksum.

`BlockBuilder` collects rows until a block is full. `PieceWriter` writes blocks, each flushed to the
disk. `read_block` checks length and checksum before a caller sees any tensor.
"""

from __future__ import annotations

import json
import os
import zlib
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors

from recsys._support.files import flush_to_disk
from recsys._support.safetensors_dtypes import DTYPES
from recsys.errors import CheckpointError
from recsys.train.checkpoint.manifest import Block, Part, Piece, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

__all__ = [
    "BLOCK_BYTES",
    "BlockBuilder",
    "PieceWriter",
    "Rows",
    "Stored",
    "check_block",
    "read_block",
    "read_header",
    "row_ranges",
    "write_safetensors",
]

BLOCK_BYTES = 16 * 2**20
_READ_BYTES = 4 * 2**20


class Rows(NamedTuple):
    """The content of a block before it is written.

    Attributes:
        tensors: Rows of arrays and row numbers, on the CPU, by name.
        parts: What they are.
    """

    tensors: dict[str, Tensor]
    parts: list[Part]


def row_ranges(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Divide rows into ranges of at most `BLOCK_BYTES`; a row is never divided."""
    count = max(1, BLOCK_BYTES // max(1, row_bytes))
    return [(begin, min(begin + count, num_rows)) for begin in range(0, num_rows, count)]


class BlockBuilder:
    """Collects rows, and passes them on in blocks of about `BLOCK_BYTES`.

    Args:
        emit: Called with each block.
    """

    def __init__(self, emit: Callable[[Rows], None]) -> None:
        self._emit = emit
        self._rows, self._num_bytes = Rows({}, []), 0

    def add(self, tensors: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
        """Add rows of arrays that the current block must hold together."""
        num_bytes = sum(each.nbytes for each in tensors.values())
        if self._num_bytes + num_bytes > BLOCK_BYTES or tensors.keys() & self._rows.tensors.keys():
            self.flush()
        self._rows.tensors.update(tensors)
        self._rows.parts.extend(parts)
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Pass on what was collected."""
        if self._rows.parts:
            rows, self._rows, self._num_bytes = self._rows, Rows({}, []), 0
            self._emit(rows)


class PieceWriter:
    """Writes the blocks of one piece into a new folder.

    Args:
        folder: The folder of checkpoints.
        name: Name of the piece's folder.
        number: Number of the checkpoint that it is written for.

    Attributes:
        path: The piece's folder.
        num_bytes: Bytes written so far.
    """

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.path, self._number = folder / name, number
        self._blocks: list[Block] = []
        self.num_bytes = 0
        self.path.mkdir(parents=True)

    def write(self, rows: Rows) -> None:
        """Write a block, and flush it to the disk.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        name = f"block-{len(self._blocks):05}.safetensors"
        with (self.path / name).open("wb") as file:
            crc32 = write_safetensors(file, rows.tensors)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        self._blocks.append(Block(name, num_bytes, crc32, tuple(rows.parts)))
        self.num_bytes += num_bytes

    def finish(self) -> Piece:
        """Flush the names of all blocks to the disk."""
        flush_to_disk(self.path)
        flush_to_disk(self.path.parent)
        return Piece(self.path.name, self._number, tuple(self._blocks))


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> int:
    """Write a safetensors file straight from the tensors' memory.

    `safetensors.torch.save` would copy all tensors while it holds the interpreter's lock, so that
    training would wait.

    Args:
        file: Is written to.
        tensors: CPU tensors by name.

    Returns:
        The CRC-32 of everything written.
    """
    header = safetensors_header(
        {
            name: (dtype_name(each.dtype, name), tuple(each.shape), each.nbytes)
            for name, each in tensors.items()
        }
    )
    file.write(header)
    crc32 = zlib.crc32(header)
    for tensor in tensors.values():
        if tensor.nbytes:
            flat = tensor.contiguous().reshape(-1)
            if flat.stride(0) != 1:  # the only number of an expanded tensor
                flat = flat.clone(memory_format=torch.contiguous_format)
            content = flat.view(torch.uint8).numpy().data
            file.write(content)
            crc32 = zlib.crc32(content, crc32)
    return crc32


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The header of a safetensors file.

    Args:
        tensors: Dtype, shape and bytes of each tensor, by name, in the order of their data.
        metadata: Further texts.
    """
    content: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        offsets = [place, place + num_bytes]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        place += num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Stored(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        dtype: A key of `DTYPES`.
        shape: Its shape.
        begin: Where its bytes begin in the file.
        num_bytes: Their number.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read and check the header of a safetensors file.

    Returns:
        The tensors by name, in the order of their data, and the texts of the metadata.

    Raises:
        CheckpointError: the file is damaged or cut off.
        OSError: it cannot be read.
    """
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            if begin > num_bytes:
                raise ValueError(f"its header has {begin} bytes")  # noqa: TRY301
            content = json.loads(file.read(begin - 8))
        metadata = content.pop("__metadata__", {})
        if not all(isinstance(each, str) for each in metadata.values()):
            raise TypeError("its metadata must be texts")  # noqa: TRY301
        tensors = {name: _stored(each, begin) for name, each in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not a complete safetensors file ({str(error)[:200]})"
        ) from error
    in_order = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes))
    end = begin
    for name, each in in_order:
        if each.begin != end:
            raise CheckpointError(f"{path}: is damaged: {name!r} begins at {each.begin}, not {end}")
        end += each.num_bytes
    if end != num_bytes:
        raise CheckpointError(f"{path}: must have {end} bytes, has {num_bytes}; copy it again")
    return dict(in_order), metadata


def _stored(entry: dict[str, Any], data_begin: int) -> Stored:
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    if (
        any(type(each) is not int or each < 0 for each in (begin, end, *shape))
        or end - begin != prod(shape) * DTYPES[entry["dtype"]].itemsize
    ):
        raise ValueError("a tensor has wrong numbers, or another size than its shape")
    return Stored(entry["dtype"], shape, data_begin + begin, end - begin)


def check_block(folder: Path, piece: Piece, block: Block) -> None:
    """Check the length and the checksum of a block file.

    Raises:
        CheckpointError: the file is missing, cut off or changed.
    """
    for _ in _read(folder, piece, block, _READ_BYTES):
        pass


def read_block(folder: Path, piece: Piece, block: Block) -> dict[str, Tensor]:
    """Read a block file.

    Args:
        folder: The folder of checkpoints.
        piece: The block's piece.
        block: Its entry in the manifest.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: the file is missing, cut off or changed.
    """
    content = b"".join(_read(folder, piece, block, block.num_bytes))
    tensors: dict[str, Tensor] = load_safetensors(content)
    return tensors


def _read(folder: Path, piece: Piece, block: Block, num_bytes: int) -> Iterator[bytes]:
    """The content of a block file, so many bytes at a time; errors as for `check_block`.

    The length of the file is checked first.
    """
    path, crc32 = folder / piece.folder / block.file, 0
    try:
        found = path.stat().st_size
        if found != block.num_bytes:
            raise CheckpointError(f"{path}: must have {block.num_bytes} bytes, has {found}")
        with path.open("rb") as file:
            while content := file.read(num_bytes):
                crc32 = zlib.crc32(content, crc32)
                yield content
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if crc32 != block.crc32:
        raise CheckpointError(f"{path}: is damaged: its checksum differs from the manifest's")
