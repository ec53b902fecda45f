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


def test_a_manifest_comes_back_equal_and_names_the_version_of_recsys(tmp_path):
    write_manifest(tmp_path, make_manifest())

    set_newest(tmp_path, make_manifest())

    assert newest(tmp_path) == 2
    assert read_manifest(tmp_path) == make_manifest()
    content = json.loads((tmp_path / "00000002.json").read_text().splitlines()[0])
    assert content["recsys"] == recsys.__version__


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "00000012", "\xff\xfe", "1" * 500])
def test_a_missing_checkpoint_and_a_damaged_last_file_name_the_others(tmp_path, text):
    write_manifest(tmp_path, make_manifest())
    (tmp_path / "LAST").write_text(text)

    for find in (lambda: newest(tmp_path), lambda: read_manifest(tmp_path, 9)):
        with pytest.raises(CheckpointError, match="number, 2"):
            find()


def with_changes(text, **changes):
    """A manifest after changes with which its checksum agrees."""
    changed = json.dumps(json.loads(text.splitlines()[0]) | changes)
    return f"{changed}\n{zlib.crc32(changed.encode())}\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("fedcba", "fedcbb"), "its checksum"),
        (lambda text: text[:-5], "its checksum"),
        (lambda text: text.splitlines()[0], "its checksum"),
        (lambda text: "[" * 200_000 + "\n0\n", "RecursionError"),
        (lambda _: "", "JSONDecodeError"),
        (lambda text: with_changes(text, number=3), "the manifest of checkpoint 3"),
        (
            lambda text: with_changes(text, version=3, recsys="7.1.0") + "7",
            f"recsys 7.1.0 .* recsys {recsys.__version__}; update recsys$",
        ),
        # As recsys wrote it when a manifest had no second line.
        (lambda text: with_changes(text, version=1).splitlines()[0], "an older recsys wrote"),
        (lambda text: with_changes(text, version=None), "TypeError"),
    ],
    ids=[
        "changed",
        "cut",
        "without a checksum",
        "nested",
        "empty",
        "of another checkpoint",
        "newer",
        "older",
        "without a version",
    ],
)
def test_a_damaged_manifest_and_one_of_another_version_are_refused(tmp_path, damage, message):
    write_manifest(tmp_path, make_manifest())
    file = tmp_path / "00000002.json"
    file.write_text(damage(file.read_text()))

    with pytest.raises(CheckpointError, match=rf"00000002\.json: .*{message}"):
        read_manifest(tmp_path, 2)


def test_without_last_the_manifest_with_the_highest_number_is_the_newest(tmp_path):
    assert newest(tmp_path) is None
    for number in (9, 11, 10):
        write_manifest(tmp_path, make_manifest(number))

    assert newest(tmp_path) == 11
