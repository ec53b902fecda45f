"""Code of the user's: classes that configurations name, subclasses, lines that warnings name."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "current_folder_last",
    "fits_override",
    "import_class",
    "plain_warnings",
    "warn_caller",
]

_SKIPPED = ("recsys", "torch", "contextlib", "copy")

_T = TypeVar("_T")


@contextmanager
def current_folder_last() -> Iterator[None]:
    """The current folder is searched for modules, after all others."""
    folder = os.getcwd()  # noqa: PTH109  # sys.path has strings
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        yield
    finally:
        if is_new:
            sys.path.remove(folder)


def import_class(key: str, name: str, base: type[_T], base_name: str) -> type[_T]:
    """The class that `module:Class` names; the current folder is searched last.

    Args:
        key: The key of the configuration, for errors.
        name: Its value.
        base: The class must derive from this one.
        base_name: Its name, for errors.

    Raises:
        ConfigError: there is no such module or class, or it does not derive from `base`.
    """
    module_name, _, class_name = name.partition(":")
    try:
        with current_folder_last():
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} {name!r}: module {module_name} cannot be imported ({error}); install it, "
            "or run the command in the folder that has it"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{key} {name!r}: {class_name} must be a class in {module_name} that derives from "
            f"{base_name}, got {found!r}"
        )
    return found


def fits_override(kind: type, method: str, other: str) -> bool:
    """Whether `method` of a class knows what its `other` does.

    If a subclass overrides `other` alone, it inherits a `method` that does not know of that.
    """
    for base in kind.__mro__:
        if method in vars(base):
            return True
        if other in vars(base):
            return False
    return False


def warn_caller(message: str) -> None:
    """Warn, with the innermost line outside recsys and torch as the place."""
    stacklevel, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _SKIPPED:
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(message, stacklevel=stacklevel + 1)


@contextmanager
def plain_warnings(program: str) -> Iterator[None]:
    """Print warnings as "PROGRAM: warning: MESSAGE" within the `with` block, without source code.

    Other categories than `UserWarning`, which recsys raises, are printed as before.
    """
    with_source = warnings.formatwarning

    def format_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category is not UserWarning:
            return with_source(message, category, filename, lineno, line)
        return f"{program}: warning: {message}\n"

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = with_source
