from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import recsys
from recsys.errors import CheckpointError
from recsys.train.checkpoint.blocks import PieceWriter, Rows
from recsys.train.checkpoint.manifest import (
    Array,
    Block,
    Manifest,
    Part,
    Piece,
    newest,
    read_manifest,
    set_newest,
    write_manifest,
)


def make_manifest(number: int = 2) -> Manifest:
    parts = (Part("model/t", 0, 5), Part("model/b", 0, 1))
    return Manifest(
        number,
        "0123456789abcdef",
        ((1, "fedcba9876543210"),),
        {"model/t": Array("F32", (5, 2)), "model/b": Array("I64", ())},
        {"t": ("model/t",)},
        (
            Piece("full-00000001", 1, (Block("block-00000.safetensors", 99, 7, parts),)),
            Piece("delta-00000002", 2, ()),
        ),
        {"state": [1, None]},
    )


def test_a_manifest_comes_back_equal(tmp_path):
    write_manifest(tmp_path, make_manifest())

    set_newest(tmp_path, make_manifest())

    assert newest(tmp_path) == 2
    assert read_manifest(tmp_path) == make_manifest()


def test_a_piece_may_have_more_blocks_than_their_names_have_digits_for(tmp_path):
    writer = PieceWriter(tmp_path, "full-00000001", 1)
    writer._blocks = [None] * 100_000  # 1.7 TB
    writer.write(Rows({"model/b": torch.tensor([3])}, [Part("model/b", 0, 1)]))
    piece = replace(make_manifest().pieces[0], blocks=tuple(writer._blocks[-1:]))
    manifest = replace(make_manifest(), pieces=(piece,))

    write_manifest(tmp_path, manifest)

    assert read_manifest(tmp_path, 2) == manifest


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "00000012", "\xff\xfe", "1" * 500])
def test_a_missing_checkpoint_and_a_damaged_last_file_name_the_others(tmp_path, text):
    write_manifest(tmp_path, make_manifest())
    (tmp_path / "LAST").write_text(text)

    for find in (lambda: newest(tmp_path), lambda: read_manifest(tmp_path, 9)):
        with pytest.raises(CheckpointError, match="number, 2"):
            find()


def content_of(manifest: Manifest, tmp_path) -> dict:
    write_manifest(tmp_path, manifest)
    return json.loads((tmp_path / manifest.name).read_text())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", "format must be"),
        (["version"], 0, "version must be 1, got 0"),
        (["arrays", "model/t", 0], "F8", "dtype 'F8' is unknown"),
        (["arrays", "model/t", 1, 0], -1, "a dimension must be"),
        (["arrays", "model/t", 1, 0], 2**60, "impossible"),
        (["arrays", "model/t", 1, 0], 5.0, "a dimension must be"),
        (["arrays", "model/t", 1, 0], True, "a dimension must be"),
        (["pieces", 0, "folder"], "full-1/../..", "a piece's folder"),
        (["pieces", 0, "folder"], "delta-00000001", "the first piece must be a full one"),
        (["pieces", 0, "blocks", 0, "file"], "/etc/passwd", "a block must be like"),
        (["pieces", 0, "blocks", 0, "num_bytes"], 2**40, "a block has at most"),
        (["pieces", 0, "blocks", 0, "parts", 0, 2], 6, r"rows \[0, 6\) are not rows"),
        (["pieces", 0, "blocks", 0, "parts", 0, 0], "other", "KeyError"),
        (["tables", "t"], [], "are not its own"),
        (["id"], "x", "16 hexadecimal digits"),
        (["number"], 3, "the manifest of checkpoint 3"),
        (["before", 0], [1], "ValueError"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path, path, value, message):
    content = content_of(make_manifest(), tmp_path)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "00000002.json").write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path, 2)


def test_a_manifest_names_the_version_of_recsys_that_wrote_it(tmp_path):
    assert content_of(make_manifest(), tmp_path)["recsys"] == recsys.__version__


def test_a_manifest_of_an_older_recsys_that_names_no_version_is_read(tmp_path):
    content = content_of(make_manifest(), tmp_path)
    del content["recsys"]
    (tmp_path / "00000002.json").write_text(json.dumps(content))

    assert read_manifest(tmp_path, 2) == make_manifest()


@pytest.mark.parametrize("recsys_version", ["7.1.0", None, "7\n", "7" * 99])
def test_a_manifest_of_a_newer_version_asks_for_an_update(tmp_path, recsys_version):
    content = content_of(make_manifest(), tmp_path) | {"version": 2, "recsys": recsys_version}
    (tmp_path / "00000002.json").write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=f"recsys {recsys.__version__}; update recsys$"):
        read_manifest(tmp_path, 2)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(data=st.data())
def test_random_changes_are_read_or_refused_by_name(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("checkpoints")
    content = content_of(make_manifest(), folder)
    inner = content
    while True:
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = data.draw(anything)
    (folder / "00000002.json").write_text(json.dumps(content))

    with suppress(CheckpointError):
        read_manifest(folder, 2)


def test_nesting_without_end_is_refused(tmp_path):
    (tmp_path / "00000002.json").write_text("[" * 200_000)

    with pytest.raises(CheckpointError, match="RecursionError"):
        read_manifest(tmp_path, 2)


def test_without_last_the_manifest_with_the_highest_number_is_the_newest(tmp_path):
    assert newest(tmp_path) is None
    for number in (9, 11, 10):
        write_manifest(tmp_path, make_manifest(number))

    assert newest(tmp_path) == 11
