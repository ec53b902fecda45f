"""Ways to damage files and values. Every function takes the `Random` that decides.

Hypothesis supplies it in tests, and a seed does in `make fuzz`, so each case can be run again.
"""

import io
import json
import os
import re
import struct
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
        place, other = random.randint(0, len(data)), random.randint(0, len(data))
        length = random.choice([1, 2, 8, 100])
        piece = data[place : place + length]
        changes = (
            b"",
            bytes([piece[0] ^ 1 << random.randint(0, 7)]) + piece[1:] if piece else b"\0",
            piece * random.choice([2, 3, 51]),
            data[other : other + length],
            random.choice(_TOKENS) + piece,
            bytes(random.randint(0, 255) for _ in piece),
        )
        data[place : place + length] = random.choice(changes)
        if random.random() < 0.3:
            longer = data + bytes(random.choice([1, 7, 4096]))
            data = random.choice([data[:place], longer, _with_other_number(data, random)])
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
        kind = random.randint(0, 4)
        if kind <= 2:
            inside[key] = hostile_value(random)
        elif kind == 3:
            del inside[key]
        elif isinstance(inside, dict):
            inside[random.choice(TEXTS)] = deepcopy(inside[key])
        else:
            inside.append(hostile_value(random))
    return tree


def _places(tree):
    todo = [tree]
    while todo:
        inside = todo.pop()
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
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
    lines = data.splitlines()
    place = random.randrange(len(lines))
    others = (b"null", b"[]", b"\xff", b'"x"', b"{}", b"1")
    damaged = mutate_json(lines[place], random)
    lines[place] = random.choice([damaged, damaged, random.choice(others)])
    return b"\n".join(lines)


def mutate_npy(data, random):
    """An array in numpy's format with other values, of another type or shape, or damaged bytes."""
    array = np.load(io.BytesIO(data))
    kind = random.randint(0, 4)
    if kind == 0:
        return mutate_bytes(data, random)
    if kind == 1:  # the header states another size
        return data[:-1] if random.random() < 0.5 else data + b"\0"
    if kind == 2:  # a header with another number or another type
        head = _with_other_number(data[10:128], random).replace(b"<", random.choice([b"<", b">"]))
        return data[:10] + head[:118].ljust(118) + data[128:]
    others = [
        *(array.astype(kind) for kind in (object, str, bool, np.complex64, ">f8", np.float16)),
        *(array.reshape(-1), array[..., None], array[:0], np.array(5, array.dtype)),
        *(np.asfortranarray(array)[::2], np.zeros((3, 0, 5), array.dtype)),
        -array.astype(np.int64) - 1,
        array.astype(np.float64) * np.nan,
    ]
    return npy(random.choice(others))


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def mutate_npz(data, random, mutate_member):
    """An archive with a damaged, missing, renamed, compressed or huge member."""
    kind = random.randint(0, 8)
    if kind <= 1:
        return mutate_bytes(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    content = members.pop(name)
    if kind == 2:
        name = random.choice(["other", "../../out", "/etc/x", "x" * 5000]) + ".npy"
    elif kind == 3:  # a bomb: a megabyte of zeros for each kilobyte
        content += bytes(random.choice([2**20, 2**26]))
    else:
        content = mutate_member(content, random)
    if kind != 4:
        members[name] = content
    stream = io.BytesIO()
    method = random.choice([0, 8, 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(stream, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return stream.getvalue()


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
    moved = file.rename(file.with_name(f"{file.name}.elsewhere"))
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        os.mkfifo(file)
    else:  # the first is a loop
        file.symlink_to({3: file.name, 4: "/dev/zero", 5: moved}[kind])
