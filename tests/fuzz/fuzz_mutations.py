"""Ways to damage files and values. Every function takes the `Random` that decides.

Hypothesis supplies it in tests, and a seed does in `make fuzz`, so each case can be run again.
"""

import ast
import io
import json
import os
import re
import shutil
import struct
import warnings
import zipfile
from copy import deepcopy

import numpy as np

HUGE = (2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
TEXTS = (
    "",
    "..",
    "../../outside",
    "/etc/passwd",
    "a/b",
    "x" * 5000,
    "\x00",
    "\ud800",
    "\N{BOM}",
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "\n",
)
VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    -(2**63),
    [],
    {},
    [[]],
    [None] * 20,
    {"a": {"b": []}},
)
_TOKENS = (b"\x00", b"\xff", b"-", b"\n", b"\r", b"\t", b"9" * 50, b"[" * 2000, b"{", b'"', b"nan")


def hostile_value(random):
    """A JSON value of a kind that no reader expects."""
    value = random.choice([random.choice(VALUES), random.choice(HUGE), random.choice(TEXTS)])
    return deepcopy(value)  # the caller may change it


def mutate_bytes(data, random):
    """The bytes with one to three local faults."""
    data = bytearray(data)
    for _ in range(random.randint(1, 3)):
        place = random.randint(0, len(data))
        length = min(len(data) - place, random.choice([1, 2, 8, 100]))
        kind = random.randint(0, 8)
        if kind == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << random.randint(0, 7)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = data[place : place + length] * random.choice([1, 2, 50])
        elif kind == 4:
            other = random.randint(0, len(data))
            data[place : place + length] = data[other : other + length]
        elif kind == 5:
            data[place:place] = random.choice(_TOKENS)
        elif kind == 6:
            data[place : place + length] = bytes(random.randint(0, 255) for _ in range(length))
        elif kind == 7:
            data += bytes(random.choice([1, 7, 4096]))
        else:
            data = bytearray(_with_other_number(bytes(data), random))
    return bytes(data)


def cut_bytes(data, random):
    """The begin of the bytes."""
    return data[: random.randint(0, max(len(data) - 3, 0))]  # without what ends the JSON


def _with_other_number(data, random):
    numbers = list(re.finditer(rb"\d+", data[:20_000]))
    if not numbers:
        return data
    found = random.choice(numbers)
    new = str(random.choice([*HUGE, -1, 0, 1, int(found[0]) + 1])).encode()
    return data[: found.start()] + new + data[found.end() :]


