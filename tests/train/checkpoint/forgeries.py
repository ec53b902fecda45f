"""Checkpoints and exports of a stranger: good ones are damaged on purpose, with right checksums."""

from __future__ import annotations

import copy
import json
import os
import resource
import runpy
import shutil
import signal
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recsys.errors import AlreadyExists, RecsysError
from recsys.train.checkpoint import Checkpoints, load_checkpoint
from recsys.train.exports.deltas import apply_deltas, export_checkpoint, export_delta

TRAININGS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("trainings.py"))))
make_training = TRAININGS.make_training

SECONDS_PER_CASE, MORE_BYTES = 20, 400 * 2**20
NUMBERS = (-1, 0, 1, 2, 7, 40, 300, 2**31, 2**40, 2**59, 2**62, 2**63, 10**30, 0.5, True)
TEXTS = (
    "",
    "..",
    "../../outside",
    "/etc/passwd",
    "x" * 3000,
    "\x00",
    "\ud800",
    "F32",
    "I64",
    "U8",
    "full-00000001",
    "delta-00000002",
    "nan",
)
VALUES = (None, [], {}, [[]], [None] * 20, {"$array": "model/top.bias"}, {"$tuple": 3})


def hostile(random):
    return random.choice([random.choice(VALUES), random.choice(NUMBERS), random.choice(TEXTS)])


def mutate(tree, random, most=3):
    """JSON with some nodes replaced, removed, added, or copied from elsewhere."""
    tree = copy.deepcopy(tree)
    for _ in range(random.randint(1, most)):
        places, todo = [], [tree]
        while todo:
            inside = todo.pop()
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            # Long lists of plain numbers would hide everything else.
            for key in keys if len(inside) < 100 else random.sample(list(keys), 3):
                places.append((inside, key))
                if isinstance(inside[key], dict | list):
                    todo.append(inside[key])
        if not places:
            return tree
        inside, key = random.choice(places)
        other, other_key = random.choice(places)
        kind = random.randint(0, 7)
        if kind <= 1:
            inside[key] = hostile(random)
        elif kind == 2:
            del inside[key]
        elif kind <= 4:
            inside[key] = copy.deepcopy(other[other_key]) if _has(other, other_key) else 3
        elif isinstance(inside, dict):
            name = random.choice([*inside, *TEXTS])
            inside[name] = copy.deepcopy(inside[key]) if random.random() < 0.7 else hostile(random)
        elif kind == 5 and isinstance(inside[key], int):
            inside[key] = random.choice([*NUMBERS, inside[key] + 1, inside[key] - 1])
        else:
            inside.insert(random.randint(0, len(inside)), copy.deepcopy(inside[key]))
    return tree


def _has(inside, key):
    return key in inside if isinstance(inside, dict) else key < len(inside)


def mutate_bytes(data, random):
    data = bytearray(data)
    place = random.randrange(len(data) + 1)
    length = random.choice([1, 8, 100])
    kind = random.randint(0, 4)
    if kind == 0:
        data[min(place, len(data) - 1)] ^= 1 << random.randint(0, 7)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        del data[place : place + length]
    elif kind == 3:
        data[place : place + length] = bytes(random.randrange(256) for _ in range(length))
    else:
        data += bytes(length)
    return bytes(data)


def mutate_safetensors(data, random):
    """A safetensors file with another header, or other data."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = random.randint(0, 5)
    if kind == 0:
        return mutate_bytes(data, random)
    if kind == 1:  # row numbers, maybe
        rest = mutate_bytes(rest, random)
        text = json.dumps(header).encode()
    elif kind == 2:
        text = random.choice([b"[" * 100_000, b"{}", b"[]", b"3", b"\xff", b'{"a":1,"a":2}'])
    elif kind == 3 and len(header) > 1:  # a huge tensor, so that sizes agree nowhere
        entry = header[random.choice([name for name in header if name != "__metadata__"])]
        entry["shape"] = [random.choice([0, 2**40, 2**62]), *entry["shape"][1:]]
        text = json.dumps(header).encode()
    else:
        text = json.dumps(mutate(header, random)).encode("utf-8", "replace")
    size = random.choice([len(text)] * 8 + [0, 2**63, len(text) + 1])
    return size.to_bytes(8, "little") + text + rest


def replace_file(file, outside, random):
    """Put something else in place of a file."""
    kind = random.randint(0, 4)
    content = file.read_bytes()
    file.unlink()
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        outside.joinpath("copy").write_bytes(content)
        file.symlink_to(outside / "copy")
    elif kind == 3:
        file.symlink_to("/dev/zero")


def make_good(folder):
    """A folder of checkpoints with a merged piece and deltas, and exports."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("recsys.train.checkpoint.writer._MOST_DELTAS", 2)
        monkeypatch.setattr("recsys.train.checkpoint.blocks.BLOCK_BYTES", 3000)
        training = make_training()
        checkpoints = Checkpoints(
            folder / "saved", model=training.model, optimizers=training.optimizers
        )
        for number in range(1, 6):
            training.step(number, most=60)
            checkpoints.save(state={"step": number, "more": (torch.arange(3), {1: None})})
            checkpoints.wait()
            checkpoints.finish_merge()
            if number == 3:
                export_checkpoint(folder / "saved", folder / "whole")
        checkpoints.close()
        export_delta(folder / "saved", folder / "delta", 3)


