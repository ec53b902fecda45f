"""Methods that users' subclasses override without others that belong with them."""

from __future__ import annotations

__all__ = ["fits_override"]


def fits_override(kind: type, method: str, other: str) -> bool:
    """Whether `method` of a class knows what its `other` does.

    If a subclass overrides `other` alone, it inherits a `method` that does not know of that.
    """
    for each in kind.__mro__:
        if method in vars(each):
            return True
        if other in vars(each):
            return False
    return False