def mutate_tree(tree, random):
    """A JSON value with one to three nodes replaced, removed, added or exchanged."""
    tree = json.loads(json.dumps(tree))
    for _ in range(random.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return hostile_value(random)
        inside, key = random.choice(places)
        kind = random.randint(0, 5)
        if kind <= 2:
            inside[key] = hostile_value(random)
        elif kind == 3:
            del inside[key]
        elif kind == 4:
            other, place = random.choice(places)
            inside[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else None
        elif isinstance(inside, dict):
            inside[random.choice(TEXTS)] = hostile_value(random)
        else:
            inside.append(hostile_value(random))
    return tree


def _keys(inside):
    return inside if isinstance(inside, dict) else range(len(inside))


def _places(tree):
    todo = [tree]
    while todo:
        inside = todo.pop()
        for key in list(_keys(inside)):
            yield inside, key
            if isinstance(inside[key], dict | list):
                todo.append(inside[key])


def mutate_json(data, random):
    """JSON text with damaged nodes; at times nested deeply, or damaged as bytes."""
    kind = random.randint(0, 9)
    if kind == 0:
        return mutate_bytes(data, random)
    if kind == 1:
        depth = random.choice([100, 5000, 100_000])
        return random.choice([b"[" * depth, b'{"a":' * depth + b"0" + b"}" * depth])
    return json.dumps(mutate_tree(json.loads(data), random)).encode("utf-8", "surrogatepass")


def mutate_json_lines(data, random):
    """JSON lines, one of them damaged."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    if lines[place].startswith(b"{"):
        lines[place] = mutate_json(lines[place], random)
    elif random.random() < 0.5:
        lines[place] = random.choice([b"null", b"[]", b"\xff", b'"x"', b"{}", b"1"])
    return b"\n".join(lines)


def mutate_npy(data, random):
    """An array in numpy's format with another header, another type, or damaged bytes."""
    kind = random.randint(0, 6)
    array = np.load(io.BytesIO(data))
    if kind == 0:
        return mutate_bytes(data, random)
    if kind == 1:
        return _npy(
            random.choice(
                [
                    array.astype(object),
                    array.astype(str),
                    array.astype(bool),
                    array.astype(np.complex64),
                    array.astype(">f8"),
                    array.astype(np.float16),
                    array.reshape(-1),
                    array[..., None],
                    array[:0],
                    np.asfortranarray(array)[::2],
                    np.zeros((3, 0, 5), array.dtype),
                    np.array(5, array.dtype),
                    -array.astype(np.int64) - 1,
                    array.astype(np.float64) * np.nan,
                    array.astype(np.float64) + 1e300,
                ]
            )
        )
    if kind == 2:  # the data of another array, with the same header
        return data[:-1] if random.random() < 0.5 else data + b"\0"
    version = random.choice([b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\0\0"])
    header = ast.literal_eval(data[10 : 10 + struct.unpack("<H", data[8:10])[0]].decode())
    rest = data[10 + struct.unpack("<H", data[8:10])[0] :]
    if kind == 3:
        shape = list(header["shape"]) or [1]
        shape[random.randrange(len(shape))] = random.choice([*HUGE, -1, 0, 1, True, 1.5, "3"])
        header["shape"] = tuple(shape)
    elif kind == 4:
        header["descr"] = random.choice(
            ["|O", "<f99", "<i8", "|V9999999999", "x", [("a", "<i4")], "<U99999999", 5, ""]
        )
    elif kind == 5:
        header[random.choice(["extra", "fortran_order"])] = random.choice([True, None, 3])
    text = repr(header).encode("utf-8", "replace")
    if kind == 6:
        text = random.choice(
            [b"(" * 9000, b"{'a': " * 500, b"'" * 9, b"\t\n 1L", text * 2, b"9" * 99]
        )
    length = random.choice([len(text)] * 6 + [0, 1, 65_535, 2**32 - 1])
    size = "<H" if version == b"\1\0" else "<I"
    length = min(length, 65_535) if size == "<H" else length
    return b"\x93NUMPY" + version + struct.pack(size, length) + text + rest


def _npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def mutate_npz(data, random, mutate_member=mutate_npy):
    """An archive with a damaged, missing, renamed, compressed or encrypted member."""
    if random.randint(0, 3) == 0:
        return mutate_bytes(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    kind = random.randint(0, 9)
    if kind <= 4:
        members[name] = mutate_member(members[name], random)
    elif kind == 5:
        del members[name]
    elif kind == 6:
        members[random.choice(["other", "../../out", "/etc/x", "x" * 5000]) + ".npy"] = members.pop(
            name
        )
    elif kind == 7:  # a bomb: a megabyte of zeros for each kilobyte
        members[name] = members[name] + bytes(random.choice([2**20, 2**26]))
    method = random.choice([0, 8, 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as archive:
        warnings.simplefilter("ignore")
        for member, content in members.items():
            archive.writestr(member, content)
            if kind == 8 and member == name:
                archive.writestr(member, b"again")  # a name twice
    made = stream.getvalue()
    if kind == 9:  # a directory that states other sizes, flags or methods than there are
        place = made.rfind(b"PK\1\2") + random.choice([8, 10, 20, 24, 42])
        new = struct.pack("<I", random.choice([0, 1, 9, 2**31, 2**32 - 1]))
        made = made[:place] + new + made[place + 4 :]
    return made


def mutate_safetensors(data, random):
    """A safetensors file with a damaged header."""
    kind = random.randint(0, 3)
    if kind == 0:
        return mutate_bytes(data, random)
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if kind == 1:
        return struct.pack("<Q", random.choice([0, 1, length - 1, 2**40, 2**64 - 1])) + data[8:]
    header = mutate_json(header, random)
    return struct.pack("<Q", len(header)) + header + rest


def mutate_file(file, random, mutate):
    """Damage a file: its content, mostly; else what there is under its name."""
    kind = random.randint(1, 40)
    if kind > 5:
        file.write_bytes(mutate(file.read_bytes(), random))
        return
    content = file.read_bytes()
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(file.name)  # a loop
    elif kind == 3:
        os.mkfifo(file)
    elif kind == 4:
        file.symlink_to("/dev/zero")
    elif kind == 5:
        place = file.with_name(f"{file.name}.elsewhere")
        place.write_bytes(content)
        file.symlink_to(place)


def copy_folder(folder, to):
    """Copy a folder of small files."""
    shutil.copytree(folder, to, symlinks=True)
    return to
