"""The docstring of every public name says what a caller must know.

Checked are the functions and classes in `__all__` of the public modules, and the public methods of
these classes: arguments, result, errors raised, shapes of tensors.
"""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import warnings

import pytest

from recsys.config import Keys
from recsys.errors import MissingDependency

MODULES = (
    "recsys",
    "recsys.config",
    "recsys.datasets",
    "recsys.distributed",
    "recsys.embeddings",
    "recsys.errors",
    "recsys.models",
    "recsys.pipeline",
    "recsys.train",
)
# A summary that begins with one of these says what a function does; another says what it returns.
VERBS = {
    *("Build", "Call", "Choose", "Combine", "Convert", "Count", "Evaluate", "Look", "Make", "Plan"),
    *("Prepare", "Put", "Read", "Replace", "Run", "Save", "Start", "Take", "Train", "Write"),
}
SECTION = re.compile(r"^(Args|Attributes|Raises|References|Returns|Shape|Yields):$")
SHAPE = re.compile(r"\((?:\*?\w+(?: [+*-] \w+)*),[^()]*\)|\(\)")


def public_objects():
    """The public functions and classes; those of `recsys.distributed` where TorchRec is."""
    for name in MODULES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of TorchRec
                module = importlib.import_module(name)
        except MissingDependency:
            continue
        for each in module.__all__:
            value = getattr(module, each)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{value.__module__}.{value.__qualname__}", value


def functions_of(kind):
    """The public methods that a class has of recsys, its own and inherited ones."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if base.__module__.startswith("recsys.") and not name.startswith("_"):
                found = getattr(value, "__func__", value)  # of a class method
                if isinstance(value, property | functools.cached_property):
                    found = getattr(value, "fget", None) or value.func
                is_described = is_torchrecs(kind, name) or overrides_ours(base, name)
                if inspect.isfunction(found) and not is_described:
                    yield f"{found.__module__}.{found.__qualname__}", found, value


def overrides_ours(kind, name):
    """Whether a base class of recsys describes a method, which this class overrides."""
    bases = (base for base in kind.__mro__[1:] if base.__module__.startswith("recsys."))
    return any(name in vars(base) for base in bases)


def is_torchrecs(kind, name):
    """Whether TorchRec describes a method, which recsys overrides."""
    return any(name in vars(b) for b in kind.__mro__ if b.__module__.startswith("torchrec."))


OBJECTS = dict(public_objects())
CLASSES = {name: value for name, value in OBJECTS.items() if inspect.isclass(value)}
FUNCTIONS = {name: (value, value) for name, value in OBJECTS.items() if name not in CLASSES}
for each_class in CLASSES.values():
    FUNCTIONS |= {name: (found, value) for name, found, value in functions_of(each_class)}


def sections_of(docstring):
    """The lines below each heading of a docstring; those above all headings are under ""."""
    sections, heading = {"": []}, ""
    for line in inspect.cleandoc(docstring).splitlines():
        found = SECTION.match(line)
        if found:
            heading = found[1]
            sections[heading] = []
        else:
            sections[heading].append(line.removeprefix("    "))
    return sections


def names_in(lines):
    """What stands before a colon at the beginning of a line, one name or several."""
    found = (re.match(r"\*{0,2}(\w+(?:, \w+)*):", line) for line in lines)
    return [name for match in found if match for name in match[1].split(", ")]


def parameters_of(function):
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def problems_of(function, value):
    """What the docstring of a function leaves out, in words."""
    docstring = function.__doc__
    if not docstring:
        yield "has no docstring"
        return
    sections = sections_of(docstring)
    signature = inspect.signature(function)
    summary = sections[""][0]
    shape = " ".join(sections.get("Shape", []))
    refers = re.search(r"; see `[\w.]+`\.$", summary)  # to another docstring

    names = parameters_of(function)
    if "Args" in sections:
        if names_in(sections["Args"]) != names:
            yield f"Args must be {names}, not {names_in(sections['Args'])}"
    elif not refers:  # then a sentence or Shape names each
        text = " ".join(sections[""])
        left = [name for name in names if not re.search(rf"`{name}\b", text)]
        left = [name for name in left if not re.search(rf"\b{name}\b", shape)]
        if left:
            yield f"Args are missing: {left}"

    returned = signature.return_annotation
    is_plain = isinstance(value, property | functools.cached_property | classmethod)
    if returned not in ("None", inspect.Signature.empty) and not is_plain and not refers:
        says = {"Returns", "Yields"} & set(sections) or "result" in shape
        if not says and summary.split()[0] in VERBS and " gives " not in summary:
            yield "Returns is missing"

    annotations = [each.annotation for each in signature.parameters.values()]
    kinds = {str(each).removesuffix(" | None") for each in (*annotations, returned)}
    has_tensors = "Tensor" in kinds or any(each.startswith("NDArray") for each in kinds)
    if has_tensors and not refers and not shape and not SHAPE.search(docstring):
        yield "the shapes of its tensors are missing"

    told = " ".join(sections.get("Raises", []))
    yield from (f"Raises lacks {name}" for name in raised_in(function) if name not in told)


def raised_in(function):
    """The errors that a function itself raises by name, sorted."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    called = (each.func for each in raised if isinstance(each, ast.Call))
    return sorted(
        {each.id for each in called if isinstance(each, ast.Name) and each.id[0].isupper()}
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_gives_and_raises(name):
    assert list(problems_of(*FUNCTIONS[name])) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_what_it_is_and_takes(name):
    kind = CLASSES[name]
    assert kind.__doc__
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False):
        return
    if issubclass(kind, Keys):  # its keys say what they mean
        return
    maker = next(base for base in kind.__mro__ if "__init__" in vars(base))
    if not maker.__module__.startswith("recsys."):  # torch or TorchRec describes its arguments
        return
    sections = sections_of(maker.__doc__)
    args, attributes = (names_in(sections.get(each, [])) for each in ("Args", "Attributes"))

    assert set(parameters_of(kind)) <= {*args, *attributes}
    assert set(args) <= set(inspect.signature(kind).parameters)


def test_enough_names_are_public_for_these_tests_to_mean_something():
    assert len(CLASSES) > 50
    assert len(FUNCTIONS) > 200
