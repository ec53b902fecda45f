"""The docstring of every public name says what a caller must know.

Checked are the functions and classes in `__all__` of the public modules, and the public methods of
these classes: arguments, and errors raised.
"""

import ast
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


def public_objects():
    """The public functions and classes; those of `recsys.distributed` where TorchRec is."""
    for name in MODULES:
        try:
            with warnings.catch_warnings(action="ignore"):  # of TorchRec
                module = importlib.import_module(name)
        except MissingDependency:
            continue
        for each in module.__all__:
            value = getattr(module, each)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{value.__module__}.{value.__qualname__}", value


def methods_of(kind):
    """The public methods that a class adds to those of its bases in recsys and TorchRec."""
    for name, function in inspect.getmembers(kind, lambda value: hasattr(value, "__qualname__")):
        owners = [base.__module__ for base in kind.__mro__ if name in vars(base)]
        is_added = [each.startswith(("recsys.", "torchrec.")) for each in owners].count(True) == 1
        if is_added and owners[0].startswith("recsys.") and not name.startswith("_"):
            yield f"{function.__module__}.{function.__qualname__}", function


OBJECTS = dict(public_objects())
CLASSES = {name: value for name, value in OBJECTS.items() if inspect.isclass(value)}
FUNCTIONS = {name: value for name, value in OBJECTS.items() if name not in CLASSES}
for each_class in CLASSES.values():
    FUNCTIONS |= methods_of(each_class)


def parameters_of(function):
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def arguments_in(docstring):
    """What stands before a colon in the section Args or Attributes, one name or several."""
    sections = re.findall(
        r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", f"{inspect.cleandoc(docstring)}\n", re.M
    )
    found = re.findall(r"^    \*{0,2}(\w+(?:, \w+)*):", "".join(sections), re.MULTILINE)
    return [name for names in found for name in names.split(", ")]


def raised_in(function):
    """The errors that a function itself raises by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    called = (each.func for each in raised if isinstance(each, ast.Call))
    return {each.id for each in called if isinstance(each, ast.Name) and each.id[0].isupper()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_and_raises(name):
    function = FUNCTIONS[name]
    docstring, names = inspect.getdoc(function), parameters_of(function)
    assert docstring
    assert arguments_in(docstring) in ([], names)
    if not re.search(r"; see `[\w.]+`\.$", docstring.splitlines()[0]):
        assert [each for each in names if not re.search(rf"\b{each}\b", docstring)] == []
    assert [each for each in raised_in(function) if each not in docstring] == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_what_it_is_and_takes(name):
    kind = CLASSES[name]
    assert kind.__doc__
    maker = next(base for base in kind.__mro__ if "__init__" in vars(base))
    # The keys of a configuration say what they mean; torch and TorchRec describe their arguments.
    is_described = issubclass(kind, Keys | BaseException) or getattr(kind, "_is_protocol", False)
    if is_described or not maker.__module__.startswith("recsys."):
        return
    assert set(parameters_of(kind)) <= set(arguments_in(maker.__doc__))


def test_enough_names_are_public_for_these_tests_to_mean_something():
    assert len(CLASSES) > 50
    assert len(FUNCTIONS) > 150
