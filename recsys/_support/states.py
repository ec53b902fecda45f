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
    from collections.abc import Callable, Collection, Sequence

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
        rule = f"a whole number in [{least}, {most}]"
        return int(self._read(key, rule, lambda value: is_int(value, least, most)))

    def wholes(self, key: str, length: int) -> list[int]:
        """A list of `length` whole numbers of at least 0."""
        kind = "whole numbers of at least 0"
        return self._list(key, f"{length} {kind}", (length,), lambda value: is_int(value, 0))

    def number(self, key: str, *, least: float = 0.0, most: float = inf) -> float:
        """A finite number in [least, most]."""
        rule = f"a finite number in [{least:g}, {most:g}]"
        return float(
            self._read(key, rule, lambda value: is_finite_number(value) and least <= value <= most)
        )

    def numbers(self, key: str, lengths: range) -> list[float]:
        """A list of finite numbers of at least 0, whose length is one of `lengths`."""
        count = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
        kind = f"{count} finite numbers of at least 0"
        found = self._list(key, kind, lengths, lambda value: is_finite_number(value) and value >= 0)
        return list(map(float, found))

    def items(self, key: str, lengths: Sequence[int], kind: str) -> list[Any]:
        """A list whose length is one of `lengths`; `kind` names what it holds, for the error."""
        is_range = isinstance(lengths, range)
        count = f"at most {lengths[-1]}" if is_range else " or ".join(map(str, lengths))
        return self._list(key, f"{count} {kind}", lengths, lambda _: True)

    def flag(self, key: str) -> bool:
        """True or false."""
        return bool(self._read(key, "true or false", lambda value: isinstance(value, bool)))

    def tensor(self, key: str) -> Tensor:
        """A tensor (n,) of finite real numbers."""
        found: Tensor = self._read(
            key,
            "a tensor (n,) of finite real numbers",
            lambda value: (
                isinstance(value, torch.Tensor)
                and value.dim() == 1
                and not value.is_complex()
                and bool(torch.isfinite(value).all())
            ),
        )
        return found

    def tensor_of(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this dtype and shape."""
        found: Tensor = self._read(
            key,
            f"a tensor {shape} of {dtype}",
            lambda value: (
                isinstance(value, torch.Tensor)
                and value.dtype is dtype
                and tuple(value.shape) == shape
            ),
        )
        return found

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

    def _read(self, key: str, rule: str, is_right: Callable[[Any], bool]) -> Any:
        value = self._entries[key]
        if not is_right(value):
            raise self.error(key, rule)
        return value

    def _list(
        self, key: str, kind: str, lengths: Sequence[int], is_right: Callable[[Any], bool]
    ) -> list[Any]:
        values = self._read(
            key,
            f"a list of {kind}",
            lambda each: (
                isinstance(each, list | tuple) and len(each) in lengths and all(map(is_right, each))
            ),
        )
        return list(values)
