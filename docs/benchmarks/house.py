"""How large the package is, and how many of its functions one step calls.

    python docs/benchmarks/house.py [--list]

Printed are (a) statements, classes and lines of `recsys/`, its largest files, and its folders with
more than 12 files; (b) the calls, and the files that they lie in, of one step of 26 resident tables
(forward, zero_grad, backward, step); (c) the same of a step of tiered tables that fetches rows and
writes some back, with those of the transfer thread. Calls are counted by `sys.setprofile`: compiled
kernels and comprehensions are none. `--list` names each function.
"""

from __future__ import annotations

import argparse
import ast
import gc
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numba.core.dispatcher import Dispatcher

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.train.loop.tier_report import describe_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

PACKAGE = Path(recsys.__file__).parent
NUM_TABLES, NUM_ROWS, DIM = 26, 1000, 16
BATCH_SIZE, TIERED_BATCH_SIZE = 128, 16
MOST_FILES_IN_A_FOLDER = 12
NUM_LARGEST = 10
NUM_WARM_STEPS, MOST_STEPS = 5, 50
TRANSFER_SECONDS = 0.1  # in which rows of one step have been written back
# Python 3.12 compiles comprehensions into the function around them.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Size(NamedTuple):
    """How large a file is."""

    statements: int
    classes: int
    lines: int


class Calls:
    """Counts calls of functions of the package, in every thread that starts after it."""

    def __init__(self) -> None:
        self.is_counting = False
        self.found: Counter[CodeType] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_counting or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE)) and code.co_name not in COMPREHENSIONS:
            self.found[code] += 1

    def describe(self, *, is_listed: bool) -> str:
        """How many calls in how many files; and which."""
        compiled = {
            each.py_func.__code__ for each in gc.get_objects() if isinstance(each, Dispatcher)
        }
        found = {
            (str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname): count
            for code, count in self.found.items()
            if code not in compiled
        }
        files: Counter[str] = Counter()
        for (file, _), count in found.items():
            files[file] += count
        lines = [f"{files.total()} calls in {len(files)} files"]
        if is_listed:
            for file, count in files.most_common():
                lines.append(f"  {file}: {count}")
                functions = {name: each for (other, name), each in found.items() if other == file}
                lines += [f"    {each} {name}" for name, each in functions.items()]
        return "\n".join(lines)


def size_of(file: Path) -> Size:
    """Statements but docstrings, classes, and lines of a source file."""
    text = file.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    num_docstrings = sum(
        isinstance(node, documented) and ast.get_docstring(node) is not None for node in nodes
    )
    num_statements = sum(isinstance(node, ast.stmt) for node in nodes) - num_docstrings
    num_classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    return Size(num_statements, num_classes, len(text.splitlines()))


def describe_package() -> str:
    """Sizes of the package, its largest files, and its large folders."""
    sizes = {file: size_of(file) for file in sorted(PACKAGE.rglob("*.py"))}
    total = [sum(column) for column in zip(*sizes.values(), strict=True)]
    lines = [
        f"{total[0]:,} statements, {total[1]} classes, {total[2]:,} lines in {len(sizes)} files"
    ]
    largest = sorted(sizes, key=lambda file: sizes[file].lines, reverse=True)[:NUM_LARGEST]
    lines += [
        f"  {sizes[file].lines} lines: {file.relative_to(PACKAGE.parent)}" for file in largest
    ]
    folders = Counter(file.parent for file in sizes)
    lines += [
        f"  {count} files: {folder.relative_to(PACKAGE.parent)}/"
        for folder, count in folders.most_common()
        if count > MOST_FILES_IN_A_FOLDER
    ]
    return "\n".join(lines)


def make_tables(budget: int | None) -> HotColdEmbeddingBagCollection:
    """Tables whose rows are updated in `row_optimizer.step()`."""
    tables = [
        TableConfig(name=f"table_{number}", num_embeddings=NUM_ROWS, embedding_dim=DIM)
        for number in range(NUM_TABLES)
    ]
    return HotColdEmbeddingBagCollection(
        tables, optimizer=SGD(lr=0.1), auto_apply=False, budget=budget
    )


def step(module: HotColdEmbeddingBagCollection, features: JaggedIds) -> None:
    """Forward, zero_grad, backward, step."""
    optimizer = module.row_optimizer
    assert optimizer is not None
    pooled = module(features)
    assert not isinstance(pooled, torch.Tensor)
    loss = pooled.values().square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_features(batch_size: int, generator: torch.Generator) -> JaggedIds:
    """One id for each table and sample."""
    keys = [f"table_{number}" for number in range(NUM_TABLES)]
    ids = torch.randint(0, NUM_ROWS, (NUM_TABLES, batch_size), generator=generator)
    return JaggedIds.from_one_hot(keys, ids)


def count_resident_step(calls: Calls) -> None:
    """Count the calls of a step of resident tables."""
    module, generator = make_tables(None), torch.Generator().manual_seed(0)
    batches = [make_features(BATCH_SIZE, generator) for _ in range(NUM_WARM_STEPS + 1)]
    for features in batches[:-1]:
        step(module, features)
    calls.found.clear()
    calls.is_counting = True
    step(module, batches[-1])
    calls.is_counting = False


def count_tiered_step(calls: Calls) -> None:
    """Count the calls of a step that fetches rows and writes rows back."""
    row_bytes = DIM * torch.float32.itemsize
    module = make_tables(NUM_TABLES * NUM_ROWS * row_bytes // 4)
    generator = torch.Generator().manual_seed(0)
    for number in range(MOST_STEPS):
        features = make_features(TIERED_BATCH_SIZE, generator)
        before = _moved_bytes(module)
        calls.found.clear()
        calls.is_counting = number >= NUM_WARM_STEPS
        step(module, features)
        time.sleep(TRANSFER_SECONDS)
        calls.is_counting = False
        after = _moved_bytes(module)
        if number >= NUM_WARM_STEPS and all(map(int.__lt__, before, after)):
            return
    raise RuntimeError("no step both fetched a row and wrote one back; give a smaller budget")


def _moved_bytes(module: HotColdEmbeddingBagCollection) -> list[int]:
    """Bytes that were fetched and written back until now."""
    described = describe_tiers(module)
    assert described is not None
    return [described["fetched_bytes"], described["written_back_bytes"]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name each function that is called")
    options = parser.parse_args(arguments)
    write = sys.stdout.write
    write(f"(a) recsys/: {describe_package()}\n")
    calls = Calls()
    count_resident_step(calls)
    write(f"(b) resident step: {calls.describe(is_listed=options.list)}\n")
    count_tiered_step(calls)
    write(f"(c) cold row's way: {calls.describe(is_listed=options.list)}\n")


if __name__ == "__main__":
    main()
