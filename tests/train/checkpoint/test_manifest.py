from __future__ import annotations

import json
import zlib

import pytest

import recsys
from recsys.errors import CheckpointError
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


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "00000012", "\xff\xfe", "1" * 500])
def test_a_missing_checkpoint_and_a_damaged_last_file_name_the_others(tmp_path, text):
    write_manifest(tmp_path, make_manifest())
    (tmp_path / "LAST").write_text(text)

    for find in (lambda: newest(tmp_path), lambda: read_manifest(tmp_path, 9)):
        with pytest.raises(CheckpointError, match="number, 2"):
            find()


def written(manifest: Manifest, tmp_path, **changes) -> dict:
    """What a manifest holds, after changes with which its checksum agrees."""
    write_manifest(tmp_path, manifest)
    file = tmp_path / manifest.name
    content = json.loads(file.read_text().splitlines()[0]) | changes
    text = json.dumps(content)
    file.write_text(f"{text}\n{zlib.crc32(text.encode())}\n")
    return content


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("fedcba", "fedcbb"),
        lambda text: text[:-5],
        lambda text: text.splitlines()[0],
        lambda text: "[" * 200_000 + "\n0\n",
        lambda _: "",
    ],
    ids=["changed", "cut", "without a checksum", "nested", "empty"],
)
def test_a_damaged_manifest_is_refused(tmp_path, damage):
    write_manifest(tmp_path, make_manifest())
    file = tmp_path / "00000002.json"
    file.write_text(damage(file.read_text()))

    with pytest.raises(CheckpointError, match=r"00000002\.json"):
        read_manifest(tmp_path, 2)


def test_the_manifest_of_another_checkpoint_is_refused(tmp_path):
    written(make_manifest(), tmp_path, number=3)

    with pytest.raises(CheckpointError, match="the manifest of checkpoint 3"):
        read_manifest(tmp_path, 2)


def test_a_manifest_names_the_version_of_recsys_that_wrote_it(tmp_path):
    assert written(make_manifest(), tmp_path)["recsys"] == recsys.__version__


def test_a_manifest_of_another_version_asks_for_an_update(tmp_path):
    written(make_manifest(), tmp_path, version=2, recsys="7.1.0")

    with pytest.raises(CheckpointError, match=f"recsys {recsys.__version__}; update recsys$"):
        read_manifest(tmp_path, 2)


def test_without_last_the_manifest_with_the_highest_number_is_the_newest(tmp_path):
    assert newest(tmp_path) is None
    for number in (9, 11, 10):
        write_manifest(tmp_path, make_manifest(number))

    assert newest(tmp_path) == 11
