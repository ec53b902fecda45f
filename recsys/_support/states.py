"""Checks a saved state before it is loaded. States come from files, so they may hold anything."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.untrusted import is_finite_number, is_int
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

__all__ = ["SavedState"]

_MOST = 2**63 - 1


class SavedState:
    """The entries of a state. Each method reads one entry and checks its type and its range.

    Args:
        place: The owner of the state, for errors, such as "loader state".
        entries: What the owner's `state_dict` returned once.
        keys: The keys that it must have, and no others.

    Raises:
        ConfigError: `entries` is no mapping with these keys; or, in a method, an entry has another
            type or is out of range.
    """

    def __init__(self, place: str, entries: Any, keys: Collection[str]) -> None:
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"{place} must be a mapping, got {reprlib.repr(entries)}; pass the result of "
                "state_dict()"
            )
        if set(entries) != set(keys):
            raise ConfigError(
                f"{place}: keys must be {sorted(keys)}, got {sorted(map(str, entries))}; pass the "
                "result of state_dict()"
            )
        self._place, self._entries = place, entries

    def __getitem__(self, key: str) -> Any:
        """An entry as it is, unchecked."""
        return self._entries[key]

    def whole(self, key: str, *, least: int = 0, most: int = _MOST) -> int:
        """A whole number in [least, most]."""
        value = self._entries[key]
        if not is_int(value, least, most):
            raise self.error(key, f"a whole number in [{least}, {most}]")
        return int(value)

    def wholes(self, key: str, length: int) -> list[int]:
        """A list of `length` whole numbers of at least 0."""
        values = self._entries[key]
        if (
            not isinstance(values, list | tuple)
            or len(values) != length
            or not all(is_int(value, 0) for value in values)
        ):
            raise self.error(key, f"a list of {length} whole numbers of at least 0")
        return list(values)

    def number(self, key: str, *, least: float = 0.0, most: float = inf) -> float:
        """A finite number in [least, most]."""
        value = self._entries[key]
        if not (is_finite_number(value) and least <= value <= most):
            raise self.error(key, f"a finite number in [{least:g}, {most:g}]")
        return float(value)

    def numbers(self, key: str, lengths: range) -> list[float]:
        """A list of finite numbers of at least 0, whose length is one of `lengths`."""
        values = self._entries[key]
        if (
            not isinstance(values, list | tuple)
            or len(values) not in lengths
            or not all(is_finite_number(value) and value >= 0 for value in values)
        ):
            lengths_in_words = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
            raise self.error(key, f"a list of {lengths_in_words} finite numbers of at least 0")
        return list(map(float, values))

    def items(self, key: str, lengths: Sequence[int], kind: str) -> list[Any]:
        """A list whose length is one of `lengths`; `kind` names what it holds, for the error."""
        values = self._entries[key]
        if not isinstance(values, list | tuple) or len(values) not in lengths:
            is_range = isinstance(lengths, range)
            count = f"at most {lengths[-1]}" if is_range else " or ".join(map(str, lengths))
            raise self.error(key, f"a list of {count} {kind}")
        return list(values)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._entries[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def tensor(self, key: str) -> Tensor:
        """A tensor (n,) of finite real numbers."""
        value = self._entries[key]
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() != 1
            or value.is_complex()
            or not bool(torch.isfinite(value).all())
        ):
            raise self.error(key, "a tensor (n,) of finite real numbers")
        return value

    def tensor_of(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this dtype and shape."""
        value = self._entries[key]
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype is not dtype
            or tuple(value.shape) != shape
        ):
            raise self.error(key, f"a tensor {shape} of {dtype}")
        return value

    def inner(self, key: str, keys: Collection[str]) -> SavedState:
        """A state inside this one, with these keys."""
        return SavedState(f"{self._place}: {key}", self._entries[key], keys)

    def require_same(self, owner: str, values: Mapping[str, Any]) -> None:
        """Check entries that must be as the `values` of the state's owner."""
        for key, own in values.items():
            # Not only `!=`: True equals 1.
            if type(self[key]) is not type(own) or self[key] != own:
                raise ConfigError(
                    f"{self._place}: {key} is {self[key]!r}, but this {owner} has {own!r}; use the "
                    f"arguments of the {owner} that was saved"
                )

    def error(self, key: str, rule: str) -> ConfigError:
        """The error about an entry that breaks a rule."""
        return ConfigError(
            f"{self._place}: {key} must be {rule}, got {reprlib.repr(self._entries[key])}; pass "
            "the result of state_dict()"
        )
