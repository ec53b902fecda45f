"""Packages that import their public names when they are first used, because PyTorch takes seconds.

A package writes its imports under `TYPE_CHECKING`, for type checkers, and otherwise:

    __getattr__, __dir__ = lazy_names(__name__, {"Store": "store"})
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["lazy_names"]


def lazy_names(
    package: str, modules: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        modules: The module that each public name is from, relative to the package; ".batch" is
            one beside the package.
        subpackages: Subpackages and modules that are names of the package, too.
    """

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *subpackages})

    return get, names
