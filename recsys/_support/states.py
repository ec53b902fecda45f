"""Checks that a saved state is of the object that loads it; values are those of `state_dict`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["require_same", "require_state"]


def require_state(location: str, state: Any, keys: Collection[str]) -> Mapping[str, Any]:
    """A state, which must have these keys and no others.

    Args:
        location: The owner of the state, for errors, such as "loader state".
        state: What the owner's `state_dict` returned once.
        keys: The keys.

    Raises:
        ConfigError: it is no mapping with these keys.
    """
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ConfigError(
            f"{location} must be a mapping with the keys {sorted(keys)}, got "
            f"{reprlib.repr(state)}; pass the result of state_dict()"
        )
    return state


def require_same(owner: str, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check entries of a state that must be as the `values` of its owner.

    Raises:
        ConfigError: one differs.
    """
    for key, own in values.items():
        # Not only `!=`: True equals 1.
        if type(state[key]) is not type(own) or state[key] != own:
            raise ConfigError(
                f"{owner} state: {key} is {state[key]!r}, but this {owner} has {own!r}; use the "
                f"arguments of the {owner} that was saved"
            )
