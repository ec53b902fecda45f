"""The size gate: counts the project and compares the counts with house.toml.

    python tests/house.py            fails where a count has risen
    python tests/house.py --lower    writes counts that have fallen into house.toml
    python tests/house.py --list     names the functions that the counted steps call

Of the `.py` files that git tracks it counts statements (`ast.stmt`, docstrings included) of each
room and top folder; tokens without comments and docstrings, which must fall at least 0.9 times as
much; files on circles of imports, type-only imports included; imports of private modules in tests;
calls of the package's own Python functions in a step of embeddings, and the files of these.

A room may rise for a reason. Its line then has `raised = N` and `reason = "what the user gets"`.
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import tomli_w

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "house.toml"
TOKENS_FALL_AT_LEAST = 0.9  # times as much as statements
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def sources():
    """Text of every tracked Python file by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return {path: (ROOT / path).read_text() for path in listed if (ROOT / path).exists()}


def num_statements(tree):
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def num_tokens(text, tree):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in NOT_CODE and token.start not in docstrings for token in tokens)


def room_of(path, rooms):
    """The longest room of house.toml that a file of the package lies in: a folder, or a file."""
    inside = [room for room in rooms if path == room or path.startswith(f"{room}/")]
    return max(inside, key=len)


def module_of(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(tree, modules):
    """Modules of the package that a file imports, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules


def files_on_circles(imports):
    """Modules from which their imports lead back to themselves."""

    def reaches_itself(module):
        seen, ahead = set(), [*imports[module]]
        while ahead:
            found = ahead.pop()
            if found == module:
                return True
            if found not in seen:
                seen.add(found)
                ahead += imports[found]
        return False

    return sorted(module for module in imports if reaches_itself(module))


def private_imports(trees, public):
    """Imports of modules that are not public, in tests outside tests/unit."""
    return sum(
        len({name for name in _package_modules(tree) if name not in public})
        for path, tree in trees.items()
        if path.startswith("tests/") and not path.startswith("tests/unit/")
    )


def _package_modules(tree):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in names if name.split(".")[0] == "recsys")


class Calls:
    """Calls of the package's own Python functions in this thread; compiled kernels are none."""

    def __init__(self):
        self.found = Counter()

    def __enter__(self):
        package = str(ROOT / "recsys")

        def note(frame, event, _):
            code = frame.f_code
            is_function = code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>")
            if event == "call" and is_function and code.co_filename.startswith(package):
                self.found[code.co_filename[len(package) + 1 :], code.co_qualname] += 1

        sys.setprofile(note)
        return self.found

    def __exit__(self, *_):
        sys.setprofile(None)


def steps_of_embeddings():
    """Own calls of a step of one group of tables: resident, tiered, tiered with look-ahead."""
    import torch

    from recsys.batch import JaggedIds
    from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig

    keys, num_rows, dim, batch_size = [f"f{n}" for n in range(26)], 20_000, 16, 2048
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(13):
        drawn = torch.rand(len(keys), batch_size, generator=generator)
        ids = (num_rows**drawn).long() - 1  # Zipf-like: a few rows get most lookups
        batches.append(JaggedIds.from_one_hot(keys, ids))

    def calls_of_a_step(budget, *, ahead):
        tables = [
            TableConfig(
                name=f"t{key}", num_embeddings=num_rows, embedding_dim=dim, feature_names=[key]
            )
            for key in keys
        ]
        module = HotColdEmbeddingBagCollection(
            tables, optimizer=SGD(lr=0.1), auto_apply=False, budget=budget
        )

        def step(n):
            if ahead:
                module.prefetch(batches[n + 1])
            pooled = module(batches[n])
            module.row_optimizer.zero_grad()
            pooled.values().sum().backward()
            module.row_optimizer.step()

        for n in range(9):
            step(n)
        found = []
        for n in range(9, 12):
            with Calls() as of_step:
                step(n)
            found.append(of_step)
        return min(found, key=Counter.total)  # a step beside other work may wait for transfers

    budget = len(keys) * num_rows * (4 + dim * 4 // 5)  # the row map, and a fifth of the rows
    return {
        "resident": calls_of_a_step(None, ahead=False),
        "tiered": calls_of_a_step(budget, ahead=False),
        "lookahead": calls_of_a_step(budget, ahead=True),
    }


def counts(house):
    """All that house.toml limits, as it is now, in its form."""
    texts = sources()
    trees = {path: ast.parse(text) for path, text in texts.items()}
    rooms, folders = {}, {}
    for path, tree in trees.items():
        counted = {"statements": num_statements(tree), "tokens": num_tokens(texts[path], tree)}
        top = path.split("/")[0]
        inside = [folders.setdefault(top, Counter())]
        if top == "recsys":
            inside.append(rooms.setdefault(room_of(path, house["rooms"]), Counter()))
        for found in inside:
            found.update(counted)
    modules = {module_of(path) for path in trees if path.startswith("recsys/")}
    imports = {
        module_of(path): imports_of(tree, modules) - {module_of(path)}
        for path, tree in trees.items()
        if path.startswith("recsys/")
    }
    only_fall = {
        "files_on_import_circles": len(files_on_circles(imports)),
        "private_imports_in_tests": private_imports(trees, {*house["public"]}),
    }
    for step, found in steps_of_embeddings().items():
        only_fall[f"calls_of_a_{step}_step"] = found.total()
        only_fall[f"files_of_a_{step}_step"] = len({file for file, _ in found})
    return {"rooms": rooms, "folders": folders, "only_fall": only_fall}


def ceiling(limit):
    return limit["statements"] + (limit.get("raised", 0) if limit.get("reason") else 0)


def complaints(house, now):
    """What has risen, a line each."""
    for kind in ("rooms", "folders"):
        for name, limit in house[kind].items():
            found = now[kind][name]["statements"] if name in now[kind] else 0
            if found > ceiling(limit):
                yield (
                    f"{name} has {found} statements, at most {ceiling(limit)}; take something out,"
                    f" or write raised and reason into its line of house.toml"
                )
    for name in now["folders"].keys() - house["folders"].keys():
        yield f"{name} is a top folder that house.toml does not name"
    for name, limit in house["folders"].items():
        if "begin" in limit and name in now["folders"]:
            begin, found = limit["begin"], now["folders"][name]
            fell = {count: 1 - found[count] / begin[count] for count in begin}
            if fell["tokens"] < TOKENS_FALL_AT_LEAST * fell["statements"]:
                yield (
                    f"{name}: statements fell by {fell['statements']:.1%}, tokens by only"
                    f" {fell['tokens']:.1%}; code is not made dense for the count"
                )
    for name, found in now["only_fall"].items():
        if found > house["only_fall"].get(name, found):
            yield f"{name}: {found}, at most {house['only_fall'][name]}"


def lower(house, now):
    """Counts that have fallen, written into house.toml."""
    for kind in ("rooms", "folders"):
        house[kind] = {name: limit for name, limit in house[kind].items() if name in now[kind]}
        for name, limit in house[kind].items():
            found = now[kind][name]["statements"]
            if found <= limit["statements"]:
                limit["statements"] = found
                limit.pop("raised", None)
                limit.pop("reason", None)
    for name, found in now["only_fall"].items():
        if "lookahead" not in name:  # its calls vary with what a transfer has reached
            house["only_fall"][name] = min(found, house["only_fall"].get(name, found))
    lines = [HOUSE.read_text().split("\n\n")[0], "", f"public = {_inline(house['public'])}"]
    for kind in ("rooms", "folders"):
        lines += ["", f"[{kind}]"]
        lines += [f'"{name}" = {_inline(limit)}' for name, limit in house[kind].items()]
    lines += ["", "[only_fall]", *(f"{name} = {n}" for name, n in house["only_fall"].items())]
    HOUSE.write_text("\n".join(lines) + "\n")


def _inline(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return tomli_w.dumps({"it": value}).strip().removeprefix("it = ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lower", action="store_true", help="write down what has fallen")
    parser.add_argument("--list", action="store_true", help="name the functions that steps call")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.list:
        for step, found in steps_of_embeddings().items():
            print(f"{step}: {found.total()} calls, {len({file for file, _ in found})} files")
            for (file, function), count in sorted(found.items()):
                print(f"    {count:4} {file}: {function}")
        return
    house = tomllib.loads(HOUSE.read_text())
    now = counts(house)
    if options.lower:
        lower(house, now)
    found = [*complaints(house, now)]
    for complaint in found:
        print(f"house: {complaint}")
    total = now["folders"]["recsys"]["statements"]
    goal = sum(limit["goal"] for limit in house["rooms"].values())
    print(f"house: recsys has {total:,} statements; the goals of its rooms are {goal:,}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
