"""Ablations: one configuration in variations, each trained with several seeds."""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.ablate.run import ablate

__all__ = ["ablate"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"ablate": "run"})