def forge(folder, random):
    """Damage a copy of the good files; whether that of a checkpoint."""
    saved = folder / "saved"
    manifests = sorted(saved.glob("*.json"))
    kind = random.randint(0, 9)
    if kind <= 3:
        file = random.choice(manifests)
        content = json.loads(file.read_text())
        inside = random.choice(["", "", "arrays", "tables", "pieces", "state", "state"])
        if inside:
            content[inside] = mutate(content[inside], random)
        else:
            content = mutate(content, random)
        file.write_text(json.dumps(content))
    elif kind <= 5:  # the checksums are made right again
        files = sorted(saved.rglob("*.safetensors"))
        file = random.choice(files)
        data = mutate_safetensors(file.read_bytes(), random)
        file.write_bytes(data)
        for manifest in manifests:
            content = json.loads(manifest.read_text())
            for piece in content["pieces"]:
                for block in piece["blocks"]:
                    if (piece["folder"], block["file"]) == (file.parent.name, file.name):
                        block |= {"num_bytes": len(data), "crc32": zlib.crc32(data)}
            manifest.write_text(json.dumps(content))
    elif kind == 6:
        file = random.choice(sorted(path for path in saved.rglob("*") if path.is_file()))
        if random.random() < 0.5:
            replace_file(file, folder / "outside", random)
        else:
            file.write_bytes(mutate_bytes(file.read_bytes(), random))
    elif kind == 7:
        text = random.choice([*TEXTS, "[" * 100_000, '{"a":' * 5000, "00000009.json"])
        file = random.choice([saved / "LAST", *manifests])
        file.write_text(text, errors="replace")
    else:
        file = folder / random.choice(["whole", "delta"])
        if random.random() < 0.1:
            replace_file(file, folder / "outside", random)
        else:
            file.write_bytes(mutate_safetensors(file.read_bytes(), random))
    return kind <= 7


def read_one(folder, random, *, is_checkpoint):
    """Do one of the things that read checkpoints and exports."""
    saved, number = folder / "saved", random.choice([None, None, 4, 5])
    kind = random.randint(0, 3) if is_checkpoint else 4
    if kind == 4:
        apply_deltas(folder / "whole", [folder / "delta"], folder / "out")
        return
    training = make_training()
    given = {"model": training.model, "optimizers": training.optimizers}
    if kind == 0:
        load_checkpoint(saved, **given, number=number)
    elif kind == 1:
        checkpoints = Checkpoints(saved, **given, after=number or 5)
        for step in range(3):
            training.step(step)
            checkpoints.save()
            checkpoints.wait()
        checkpoints.finish_merge()
        checkpoints.close()
    elif kind == 2:
        export_checkpoint(saved, folder / "out", number)
    else:
        export_delta(saved, folder / "out", random.choice([1, 2, 3, 4]))


@contextmanager
def bounded():
    """Bound the time, and the memory of the process."""

    def on_alarm(*_):
        raise TimeIsUpError

    [num_pages, *_] = Path("/proc/self/statm").read_text().split()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = int(num_pages) * resource.getpagesize() + MORE_BYTES
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TimeIsUpError(BaseException):  # no reader may catch it
    pass


def run_case(good, folder, random):
    """Run one case; returns "done", or the class of the error."""
    shutil.copytree(good, folder)
    (folder / "outside").mkdir()
    is_checkpoint = forge(folder, random)
    outside = {path: path.lstat() for path in folder.joinpath("outside").iterdir()}
    kept = {path.name for path in folder.iterdir()}
    outcome, error = "done", None
    with warnings.catch_warnings(record=True), bounded():
        warnings.simplefilter("always")
        try:
            read_one(folder, random, is_checkpoint=is_checkpoint)
        except (RecsysError, OSError) as raised:
            outcome, error = type(raised).__name__, raised
    message = str(error)
    assert "allocate" not in message, message[:500]
    assert len(message) < 5000, message[:500]
    if error is not None:
        assert isinstance(error, RecsysError) or str(folder) in message, message
        assert not isinstance(error, AlreadyExists), message
        assert {path.name for path in folder.iterdir()} <= kept
    assert {path: path.lstat() for path in outside} == outside
    shutil.rmtree(folder)
    return outcome
