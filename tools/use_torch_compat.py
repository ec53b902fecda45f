"""Replace private names of torch in recsys by those of `recsys._support.torch_compat`.

    python tools/use_torch_compat.py   rewrite recsys/, add a test, list what is left for a person

Run it once, after `tools/move_rooms.py`, on a clean tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from move_rooms import tidy

# By where a name is imported from.
IMPORTS = {
    "torch._C": {
        "DisableTorchFunctionSubclass": "DisableTorchFunctionSubclass",
        "_are_functorch_transforms_active": "are_functorch_transforms_active",
        "_current_graph_task_id": "current_pass",
        "_get_tracing_state": "tracing_state",
        "_will_engine_execute_node": "is_node_in_pass",
    },
    "torch._C._autograd": {
        "_get_current_graph_task_keep_graph": "is_graph_kept",
        "_profiler_enabled": "is_profiler_enabled",
        "_top_saved_tensors_default_hooks": "top_saved_tensors_hooks",
    },
    "torch.optim.optimizer": {
        "_global_optimizer_post_hooks": "GLOBAL_STEP_POST_HOOKS",
        "_global_optimizer_pre_hooks": "GLOBAL_STEP_PRE_HOOKS",
    },
    "torch._C._functorch": {"is_batchedtensor": "is_batched"},
}
EXPRESSIONS = {
    f"{module}.{name}": new for module, names in IMPORTS.items() for name, new in names.items()
} | {
    "Variable._execution_engine.queue_callback": "queue_callback",
    "DistributedDataParallel._active_ddp_module": "active_ddp_module()",
    "_REQUIRES_GRAD.__set__": "set_plain_requires_grad",
    "_REQUIRES_GRAD.__get__": "plain_requires_grad",
    "_DATA.__get__": "plain_data",
    "_DATA.__set__": "set_plain_data",
    "_GRAD.__get__": "plain_grad",
    "_GRAD.__set__": "set_plain_grad",
}
# Names that other modules of recsys offer now.
MOVED = {
    "table_parameter": {
        "plain_grad": "plain_grad",
        "set_plain_grad": "set_plain_grad",
        "requires_grad": "plain_requires_grad",
    },
    "fused_lookup": {"NO_PASS": "NO_PASS"},
}
# Definitions that go, by module; "" for every one.
GONE = {
    "": {"_NO_PASS", "NO_PASS"},
    "table_parameter": {
        "_DATA",
        "_GRAD",
        "_REQUIRES_GRAD",
        "plain_grad",
        "requires_grad",
        "set_plain_grad",
    },
}
# Patterns in one module, and what they become; the names on the right are imported.
EDITS = [
    ("linear", r"torch\.ops\.mkldnn\._linear_pointwise\(", "onednn_linear("),
    (
        "linear",
        r"hasattr\(torch\.ops\.mkldnn, \"_linear_pointwise\"\)",
        "onednn_linear is not None",
    ),
    ("exchange", r"\n(?:# .*\n)*_SHARED = \((?:\n    .*)+\n\)\n", ""),
    ("exchange", r"\b_SHARED\b", "MODULE_HOOKS"),
    (
        "left_alone",
        r"table\.weight\._backward_hooks or table\.weight\._post_accumulate_grad_hooks",
        "has_gradient_hooks(table.weight)",
    ),
    ("table_parameter", r"return requires_grad\(self\)", "return plain_requires_grad(self)"),
    ("table_parameter", r"(?m)^    \"(requires_grad|(set_)?plain_grad)\",\n", ""),
    ("fused_lookup", r"(?m)^    \"NO_PASS\",\n", ""),
]
_CONSTANTS = {"_NO_PASS": "NO_PASS"}
_LEFT = re.compile(
    r"torch\._C\b|_execution_engine|(?<!recsys)\._version\b|getattr_static\(torch|_global_optimizer_"
    r"|_active_ddp|super\(torch\.autograd|mkldnn, \"_|mkldnn\._|_NO_PASS\b"
    r"|_post_accumulate_grad_hooks\b|\"_forward_hooks_with_kwargs\""
)


_TEST = r"""

PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|(?<!recsys)\._version\b|getattr_static\(\s*torch"
    r"|_global_optimizer_|_active_ddp_module|super\(torch\.autograd|mkldnn\._"
    r"|_post_accumulate_grad_hooks\b"
)


def test_no_other_module_of_recsys_names_them():
    files = Path(torch_compat.__file__).parents[1].rglob("*.py")

    found = [
        f"{file}: {private[0]}"
        for file in files
        if file.name != "torch_compat.py"
        for private in PRIVATE.finditer(file.read_text())
    ]

    assert found == []
"""


def main() -> int:
    """Rewrite every module but `torch_compat`."""
    root = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
    source = ast.parse((root / "recsys/_support/torch_compat.py").read_text())
    [offered] = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    for path in sorted((root / "recsys").rglob("*.py")):
        if path.name != "torch_compat.py":
            text = path.read_text()
            new = text
            for stem, pattern, replacement in EDITS:
                if path.stem == stem:
                    new, count = re.subn(pattern, replacement, new)
                    if not count:
                        print(f"note: {path.relative_to(root)} has no {pattern!r}")
            new = without(new, GONE[""] | GONE.get(path.stem, set()))
            new = with_imports(rename(new), offered)
            if new != text:
                path.write_text(new)
            for number, line in enumerate(new.splitlines(), 1):
                if _LEFT.search(line):
                    print(f"left: {path.relative_to(root)}:{number}: {line.strip()}")
    test = root / "tests/_support/test_torch_compat.py"
    test.write_text(test.read_text().replace("import ast\n", "import ast\nimport re\n", 1) + _TEST)
    return tidy(root)


def without(text: str, names: set[str]) -> str:
    """A module without some definitions at its top level, and without the comments above them."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if {each.id for each in targets if isinstance(each, ast.Name)} & names:
            first = node.lineno - 1
            while lines[first - 1].startswith("#"):
                first -= 1
            del lines[first : node.end_lineno]
    return "".join(lines)


def rename(text: str) -> str:
    """What a module says with the names of `torch_compat`, which it does not import yet."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    renamed = dict(_CONSTANTS)
    changes: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module
            stem = module.rpartition(".")[2]
            names = IMPORTS.get(module) or (MOVED.get(stem) if "recsys" in module else None) or {}
            renamed |= {each.name: names[each.name] for each in node.names if each.name in names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        new = None
        if isinstance(node, ast.ImportFrom) and {each.name for each in node.names} & set(renamed):
            kept = [each.name for each in node.names if each.name not in renamed]
            new = f"from {node.module} import {', '.join(kept)}" if kept else ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            new = renamed.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name in EXPRESSIONS:
                new = EXPRESSIONS[name]
            elif node.attr == "_version":
                new = f"version_of({ast.unparse(node.value)})"
            elif re.fullmatch(r"super\(torch\.autograd\.Function, \w+\)\.apply", name):
                new = f"plain_apply({name.split(', ')[1].split(')')[0]})"
        if new is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            if isinstance(node, ast.stmt) and not new:
                end = starts[node.end_lineno]  # with the comment behind it
            changes.append((begin, end, new))
    for begin, end, new in sorted(changes, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def with_imports(text: str, offered: list[str]) -> str:
    """The same with imports of those names of `torch_compat` that it has but does not define."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & set(offered) - known
    if not used:
        return text
    found = re.search(r"^(from|import) (?!__future__)", text, re.MULTILINE)
    assert found is not None
    statement = f"from recsys._support.torch_compat import {', '.join(sorted(used))}\n"
    return text[: found.start()] + statement + text[found.start() :]


if __name__ == "__main__":
    sys.exit(main())
